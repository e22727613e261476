"""How work beside the steps is spread over them: on a CPU it takes processors, caches and memory from them, whatever its priority, and a step waits for the slowest of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, thread_time

SHARE = 0.0125
"""Of the processors that steps compute on, while requests are computed. Measured on two (`benchmarks.churn`: 32 streams, a cold adapter a second, uploads without end), p99 between
tokens and tokens/s as multiples of those without cold adapters and uploads: 0.99 and 0.96, and a certificate each 6 s; with twice this share 1.10 to 1.15 and 0.92, and one each 3.3 s."""
WORTH_S = 0.002
"""Of work, before a rest: shorter ones cost more than they spare."""
LONGEST_S = 2.0
"""Of one rest, whatever the work before it was."""
PATIENCE_S = 0.25
"""So long at a time work waits for long steps to be over: they may follow one another without end."""

Rest = Callable[[], float]
"""Called between the pieces of a thread's work; returns after a rest, and how many seconds that took."""


class Pace:
    """Told by the steps' thread what it computes; threads beside it rest as long as it says.

    While requests are computed, all of the work takes a share of the processors, evenly: no step has much of it, and in those that are longer than others anyway none begins. One that is never
    told of steps lets everything go on at once.

    Attributes:
        is_needed: whether anything rests, ever.
    """

    def __init__(self, num_processors: float) -> None:
        """
        Args:
            num_processors: that steps compute on; of so many that the share is one of them, or more, nothing rests.
        """
        self._factor = max(0.0, 1 / (SHARE * num_processors) - 1)
        self.is_needed = self._factor > 0
        self._changed = threading.Condition()
        self._is_serving = False
        self._is_long = False
        self._rested_s = 0.0
        """When the rests after all work so far are over, on the monotonic clock."""

    def note(self, *, is_serving: bool, is_long: bool = False) -> None:
        """What is computed from now on.

        Args:
            is_serving: requests.
            is_long: a step that takes longer than others: with prompts, or beside loads.
        """
        is_less = (self._is_serving and not is_serving) or (self._is_long and not is_long)
        self._is_serving, self._is_long = is_serving, is_long
        # who rests has the least priority, and may have been interrupted with the lock in its hand: the steps don't wait for it, and its rest is over soon anyway
        if is_less and self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    def on_thread(self) -> Rest:
        """What the calling thread, and it alone, calls between the pieces of what it does from now on."""
        began_s = thread_time()

        def rest() -> float:
            nonlocal began_s
            work_s = thread_time() - began_s
            if not self.is_needed or (work_s < WORTH_S and not self._is_long):
                return 0.0
            rested_s = self._rest(work_s)
            began_s = thread_time()
            return rested_s

        return rest

    def _rest(self, work_s: float) -> float:
        """Wait until who has worked so long may go on, after all rests before its own; return the seconds."""
        began_s = monotonic()
        with self._changed:
            self._rested_s = until_s = max(self._rested_s, began_s) + min(self._factor * work_s, LONGEST_S)
            self._changed.wait_for(lambda: not self._is_serving, until_s - began_s)
            self._changed.wait_for(lambda: not (self._is_serving and self._is_long), PATIENCE_S)
            if not self._is_serving:
                # nor do those rest that come after it
                self._rested_s = 0.0
        return monotonic() - began_s
