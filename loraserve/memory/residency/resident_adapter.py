"""Adapter with memory on the device: its state, from its arrival to its eviction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from loraserve.memory.devices.base import Footprint, PlacedAdapter
from loraserve.memory.eviction import Uses
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.types import Digest


class AdapterState(Enum):
    """State of an adapter with memory on the device, from its arrival to its eviction."""

    ARRIVING = auto()
    """The copy runs: steps can't use the adapter, and its memory can't be freed."""
    PROTECTED = auto()
    """The adapter landed since the last `take_landed`: its requests have a step to pin it."""
    READY = auto()
    """The adapter takes requests, and is evictable while nothing pins it."""
    DRAINING = auto()
    """The adapter takes no new requests, and is evictable once its last pin is released."""


@dataclass(slots=True)
class ResidentAdapter:
    """Adapter with memory on the device.

    Attributes:
        started_s: when it got its memory, by the cache's clock.
        pending_use: one use, from when it got its memory or was requested until it is pinned.
    """

    placed: PlacedAdapter
    metadata: AdapterMetadata
    state: AdapterState
    last_used_s: float
    started_s: float
    pending_use: Uses
    num_pins: int = 0
    is_operator_pinned: bool = False

    @property
    def footprint(self) -> Footprint:
        return self.placed.footprint

    @property
    def has_landed(self) -> bool:
        return self.state is not AdapterState.ARRIVING

    @property
    def is_evictable(self) -> bool:
        is_held = self.num_pins > 0 or self.is_operator_pinned
        return not is_held and self.state in (AdapterState.READY, AdapterState.DRAINING)


@dataclass(frozen=True, slots=True)
class EvictedAdapter:
    """An adapter that has left the device; `moved` goes to host memory, if it has no copy there."""

    digest: Digest
    last_used_s: float
    moved: LoadedAdapter | None
