"""A clock for bounds on times: it stands still while what is timed waits for a core."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def scheduled_s(*pids: int) -> float:
    """Return seconds of a clock without those in which threads were ready to run and had no core.

    A busy machine makes everything late. A lock, a sleep or work that holds others up does so on
    this clock too, since they don't wait for a core then. Where the system doesn't count (Linux
    does), it is the monotonic clock.

    Args:
        pids: processes beside this one whose threads count.
    """
    waited_ns = 0
    for pid in {os.getpid(), *pids}:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):
                waited_ns += int(path.read_text().split()[1])
    return time.monotonic() - waited_ns * 1e-9
