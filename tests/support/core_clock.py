"""A clock for bounds on times: it stands still while what is timed waits for a core."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_waited_ns: dict[Path, int] = {}
"""Nanoseconds that threads had waited for a core at the last look, those that have ended too."""


def scheduled_s(*pids: int) -> float:
    """Return seconds of a clock without those in which threads were ready to run and had no core.

    A busy machine makes everything late. A lock, a sleep or work that holds others up does so on
    this clock too, since they don't wait for a core then. Where the system doesn't count (Linux
    does), it is the monotonic clock.

    Args:
        pids: processes beside this one whose threads count.
    """
    processes = {f"/proc/{pid}/task" for pid in (os.getpid(), *pids)}
    for process in processes:
        for path in Path(process).glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):
                _waited_ns[path] = int(path.read_text().split()[1])
    waited_ns = sum(waited for path, waited in _waited_ns.items() if str(path.parents[1]) in processes)
    return time.monotonic() - waited_ns * 1e-9
