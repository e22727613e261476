"""Location of a hang: the process's state, and the Python stacks that it writes on SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

_DUMP_PATIENCE_S = 2.0
_POLL_S = 0.05
_MAX_STACK_BYTES = 64 << 10
_FRAME = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')


def state_of(pid: int) -> str:
    """Read Linux's letter for the state of the process: R, S, D, T (stopped), t (traced), Z.

    Empty if unknown.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


async def dump_stacks(pid: int, path: Path) -> str:
    """Have the process append its stacks to `path`.

    Return them, or an empty text if none come in time.

    The process must have registered faulthandler for SIGUSR1, whose default is to end it.
    """
    try:
        begin = _num_bytes(path)
        os.kill(pid, signal.SIGUSR1)
        num_bytes = begin
        for _ in range(round(_DUMP_PATIENCE_S / _POLL_S)):
            await asyncio.sleep(_POLL_S)
            size = _num_bytes(path)
            if size > begin and size == num_bytes:
                break
            num_bytes = size
        return _read_from(path, begin)
    except OSError:
        return ""


def _num_bytes(path: Path) -> int:
    return path.stat().st_size


def _read_from(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(_MAX_STACK_BYTES).decode("utf-8", errors="replace").strip()


def innermost(stacks: str, num_frames: int = 3) -> str:
    """Format the main thread's innermost frames: ``gemm.py:151 in int8_linear < …``."""
    threads = [thread for thread in stacks.split("\n\n") if "_run_module_as_main" in thread] or [stacks]
    frames = [match for line in threads[0].splitlines() if (match := _FRAME.match(line))]
    return " < ".join(f"{Path(frame['path']).name}:{frame['line']} in {frame['name']}" for frame in frames[:num_frames])
