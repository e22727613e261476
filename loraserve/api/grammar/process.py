"""Process that compiles grammars, one at a time, and is killed if one takes too long."""

from __future__ import annotations

import logging

import msgspec

from loraserve.errors import EngineUnavailable, GrammarTooComplex
from loraserve.text.answer_format import AnswerFormat
from loraserve.text.grammar_worker import Checked, Setup
from loraserve.text.workers.process import WorkerDied, WorkerProcess, WorkerStartFailed

logger = logging.getLogger(__name__)


class GrammarProcess:
    """Ask a process of ``loraserve.text.grammar_worker`` for grammars."""

    def __init__(self, setup: Setup) -> None:
        self._process = WorkerProcess("loraserve.text.grammar_worker", msgspec.json.encode(setup))

    @property
    def num_starts(self) -> int:
        """Processes so far."""
        return self._process.num_starts

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
        try:
            answer = await self._process.ask(msgspec.json.encode(wanted), timeout_s, start_timeout_s)
        except TimeoutError:
            raise GrammarTooComplex(
                f"The grammar took longer than {timeout_s:g} s to compile.", hint="Simplify it."
            ) from None
        except WorkerDied:
            raise GrammarTooComplex(
                "The grammar takes more memory than one may to compile, or is nested too deeply.", hint="Simplify it."
            ) from None
        except WorkerStartFailed as error:
            logger.exception("the process that compiles grammars can't be started")
            raise EngineUnavailable("Grammars can't be checked now: their process didn't start.") from error
        return msgspec.json.decode(answer, type=Checked)

    async def close(self) -> None:
        """Kill the process, if there is one."""
        await self._process.close()
