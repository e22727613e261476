"""Time for which an engine process has made no progress, as its server counts it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Vitals:
    """Counts seconds in the watcher's own ticks.

    Only time in which the watcher itself ran is counted: of what passes between two ticks, no more than `max_tick_s`. A machine that was
    suspended, a container that was frozen or an event loop that was held up would otherwise find an engine silent that had no chance to speak.

    Attributes:
        quiet_s: since the last sign of progress: a message of the working thread, or a pulse whose count of moves has grown.
        has_spoken: whether there ever was a message.
        what, doing: of the last pulse: what the engine is at, and the same with how far it is.
    """

    def __init__(self, max_tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet_s = 0.0
        self.has_spoken = False
        self.what = self.doing = "starting its process"
        self._max_tick_s, self._clock = max_tick_s, clock
        self._num_moves = -1
        self._last_tick_s = clock()

    def tick(self) -> None:
        """Count the time since the last tick, as far as it counts."""
        now = self._clock()
        passed_s = min(now - self._last_tick_s, self._max_tick_s)
        self._last_tick_s = now
        self.quiet_s += passed_s

    def note_pulse(self, num_moves: int, what: str, doing: str) -> None:
        """Take a pulse: the process runs, and moved if the count did."""
        self.has_spoken = True
        self.what, self.doing = what, doing
        if num_moves != self._num_moves:
            self._num_moves = num_moves
            self.quiet_s = 0.0

    def note_message(self) -> None:
        """Take a message of the working thread."""
        self.has_spoken = True
        self.quiet_s = 0.0
