"""Work beside the steps of an engine that computes on the same processors: uploads and certificates are done in pieces, with rests between them.

A lower priority doesn't spare the steps: the two share caches, memory and often a core's units, and a step waits for the slowest of its threads. Work that is spread out
costs the same in all, and no step much of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = 5.0
"""Times as long as it worked an upload rests: it takes a sixth of a core."""
CERTIFICATE_FACTOR, CERTIFICATE_MOST_S = 3.0, 10.0
"""The same of a certificate, of which an uploader waits for the whole; and all rests of one together."""
WORTH_S = 0.002
"""Of work, before a rest: shorter ones cost more than they spare."""
LONGEST_S = 0.5
"""Of one rest, whatever the work before it was; somebody waits."""


class Rests:
    """When work stands back, and for how long.

    Args:
        is_computing: whether somebody's requests are computed on this machine's processors now; where they aren't, nothing rests.
    """

    def __init__(self, is_computing: Callable[[], bool] = lambda: False) -> None:
        self._is_computing = is_computing

    async def after(self, work: Callable[[], T]) -> T:
        """What `work` returns, done on a thread; a rest follows it."""
        result, work_s = await asyncio.to_thread(_timed, work)
        if work_s >= WORTH_S and self._is_computing():
            await asyncio.sleep(_rest_s(work_s))
        return result

    def on_thread(self, factor: float = FACTOR, most_s: float = math.inf) -> Callable[[], None]:
        """To be called between the pieces of what one thread does: it sleeps there when enough was done since the last time.

        Args:
            factor: times as long as it worked it rests.
            most_s: all rests together.
        """
        began_s, left_s = time.thread_time(), most_s

        def rest() -> None:
            nonlocal began_s, left_s
            work_s = time.thread_time() - began_s
            if work_s < WORTH_S:
                return
            if left_s > 0 and self._is_computing():
                rest_s = min(_rest_s(work_s, factor), left_s)
                left_s -= rest_s
                time.sleep(rest_s)
            began_s = time.thread_time()

        return rest


def _rest_s(work_s: float, factor: float = FACTOR) -> float:
    return min(factor * work_s, LONGEST_S)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """With the seconds of a processor that it took."""
    began_s = time.thread_time()
    result = work()
    return result, time.thread_time() - began_s
