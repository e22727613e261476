"""A process of `loraserve.text.workers.child` as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from enum import StrEnum

from loraserve.limits import MIB
from loraserve.text.workers.child import CRASHED, LENGTH, MAX_WORDS_BYTES, OUT_OF_MEMORY, TOO_DEEP

_MAX_ANSWER_BYTES = 64 * MIB
_END_S = 5.0
_BROKEN = (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError)
"""Errors of reading from, or writing to, a process that has ended."""
_PLAIN_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ")


class Death(StrEnum):
    """Cause of a process's end."""

    MEMORY = "memory"
    STACK = "stack"
    TIME = "time"
    KILLED = "killed"
    """Killed by the system, which may have no memory left, or by an operator."""
    CRASH = "crash"
    """A bug: an exception, a panic, an abort."""


_CODES: Mapping[int, Death] = {
    OUT_OF_MEMORY: Death.MEMORY,
    TOO_DEEP: Death.STACK,
    CRASHED: Death.CRASH,
    # programs in safe Rust and Python have no other bad address than one beyond their stack
    -signal.SIGSEGV: Death.STACK,
    -signal.SIGBUS: Death.STACK,
    -signal.SIGXCPU: Death.TIME,
    -signal.SIGKILL: Death.KILLED,
    -signal.SIGTERM: Death.KILLED,
}
_LAST_WORDS: Mapping[bytes, Death] = {
    b"memory allocation of": Death.MEMORY,
    b"overflowed its stack": Death.STACK,
}
"""Words of Rust's runtime before it aborts."""


class WorkerDied(Exception):
    """The process ended over a question."""

    def __init__(self, death: Death) -> None:
        super().__init__(death)
        self.death = death


class WorkerStartFailed(Exception):
    """Failure to start a process."""


class WorkerProcess:
    """Run a module's `serve`, from the first question on, and again after a kill.

    Args:
        module: name of the module that is run.
        setup: its first frame.

    Attributes:
        num_starts: processes so far.
    """

    def __init__(self, module: str, setup: bytes) -> None:
        self.num_starts = 0
        self._module, self._setup = module, setup
        self._process: asyncio.subprocess.Process | None = None
        # what the process writes to stderr: it may have a client's text in it, and is in no log
        self._words: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process has started, and hasn't ended as far as is known."""
        return self._process is not None and self._process.returncode is None

    async def start(self, timeout_s: float) -> None:
        """Start the process, unless it runs.

        Raises:
            WorkerStartFailed: it can't be started, or takes longer.
        """
        await self._running(timeout_s)

    async def ask(self, question: bytes, timeout_s: float, start_timeout_s: float) -> bytes:
        """Send a question and wait for its answer. No other question may be sent meanwhile.

        Every failure, and cancelling this, kills the process.

        Args:
            start_timeout_s: seconds that a process may take to start, where none runs.

        Raises:
            TimeoutError: it took longer than `timeout_s`.
            WorkerDied, WorkerStartFailed
        """
        process = await self._running(start_timeout_s)
        if self._words is not None:
            os.ftruncate(self._words, 0)
            os.lseek(self._words, 0, os.SEEK_SET)
        try:
            async with asyncio.timeout(timeout_s):
                await _write(process, question)
                return await _read(process)
        except _BROKEN as error:
            raise WorkerDied(await self._death(process)) from error
        finally:
            if sys.exception() is not None:
                await self.close()

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if self._words is not None:
            os.close(self._words)
            self._words = None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _END_S)

    async def _death(self, process: asyncio.subprocess.Process) -> Death:
        """Determine what a process ended of that closed its stdout."""
        try:
            code = await asyncio.wait_for(asyncio.shield(process.wait()), _END_S)
        except TimeoutError:
            return Death.CRASH
        if code == -signal.SIGABRT and self._words is not None:
            words = os.pread(self._words, MAX_WORDS_BYTES, 0)
            return next((death for text, death in _LAST_WORDS.items() if text in words), Death.CRASH)
        return _CODES.get(code, Death.CRASH)

    async def _running(self, timeout_s: float) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            return await self._start(timeout_s)
        except WorkerStartFailed as error:
            # something outside may have killed it, as the system does for lack of memory
            if not isinstance(error.__cause__, _BROKEN):
                raise
        return await self._start(timeout_s)

    async def _start(self, timeout_s: float) -> asyncio.subprocess.Process:
        """Start a process in the place of any that there is.

        Raises:
            WorkerStartFailed
        """
        await self.close()
        try:
            self._words = os.memfd_create("worker-stderr")
            async with asyncio.timeout(timeout_s):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    self._module,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=self._words,
                    env=_plain(os.environ),
                )
                self.num_starts += 1
                await _write(self._process, self._setup)
                await _read(self._process)
        except (OSError, TimeoutError, *_BROKEN) as error:
            raise WorkerStartFailed from error
        finally:
            if sys.exception() is not None:
                await self.close()
        return self._process


def _plain(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that aren't the server's own, some of which are secrets."""
    return {name: environment[name] for name in _PLAIN_VARIABLES if name in environment}


async def _write(process: asyncio.subprocess.Process, frame: bytes) -> None:
    if process.stdin is None:
        raise BrokenPipeError
    process.stdin.write(LENGTH.pack(len(frame)) + frame)
    await process.stdin.drain()


async def _read(process: asyncio.subprocess.Process) -> bytes:
    if process.stdout is None:
        raise BrokenPipeError
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > _MAX_ANSWER_BYTES:
        raise BrokenPipeError
    return await process.stdout.readexactly(length)
