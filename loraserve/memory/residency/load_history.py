"""What loads have taught: how large adapters are, why some can't be loaded and when to try again, how long a load takes."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache

from loraserve.errors import AdapterCorrupt, LoraserveError
from loraserve.memory.devices.device import AdapterDevice, Footprint
from loraserve.memory.residency.loaders import LoadResult
from loraserve.memory.timings import Timings
from loraserve.types import Digest, Histogram

RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""A failed load isn't tried again for this long; doubled with every failure in a row, up to the second."""

_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """What an adapter takes: of the device, and of the host's memory."""

    footprint: Footprint
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A blob that was found damaged, or gone, when a version's bytes were read."""

    digest: Digest
    """The version's."""
    blob: Digest


@dataclass(frozen=True, slots=True)
class _Failure:
    error: LoraserveError
    retry_at_s: float
    num_failures: int


class LoadHistory:
    """How the loads of adapters ended, of the last `_MAX_REMEMBERED` adapters. One thread at a time."""

    def __init__(self, device: AdapterDevice) -> None:
        """
        Args:
            device: says what an adapter takes of it.
        """
        self._device = device
        self._failures: LRUCache[Digest, _Failure] = LRUCache(_MAX_REMEMBERED)
        # of everything ever loaded: says whether a load has a chance of a place
        self._sizes: LRUCache[Digest, AdapterSize] = LRUCache(_MAX_REMEMBERED)
        # found since `take_damages`
        self._damages: list[Damage] = []
        self._num_loads = 0
        self._num_load_failures = 0
        self._load_s = 0.0
        self._good_load_s = 0.0
        self._host_load_s = Timings()

    @property
    def mean_load_s(self) -> float:
        """What a load that went well took, on average; 0 until there was one."""
        return self._good_load_s / self._num_loads if self._num_loads else 0.0

    def note(self, result: LoadResult, now_s: float) -> None:
        """A load has ended: its adapter's size is known and no failure of it is, or it isn't to be tried again for a while."""
        digest, outcome = result.ref.digest, result.outcome
        self._load_s += result.elapsed_s
        if isinstance(outcome, LoraserveError):
            self._num_load_failures += 1
            if isinstance(outcome, AdapterCorrupt):
                self.note_damage(outcome)
            self._note_failure(digest, outcome, now_s)
            return
        self._num_loads += 1
        self._good_load_s += result.elapsed_s
        self._host_load_s.add(result.elapsed_s)
        self._failures.pop(digest, None)
        self._sizes[digest] = AdapterSize(self._device.footprint_of(outcome.host), outcome.num_bytes)

    def size(self, digest: Digest) -> AdapterSize | None:
        """What the adapter takes; None until it was loaded once."""
        return self._sizes.get(digest)

    def error(self, digest: Digest) -> LoraserveError | None:
        """Why the adapter's last load failed; None if it didn't."""
        failure = self._failures.get(digest)
        return failure.error if failure is not None else None

    def is_held_off(self, digest: Digest, now_s: float) -> bool:
        """Whether the adapter's last load failed so recently that it isn't to be tried again yet."""
        failure = self._failures.get(digest)
        return failure is not None and now_s < failure.retry_at_s

    def forget_failure(self, digest: Digest) -> None:
        """The adapter may be loaded at once, however its last load ended."""
        self._failures.pop(digest, None)

    def note_damage(self, error: AdapterCorrupt) -> None:
        """What a read of an adapter's bytes found is among the next `take_damages`."""
        if error.digest is not None and error.blob is not None:
            self._damages.append(Damage(Digest(error.digest), Digest(error.blob)))

    def take_damages(self) -> list[Damage]:
        """Return, once, what was found damaged: one entry per load that failed for it."""
        damages, self._damages = self._damages, []
        return damages

    def stats(self) -> dict[str, int | float | Histogram]:
        """The loads' part of EngineStats, by its names."""
        return {
            "adapter_loads": self._num_loads,
            "adapter_load_failures": self._num_load_failures,
            "adapter_load_s": self._load_s,
            "host_load_s": self._host_load_s.histogram,
        }

    def _note_failure(self, digest: Digest, error: LoraserveError, now_s: float) -> None:
        before = self._failures.get(digest)
        num_failures = 1 + (before.num_failures if before is not None else 0)
        delay = min(RETRY_S * 2 ** min(num_failures - 1, 16), MAX_RETRY_S)
        self._failures[digest] = _Failure(error, now_s + delay, num_failures)
