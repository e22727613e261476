"""Signs of life of an engine's process, as its watcher counts them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

_NS = 1e-9


class Vitals:
    """Count seconds in which an engine made no progress, in the watcher's own ticks.

    Only time in which the watcher itself ran counts: of what passes between two ticks, no more than
    `max_tick_s`. After a suspended machine, a frozen container or a blocked event loop the engine
    has had no chance to speak either.

    Attributes:
        quiet_s: seconds since the last progress: a message of the working thread, or a pulse whose
            count of moves has grown.
        stuck_s: the same without the seconds that the process waited for a core: a hang grows it on
            a busy machine too, slowness doesn't.
        has_spoken: whether there ever was a message.
        what: the engine's current work, by the last pulse.
        doing: the same with how far it is.
    """

    def __init__(
        self,
        max_tick_s: float,
        clock: Callable[[], float] = time.monotonic,
        core_wait_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Make vitals of a process that starts now.

        Args:
            max_tick_s: the most that one tick adds.
            core_wait_s: returns the seconds that the process has waited for a core so far.
        """
        self.quiet_s = self.stuck_s = 0.0
        self.has_spoken = False
        self.what = self.doing = "starting its process"
        self._max_tick_s, self._clock, self._core_wait_s = max_tick_s, clock, core_wait_s
        self._num_moves = -1
        self._last_tick_s = clock()
        self._last_wait_s = 0.0

    def tick(self) -> None:
        """Add the time since the last tick, up to `max_tick_s`."""
        now, wait_s = self._clock(), self._core_wait_s()
        passed_s = min(now - self._last_tick_s, self._max_tick_s)
        # a wait is known once it is over, and may have begun some ticks ago
        waited_s = max(0.0, wait_s - self._last_wait_s)
        self._last_tick_s, self._last_wait_s = now, wait_s
        self.quiet_s += passed_s
        self.stuck_s = max(0.0, self.stuck_s + passed_s - waited_s)

    def note_pulse(self, num_moves: int, what: str, doing: str) -> None:
        """Note a pulse: the process runs, and made progress if the count of moves has grown."""
        self.has_spoken = True
        self.what, self.doing = what, doing
        if num_moves != self._num_moves:
            self._num_moves = num_moves
            self.quiet_s = self.stuck_s = 0.0

    def note_message(self) -> None:
        """Note a message of the working thread."""
        self.has_spoken = True
        self.quiet_s = self.stuck_s = 0.0


def core_wait_s(pid: int | None) -> float:
    """Read the seconds that a process has been ready to run but had no core, by Linux's count.

    It is the sum over the main threads of the process and its children, such as the ranks of a base
    that is cut. A wait counts once it is over; throttling by a control group is a wait. 0.0 where
    the system has no count.
    """
    if pid is None:
        return 0.0
    processes = [str(pid)]
    with contextlib.suppress(OSError):
        processes += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{process}/schedstat").read_text().split()[1])
    return total * _NS
