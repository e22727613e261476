"""The process itself: frames in, frames out, within bounds on memory and processor time.

A frame is a length in four bytes and that many bytes: first a setup, which is answered by an empty
frame, then questions, each answered by one frame.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LENGTH = struct.Struct("<I")
OUT_OF_MEMORY, TOO_DEEP, CRASHED = 80, 81, 82
"""Exit codes of a process that a question ended: `MemoryError`, `RecursionError`, anything else."""
MAX_WORDS_BYTES = 16 * 1024
"""Bytes that a process may write to stderr."""
_PR_SET_PDEATHSIG = 1

Answer = Callable[[bytes], bytes]


def serve(prepare: Callable[[bytes], Answer], *, max_work_bytes: int, niceness: int, recursion_limit: int) -> int:
    """Answer the frames of stdin on stdout until there are no more; return the exit code.

    What a question raises ends the process, with one of the codes above: it may be in any state.

    Args:
        prepare: called with the setup; returns what answers questions.
        max_work_bytes: memory that may be taken once it has returned.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the server's drain decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(niceness)
    # The bound on files would cut the bytecode of modules imported below, which Python keeps for
    # later processes: where an installer compiles none, as uv doesn't, none could import them.
    sys.dont_write_bytecode = True
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WORDS_BYTES, MAX_WORDS_BYTES))
    sys.setrecursionlimit(recursion_limit)
    setup = _read(sys.stdin.buffer)
    if setup is None:
        return 0
    answer = prepare(setup)
    _limit_memory(max_work_bytes)
    _write(b"")
    while (question := _read(sys.stdin.buffer)) is not None:
        try:
            frame = answer(question)
        except MemoryError:
            return OUT_OF_MEMORY
        except RecursionError:
            return TOO_DEEP
        except BaseException:
            # llguidance reports panics as subclasses of BaseException
            return CRASHED
        _write(frame)
    return 0


def limit_cpu(seconds: float) -> None:
    """Let this process have `seconds` more of processor time; then the kernel kills it."""
    with suppress(OSError, ValueError):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(used.ru_utime + used.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_memory(num_bytes: int) -> None:
    """Let this process have that many more bytes than it has now."""
    with suppress(OSError, ValueError, IndexError):
        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes,) * 2)


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(header)[0])


def _write(frame: bytes) -> None:
    sys.stdout.buffer.write(LENGTH.pack(len(frame)) + frame)
    sys.stdout.buffer.flush()
