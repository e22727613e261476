"""Which adapters that have left memory are likely to be asked for again, tenant by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cachetools import LRUCache

from loraserve.memory.popularity import MEMORY_S, Popularity
from loraserve.types import AdapterRef, Digest, TenantId

MAX_REFS = 1024
"""Of more adapters, those that were asked for longest ago are nobody's favourites."""
LOOK_EVERY_S = 1.0
"""A look at all of them takes half a millisecond of the step's thread, so it isn't taken at each step."""

MIN_USES_PER_S = 0.1 / MEMORY_S
"""What is used less of late is nobody's favourite: one use counts as one for some ten minutes, and what was deleted since isn't read for ever."""


class Favourites:
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
