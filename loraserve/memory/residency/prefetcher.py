"""Adapters that nobody waits for, read to the host's memory while loaders have nothing else to do: what will be asked for, and what is likely to be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loraserve.memory.residency.device_cache import AdapterPool
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.hot_set import Favourites
from loraserve.memory.residency.load_history import LoadHistory
from loraserve.memory.residency.load_queue import PlaceLine
from loraserve.memory.residency.loaders import Loaders
from loraserve.types import AdapterRef, Digest


class ReadAhead:
    """Starts loads of what isn't in line. It takes no place on the device, and evicts nothing from the host's memory that is held for who waits. One thread at a time."""

    def __init__(
        self, pool: AdapterPool, host_cache: HostCache, line: PlaceLine, loaders: Loaders, history: LoadHistory
    ) -> None:
        self._pool = pool
        self._host = host_cache
        self._line = line
        self._loaders = loaders
        self._history = history
        self._favourites = Favourites(pool.popularity)
        self.num_brought_back = 0

    def asked(self, ref: AdapterRef) -> None:
        """Somebody asks for this adapter: once it has left memory, it may be brought back."""
        self._favourites.asked(ref)

    def forget(self, digest: Digest) -> None:
        """It isn't brought back unless somebody asks for it again."""
        self._favourites.forget(digest)

    def prefetch(self, refs: Sequence[AdapterRef], now_s: float) -> None:
        """Adapters that will be asked for, soonest first, are read.

        None of them is evicted for another. All but one loader may be busy for them (a single one may, too): who asks in earnest finds a loader free, or waits
        for one load at most.
        """
        room = self._host.budget_bytes - self._host.held_bytes
        for ref in refs:
            digest = ref.digest
            if digest in self._pool or digest in self._line or digest in self._loaders:
                continue
            size = self._history.size(digest)
            if size is not None:
                room -= size.host_bytes
                if room < 0:
                    return
            if digest in self._host:
                # the last to be evicted for the others
                self._host.touch(digest, now_s)
                continue
            if self._history.is_held_off(digest, now_s):
                continue
            if len(self._loaders) >= max(1, self._loaders.num_threads - 1):
                return
            self._loaders.start(ref, (ref.tenant,))

    def bring_back(self, now_s: float) -> None:
        """While nobody waits and nothing is loaded, a favourite is read: into free room, and that of what is worth less there."""
        if self._line or self._loaders:
            return
        ref = self._favourites.next(now_s, lambda digest: self._is_worth_bringing_back(digest, now_s))
        if ref is not None:
            self.num_brought_back += 1
            self._loaders.start(ref, (ref.tenant,))

    def _is_worth_bringing_back(self, digest: Digest, now_s: float) -> bool:
        if digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        if size is None or self._history.is_held_off(digest, now_s):
            return False
        # by far: what is brought back today isn't to be evicted for its victim tomorrow
        least = self._pool.popularity.per_second(digest, now_s) / size.host_bytes / 2
        return self._host.has_room_for(size.host_bytes, lambda other: self._value_per_byte(other, now_s) < least)

    def _value_per_byte(self, digest: Digest, now_s: float) -> float:
        size = self._history.size(digest)
        return math.inf if size is None else self._pool.popularity.per_second(digest, now_s) / size.host_bytes
