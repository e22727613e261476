"""Process that compiles grammars, one at a time, and is killed if one takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

import msgspec

from loraserve.errors import EngineUnavailable, GrammarTooComplex
from loraserve.text.answer_format import AnswerFormat
from loraserve.text.grammar_worker import LENGTH, Checked, Setup

logger = logging.getLogger(__name__)

_END_S = 5.0
_BROKEN = (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError)
"""Errors of reading from, or writing to, a process that has ended."""


class GrammarProcess:
    """Run ``loraserve.text.grammar_worker``, from the first question on, and again after a kill.

    Attributes:
        num_starts: processes so far.
    """

    def __init__(self, setup: Setup) -> None:
        self.num_starts = 0
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, wanted: AnswerFormat, timeout_s: float, start_timeout_s: float) -> Checked:
        """Return what the process makes of a format. No other question may be asked meanwhile.

        Cancelling this kills the process.

        Args:
            start_timeout_s: seconds that a process may take to start and to read the tokenizer,
                where none runs.

        Raises:
            GrammarTooComplex: it took longer than `timeout_s`, or more memory or stack than it may.
            EngineUnavailable: no process can be started.
        """
        process = await self._running(start_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(process, msgspec.json.encode(wanted))
                return await self._read(process)
        except TimeoutError:
            raise GrammarTooComplex(
                f"The grammar took longer than {timeout_s:g} s to compile.", hint="Simplify it."
            ) from None
        except _BROKEN:
            raise GrammarTooComplex(
                "The grammar takes more memory than one may to compile, or is nested too deeply.", hint="Simplify it."
            ) from None
        finally:
            if sys.exception() is not None:
                await self.close()

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _END_S)

    async def _running(self, timeout_s: float) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            async with asyncio.timeout(timeout_s):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "loraserve.text.grammar_worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                self.num_starts += 1
                await self._write(self._process, msgspec.json.encode(self._setup))
                await self._read(self._process)
        except (OSError, TimeoutError, *_BROKEN) as error:
            logger.exception("the process that compiles grammars can't be started")
            raise EngineUnavailable("Grammars can't be checked now: their process didn't start.") from error
        finally:
            if sys.exception() is not None:
                await self.close()
        return self._process

    async def _write(self, process: asyncio.subprocess.Process, frame: bytes) -> None:
        if process.stdin is None:
            raise BrokenPipeError
        process.stdin.write(LENGTH.pack(len(frame)) + frame)
        await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> Checked:
        if process.stdout is None:
            raise BrokenPipeError
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return msgspec.json.decode(await process.stdout.readexactly(length), type=Checked)
