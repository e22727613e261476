"""Residents that take no new requests and leave when their last pin does, so that who has waited longest gets their place."""

from __future__ import annotations

from collections.abc import Iterator

from loraserve.memory.devices.base import Footprint
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.types import Digest


class Drain:
    """Which residents of a pool are drained. One thread at a time.

    Invariants (`check`):
        Whatever is drained has a place on the device.
    """

    def __init__(self, pool: DeviceCache) -> None:
        self._pool = pool
        self._drained: set[Digest] = set()

    def __contains__(self, digest: object) -> bool:
        return digest in self._drained

    def __iter__(self) -> Iterator[Digest]:
        return iter(self._drained)

    def widen(self, footprint: Footprint) -> None:
        """Residents that are drained suffice, once idle, for that much; the least recently used are chosen first."""
        room = self._pool.free
        for digest, resident in self._pool.items():
            if digest in self._drained:
                room += resident.footprint
        for digest, resident in self._pool.items():
            if self._pool.can_admit_without(footprint, self._drained, room):
                return
            # what is still on its way may be drained as soon as it has landed
            if not resident.is_operator_pinned and resident.has_landed and digest not in self._drained:
                self._drained.add(digest)
                room += resident.footprint

    def discard(self, digest: Digest) -> None:
        """This one isn't drained: it has left, or stays."""
        self._drained.discard(digest)

    def end(self) -> None:
        """Nothing is drained."""
        self._drained.clear()

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        if any(digest not in self._pool for digest in self._drained):
            return ["drain: an adapter that isn't on the device is drained from it"]
        return []
