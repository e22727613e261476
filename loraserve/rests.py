"""Work beside the steps of an engine that computes on the same processors: uploads are done in pieces, with rests between them.

A lower priority doesn't spare the steps: the two share caches, memory and often a core's units, and a step waits for the slowest of its threads. Work that is spread out
costs the same in all, and no step much of it.

For threads of the server's process, which don't know what a step holds. Those of the engine's keep to `engine.pace`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")

FACTOR = 5.0
"""Times as long as it worked an upload rests: all together take a sixth of a core."""
WORTH_S = 0.002
"""Of work on a thread, before a rest: shorter ones cost more than they spare."""
LONGEST_S = 0.5
"""Of one rest, whatever the work before it was; somebody waits."""
LONGEST_TURN_S = 5.0
"""Of one rest with those of others before it."""


Rest = Callable[[], None]
"""Called between the pieces of what a thread does."""


class Rests:
    """When work stands back, and for how long. Its rests follow each other: many at once take no more of the processors than one, each a part of that.

    Args:
        is_computing: whether somebody's requests are computed on this machine's processors now; where they aren't, nothing rests.
        threads: for work that rests on its thread, so that it keeps none from others; None: the event loop's own.
    """

    def __init__(self, is_computing: Callable[[], bool] = lambda: False, threads: Executor | None = None) -> None:
        self._is_computing = is_computing
        self._threads = threads
        self._taken = threading.Lock()
        self._rested_s = 0.0
        """When all rests so far will be over, on the monotonic clock."""

    async def after(self, work: Callable[[], T]) -> T:
        """What `work` returns, done on a thread; a rest follows it."""
        result, work_s = await asyncio.to_thread(_timed, work)
        if self._is_computing():
            await asyncio.sleep(self._turn_s(work_s))
        return result

    async def in_pieces(self, work: Callable[[Rest], T]) -> T:
        """What `work` returns, done on a thread where it calls what it is given between its pieces."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self._on_thread()))

    def _on_thread(self) -> Rest:
        """What the calling thread calls between its pieces: it sleeps there when enough was done since the last time."""
        began_s = time.thread_time()

        def rest() -> None:
            nonlocal began_s
            work_s = time.thread_time() - began_s
            if work_s < WORTH_S:
                return
            if self._is_computing():
                time.sleep(self._turn_s(work_s))
            began_s = time.thread_time()

        return rest

    def _turn_s(self, work_s: float) -> float:
        """How long who has worked so long waits: until its own rest is over, after all that were taken before."""
        with self._taken:
            now_s = time.monotonic()
            self._rested_s = max(self._rested_s, now_s) + _rest_s(work_s)
            # who waits no longer than this takes no more of the line either
            self._rested_s = min(self._rested_s, now_s + LONGEST_TURN_S)
            return self._rested_s - now_s


def _rest_s(work_s: float) -> float:
    return min(FACTOR * work_s, LONGEST_S)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """With the seconds of a processor that it took."""
    began_s = time.thread_time()
    result = work()
    return result, time.thread_time() - began_s
