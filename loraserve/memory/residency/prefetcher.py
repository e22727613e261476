"""Adapters that nobody waits for, read to the host's memory while loaders have nothing else to do: what will be asked for, and what is likely to be."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cachetools import LRUCache

from loraserve.memory.eviction import USE_DECAY_S, Popularity
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue
from loraserve.memory.residency.loader import LoaderPool, LoadHistory
from loraserve.types import AdapterRef, Digest, TenantId

MAX_REFS = 1024
"""Of more adapters, those that were asked for longest ago are nobody's favourites."""
LOOK_EVERY_S = 1.0
"""A look at all of them takes half a millisecond of the step's thread, so it isn't taken at each step."""

MIN_USES_PER_S = 0.1 / USE_DECAY_S
"""What is used less of late is nobody's favourite: one use counts as one for some ten minutes, and what was deleted since isn't read for ever."""


class HotSet:
    """Adapters that were asked for of late, wherever they are now. One thread at a time."""

    def __init__(self, popularity: Popularity) -> None:
        self._popularity = popularity
        # the last asked for last
        self._refs: OrderedDict[Digest, AdapterRef] = OrderedDict()
        self._last_turn: LRUCache[TenantId, int] = LRUCache(MAX_REFS)
        self._num_turns = 0
        self._next_look_s = 0.0

    def asked(self, ref: AdapterRef) -> None:
        """Somebody asks for this adapter."""
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_REFS:
            self._refs.popitem(last=False)

    def forget(self, digest: Digest) -> None:
        """It isn't brought back unless somebody asks for it again."""
        self._refs.pop(digest, None)

    def next(self, now_s: float, is_wanted: Callable[[Digest], bool]) -> AdapterRef | None:
        """The adapter to bring back first: the tenant whose turn is longest ago, and of its own the most used. None at most times, and when none is wanted.

        Args:
            is_wanted: whether it isn't here, and could be.
        """
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + LOOK_EVERY_S
        best: dict[TenantId, tuple[float, AdapterRef]] = {}
        for digest, ref in self._refs.items():
            uses = self._popularity.per_second(digest, now_s)
            # of the rarely used, the question is cheaper than the answer
            if uses > best.get(ref.tenant, (MIN_USES_PER_S, ref))[0] and is_wanted(digest):
                best[ref.tenant] = (uses, ref)
        if not best:
            return None
        tenant = min(best, key=lambda tenant: (self._last_turn.get(tenant, -1), -best[tenant][0]))
        self._num_turns += 1
        self._last_turn[tenant] = self._num_turns
        return best[tenant][1]


class Prefetcher:
    """Starts loads of what isn't in line. It takes no place on the device, and evicts nothing from the host's memory that is held for who waits. One thread at a time."""

    def __init__(
        self, pool: DeviceCache, host_cache: HostCache, line: LoadQueue, loaders: LoaderPool, history: LoadHistory
    ) -> None:
        self._pool = pool
        self._host = host_cache
        self._queue = line
        self._loaders = loaders
        self._history = history
        self._hot_set = HotSet(pool.popularity)
        self.num_rewarmed = 0

    def asked(self, ref: AdapterRef) -> None:
        """Somebody asks for this adapter: once it has left memory, it may be brought back."""
        self._hot_set.asked(ref)

    def forget(self, digest: Digest) -> None:
        """It isn't brought back unless somebody asks for it again."""
        self._hot_set.forget(digest)

    def prefetch(self, refs: Sequence[AdapterRef], now_s: float) -> None:
        """Adapters that will be asked for, soonest first, are read.

        None of them is evicted for another. All but one loader may be busy for them (a single one may, too): who asks in earnest finds a loader free, or waits
        for one load at most.
        """
        room = self._host.budget_bytes - self._host.held_bytes
        for ref in refs:
            digest = ref.digest
            if digest in self._pool or digest in self._queue or digest in self._loaders:
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

    def rewarm(self, now_s: float) -> None:
        """While nobody waits and nothing is loaded, a favourite is read: into free room, and that of what is worth less there."""
        if self._queue or self._loaders:
            return
        ref = self._hot_set.next(now_s, lambda digest: self._is_worth_bringing_back(digest, now_s))
        if ref is not None:
            self.num_rewarmed += 1
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
