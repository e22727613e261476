"""Heap of items with changing keys, which aren't sorted anew each time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Key = tuple[float, float, float]
NEVER: Key = (math.inf, math.inf, math.inf)


class Ranked(Protocol):
    rank: Key | None
    """Key under which the item stands in its heap; None: it isn't in one."""


T = TypeVar("T", bound=Ranked)


class LazyHeap(Generic[T]):
    """Return items by their present key, the least first; an item is in one heap at most.

    Entries may be outdated. When one comes to the top, it is dropped if it isn't its item's last,
    and put back if the item's key has risen since. Call `push` after a key has fallen.

    Args:
        key: returns an item's present key; None takes the item out.
    """

    def __init__(self, key: Callable[[T], Key | None]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._num_pushed = 0

    def push(self, item: T) -> None:
        """Rank the item by its present key, if it has one."""
        key = self._key(item)
        if key is None or key == item.rank:
            return
        item.rank = key
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, item))

    def peek(self) -> T | None:
        """Return the item with the least key."""
        while self._heap:
            key, _, item = self._heap[0]
            if item.rank is not key:
                heapq.heappop(self._heap)
                continue
            actual = self._key(item)
            if actual is not None and actual <= key:
                return item
            item.rank = actual
            if actual is None:
                heapq.heappop(self._heap)
            else:
                self._num_pushed += 1
                heapq.heapreplace(self._heap, (actual, self._num_pushed, item))
        return None

    def pop(self) -> T | None:
        """Remove and return the item with the least key."""
        item = self.peek()
        if item is not None:
            heapq.heappop(self._heap)
            item.rank = None
        return item

    def clear(self) -> None:
        """Remove every item."""
        for _, _, item in self._heap:
            item.rank = None
        self._heap.clear()
