"""Reads of adapters to host memory while loaders are idle.

They are those that requests in the queue will need, and those likely to be requested again.
"""

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
"""Adapters that the hot set remembers: the most recently requested."""
LOOK_EVERY_S = 1.0
"""Seconds between looks at the hot set: one takes half a millisecond of the step's thread."""
MIN_USES_PER_S = 0.1 / USE_DECAY_S
"""Uses per second below which an adapter isn't hot: one use counts for some ten minutes."""


class HotSet:
    """Recently requested adapters, wherever they are now. One thread at a time."""

    def __init__(self, popularity: Popularity) -> None:
        self._popularity = popularity
        # the most recently requested last
        self._refs: OrderedDict[Digest, AdapterRef] = OrderedDict()
        self._last_turn: LRUCache[TenantId, int] = LRUCache(MAX_REFS)
        self._num_turns = 0
        self._next_look_s = 0.0

    def note_request(self, ref: AdapterRef) -> None:
        """Note that a request needs this adapter.

        Of an ephemeral and a stored version of the same bytes the stored one is remembered: it can
        be read for longer.
        """
        if ref.memory is None or ref.digest not in self._refs:
            self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_REFS:
            self._refs.popitem(last=False)

    def forget(self, digest: Digest) -> None:
        """Don't read the adapter again until a request needs it."""
        self._refs.pop(digest, None)

    def is_stored(self, digest: Digest) -> bool:
        """Check whether requests have asked for a version of these bytes that isn't ephemeral."""
        ref = self._refs.get(digest)
        return ref is not None and not ref.is_ephemeral

    def sums_of(self, digest: Digest) -> list[Digest]:
        """List the sums that this adapter is a part of."""
        return [one for one, ref in self._refs.items() if any(part.adapter.digest == digest for part in ref.parts)]

    def next(self, now_s: float, is_wanted: Callable[[Digest], bool]) -> AdapterRef | None:
        """Choose the adapter to read first: of the tenant served longest ago, the most used.

        Return None if none is needed, or it is too early to look.

        Args:
            is_wanted: whether an adapter isn't in memory, and could be.
        """
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + LOOK_EVERY_S
        best: dict[TenantId, tuple[float, AdapterRef]] = {}
        for digest, ref in self._refs.items():
            uses = self._popularity.per_second(digest, now_s)
            # popularity is the cheaper question
            if uses > best.get(ref.tenant, (MIN_USES_PER_S, ref))[0] and is_wanted(digest):
                best[ref.tenant] = (uses, ref)
        if not best:
            return None
        tenant = min(best, key=lambda tenant: (self._last_turn.get(tenant, -1), -best[tenant][0]))
        self._num_turns += 1
        self._last_turn[tenant] = self._num_turns
        return best[tenant][1]


class Prefetcher:
    """Starts loads of adapters that aren't in the queue. One thread at a time.

    It takes no memory on the device, and evicts nothing from host memory that is held for a waiting
    request.

    Attributes:
        num_rewarmed: adapters of the hot set that were read again.
    """

    def __init__(
        self, pool: DeviceCache, host_cache: HostCache, queue: LoadQueue, loaders: LoaderPool, history: LoadHistory
    ) -> None:
        self._pool = pool
        self._host = host_cache
        self._queue = queue
        self._loaders = loaders
        self._history = history
        self._hot_set = HotSet(pool.popularity)
        self.num_rewarmed = 0

    def note_request(self, ref: AdapterRef) -> None:
        """Note a request: once the adapter has left memory, it may be read again."""
        self._hot_set.note_request(ref)

    def forget(self, digest: Digest) -> None:
        """Don't read the adapter again until a request needs it."""
        self._hot_set.forget(digest)

    def is_stored(self, digest: Digest) -> bool:
        """Check whether requests have asked for a version of these bytes that isn't ephemeral."""
        return self._hot_set.is_stored(digest)

    def sums_of(self, digest: Digest) -> list[Digest]:
        """List the sums that requests have asked for with this adapter as a part."""
        return self._hot_set.sums_of(digest)

    def prefetch(self, refs: Sequence[AdapterRef], now_s: float) -> None:
        """Read adapters that will be requested, soonest first.

        None of them is evicted for another. At most all loaders but one are busy with them (a
        single one may be, too): a request finds a loader free, or waits for one load at most.
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
                # evicted after the others
                self._host.touch(digest, now_s)
                continue
            if self._history.is_held_off(digest, now_s):
                continue
            if len(self._loaders) >= max(1, self._loaders.num_threads - 1):
                return
            self._loaders.start(ref, (ref.tenant,))

    def rewarm(self, now_s: float) -> None:
        """Read a hot adapter while nothing waits and nothing is loaded.

        It goes to free memory, or to that of adapters that are worth less.
        """
        if self._queue or self._loaders:
            return
        ref = self._hot_set.next(now_s, lambda digest: self._is_worth_reading(digest, now_s))
        if ref is not None:
            self.num_rewarmed += 1
            self._loaders.start(ref, (ref.tenant,))

    def _is_worth_reading(self, digest: Digest, now_s: float) -> bool:
        if digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        if size is None or self._history.is_held_off(digest, now_s):
            return False
        # twice the victim's value: adapters of equal use must not evict each other in turn
        least = self._pool.popularity.per_second(digest, now_s) / size.host_bytes / 2
        return self._host.has_room_for(size.host_bytes, lambda other: self._value_per_byte(other, now_s) < least)

    def _value_per_byte(self, digest: Digest, now_s: float) -> float:
        size = self._history.size(digest)
        return math.inf if size is None else self._pool.popularity.per_second(digest, now_s) / size.host_bytes
