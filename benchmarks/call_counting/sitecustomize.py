"""Count the calls of each function on a process's main thread between two signals SIGUSR2.

`benchmarks.token_costs` puts this folder on the path of its servers, whose interpreters import it
as they start. Without the signals it costs nothing. The counts are written to
CALL_COUNTS_DIR/PID.json. Generators and coroutines aren't counted: they are resumed, some of them
many times for one thing that they do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_RESUMED = CO_ASYNC_GENERATOR | CO_COROUTINE | CO_GENERATOR
_calls: Counter[CodeType] = Counter()


def _count(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and not frame.f_code.co_flags & _RESUMED:
        _calls[frame.f_code] += 1


def _switch(*_: Any) -> None:
    """Begin to count; the second time, end it and write the counts."""
    if sys.getprofile() is None:
        _calls.clear()
        sys.setprofile(_count)
        return
    sys.setprofile(None)
    calls = [(code.co_filename, code.co_qualname, count) for code, count in _calls.items()]
    path = Path(os.environ["CALL_COUNTS_DIR"]) / f"{os.getpid()}.json"
    # its reader waits for the file: it appears whole
    path.with_suffix(".part").write_text(json.dumps(calls))
    path.with_suffix(".part").rename(path)


if "CALL_COUNTS_DIR" in os.environ:
    signal.signal(signal.SIGUSR2, _switch)
