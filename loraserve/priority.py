"""How work beside the steps shares the processors with them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LOADER = 5
"""More than the steps' threads: a third of their weight, where there are too few cores for all.

Measured on two cores that steps and other work had taken wholly, loads of 9 MB without end beside the steps: a step took a sixth longer, instead of nearly half again
with loaders as they are; and a load two to three times as long (1.1 s, instead of 0.4 s). Idle priority (SCHED_IDLE, niceness 19) spared the steps no more that
could be told, and a load took 5 to 15 s, with somebody waiting for it. A loader holds the interpreter's lock for a quarter of its 32 ms of work: hashing, reading, checking and
packing let go of it.
"""
SERVER = 10
"""Of the server's threads: they check and hash uploads, and tokenise long prompts. A tenth of a step's weight."""
BACKGROUND = 19
"""Of what nobody waits for but who uploads: it has what the steps leave. The most there is."""


def stand_back(niceness: int, *, is_idle: bool = False) -> None:
    """This thread, and what it starts, comes after the threads of the steps where there are too few cores for all. Nothing where a thread has no priority of its own.

    Args:
        niceness: over the thread's own.
        is_idle: it has only time that nobody else wants (SCHED_IDLE), where the system knows such: whoever wakes up takes its place at once. Of one that is merely nice, Linux
            (6.6 and later) lets a slice of some milliseconds end first, and a step's threads wait for each other some hundred times. Where nobody sleeps it gets next to nothing:
            a 300th of a core. There is no way back, not for most users.
    """
    # elsewhere a thread's id may be another process's
    if sys.platform != "linux":
        return
    thread_id = threading.get_native_id()
    with suppress(OSError):
        niceness += os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(niceness, BACKGROUND))
        if is_idle:
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
