"""Things by a key that changes, the least first, without sorting them anew each time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Key = tuple[float, float, float]
NEVER: Key = (math.inf, math.inf, math.inf)


class Ranked(Protocol):
    rank: Key | None
    """By which it stands in its ranking; None: it isn't in one."""


T = TypeVar("T", bound=Ranked)


class Ranking(Generic[T]):
    """A heap whose entries may be out of date. One that isn't the thing's last is dropped when it comes to the top; one whose key has risen since goes back.

    Whoever lets a key fall says so by `push`.

    Args:
        key: the thing's, now; None: it isn't to be ranked any more.
    """

    def __init__(self, key: Callable[[T], Key | None]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._num_pushed = 0

    def push(self, thing: T) -> None:
        """It is ranked by its present key, if it has one."""
        key = self._key(thing)
        if key is None or key == thing.rank:
            return
        thing.rank = key
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, thing))

    def peek(self) -> T | None:
        """The thing with the least key."""
        while self._heap:
            key, _, thing = self._heap[0]
            if thing.rank is not key:
                heapq.heappop(self._heap)
                continue
            actual = self._key(thing)
            if actual is not None and actual <= key:
                return thing
            thing.rank = actual
            if actual is None:
                heapq.heappop(self._heap)
            else:
                self._num_pushed += 1
                heapq.heapreplace(self._heap, (actual, self._num_pushed, thing))
        return None

    def pop(self) -> T | None:
        """The same, which isn't ranked any more."""
        thing = self.peek()
        if thing is not None:
            heapq.heappop(self._heap)
            thing.rank = None
        return thing

    def clear(self) -> None:
        for _, _, thing in self._heap:
            thing.rank = None
        self._heap.clear()
