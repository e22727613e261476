"""Adapters that have just got a place on the device: on their way there, or there for a request that is yet to pin them."""

from __future__ import annotations

import time

from loraserve.memory.devices.base import Footprint
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.residency.device_cache import DeviceCache, EvictedAdapter
from loraserve.memory.timings import Timings
from loraserve.types import Digest, Histogram


class Arrivals:
    """Gives places in a pool, and keeps what is fresh: what became resident since the last `take_landed` isn't evicted before the next. One thread at a time."""

    def __init__(self, pool: DeviceCache) -> None:
        self._pool = pool
        # their requests get one chance to pin them
        self._fresh: set[Digest] = set()
        # of those on their way to the device: when each got its place
        self._placed_at_s: dict[Digest, float] = {}
        self._load_s = Timings()

    @property
    def load_s(self) -> Histogram:
        """What it took from the place until the adapter was usable."""
        return self._load_s.histogram

    @property
    def is_any_on_its_way(self) -> bool:
        """Whether an adapter has its place, and isn't usable yet."""
        return bool(self._placed_at_s)

    def can_admit(self, footprint: Footprint) -> bool:
        """Whether there is a place, or would be after evicting every idle adapter that isn't fresh, and what is idle of the KV cache."""
        return self._pool.can_admit(footprint, self._fresh)

    def admit(
        self, digest: Digest, adapter: LoadedAdapter, now_s: float, *, is_operator_pinned: bool = False
    ) -> list[EvictedAdapter]:
        """The adapter has its place, and is on its way there or there already, and fresh; returns which adapters were evicted for it.

        Raises:
            InvariantViolation: it has a place already, or `can_admit` is false.
        """
        started_s = time.perf_counter()
        evicted = self._pool.admit(digest, adapter, now_s, is_operator_pinned=is_operator_pinned, keep=self._fresh)
        if self._pool.has_landed(digest):
            self._fresh.add(digest)
            self._load_s.add(time.perf_counter() - started_s)
        else:
            self._placed_at_s[digest] = started_s
        return evicted

    def take_landed(self) -> list[Digest]:
        """Those whose copies have arrived since the last call, in the order in which they were placed: they are what is fresh now."""
        landed = self._pool.take_landed()
        for digest in landed:
            self._load_s.add(time.perf_counter() - self._placed_at_s.pop(digest))
        self._fresh = self._pool.fresh = set(landed)
        return landed
