"""Work of another thread, done a piece at a time between the steps: where both compute on the same processors, and somebody's requests are in the steps.

Beside a step such a thread would take a core from it, its caches, and the interpreter's lock whenever it has it; at a low priority it would besides keep that lock while it isn't
run. Between two steps it holds up the next one by what its piece takes, and nothing else; pieces take a bounded part of the time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

SHARE = 0.05
"""Of the steps' time, which pieces may take between them."""
URGENT_SHARE = 0.25
"""The same for work that has been under way for long: on a large base and a busy machine it ends too."""
PATIENCE_S = 0.02
"""How long a step waits for a piece. A longer one goes on beside the step, and the time it takes is counted all the same."""


class Interludes:
    """One working thread calls `job` and `pause`, the steps' thread `give` or `open` after each step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._is_running = False
        # the worker stands in `pause`, and nobody has told it to go on
        self._is_waiting = False
        self._began_s = 0.0
        self._credit_s = 0.0
        self._given_s = 0.0

    @property
    def given_s(self) -> float:
        """Seconds for which steps have waited for pieces."""
        return self._given_s

    # the working thread's

    @contextlib.contextmanager
    def job(self) -> Iterator[None]:
        """The block is made of pieces; the first begins when it may."""
        with self._changed:
            self._await_turn()
        try:
            yield
        finally:
            with self._changed:
                self._end_piece()

    def pause(self) -> None:
        """End a piece of a job; return when the next may begin."""
        with self._changed:
            self._end_piece()
            self._await_turn()

    def _end_piece(self) -> None:
        if not self._is_open:
            # of its own processor's time: what a piece costs isn't how long it waited for a disk
            self._credit_s -= time.thread_time() - self._began_s
        self._is_running = False
        self._changed.notify_all()

    def _await_turn(self) -> None:
        if not self._is_open:
            self._is_waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or not self._is_waiting)
        self._is_waiting = False
        self._is_running = True
        self._began_s = time.thread_time()

    # the steps' thread's

    def open(self) -> None:
        """Nobody's requests are in the steps: pieces follow each other."""
        with self._changed:
            self._is_open = True
            self._credit_s = 0.0
            self._changed.notify_all()

    def give(self, step_s: float, share: float = SHARE) -> None:
        """Let pieces run, as many as have earned it; return when they are done, or after `PATIENCE_S`.

        Args:
            step_s: how long the last step took. What isn't used of its share is kept for no later one; what a piece took beyond it is owed.
        """
        with self._changed:
            self._is_open = False
            if self._is_running:
                return
            earned_s = share * step_s
            self._credit_s = min(self._credit_s + earned_s, earned_s)
            if not self._is_waiting or self._credit_s <= 0:
                return
            began_s = time.perf_counter()
            until_s = began_s + PATIENCE_S
            while self._is_waiting and self._credit_s > 0:
                self._is_waiting = False
                # said here, not by the worker: it may not have woken when this looks again
                self._is_running = True
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: not self._is_running, until_s - time.perf_counter()):
                    break
            self._given_s += time.perf_counter() - began_s
