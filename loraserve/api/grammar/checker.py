"""Check requests' grammars before the engine sees them: in turns, within bounds, once each."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from loraserve.errors import (
    EngineUnavailable,
    GrammarCrashed,
    GrammarTooComplex,
    InvalidRequest,
    LoraserveError,
    error_from_code,
)
from loraserve.limits import LIMITS, MIB, Limits
from loraserve.memory.timings import Timings
from loraserve.tenancy.limits.processes import START_S, TenantProcesses
from loraserve.tenant_cache import TenantCache
from loraserve.text.answer_format import AnswerFormat
from loraserve.text.grammar import CRASH_HINT
from loraserve.text.grammar_worker import MAX_WORK_BYTES, Checked, CheckFormat, Setup
from loraserve.text.workers.process import Death, WorkerDied, WorkerProcess, WorkerStartFailed
from loraserve.types import Histogram

logger = logging.getLogger(__name__)

_MODULE = "loraserve.text.grammar_worker"

_ENTRY_BYTES = 256
"""Bytes that a checked grammar takes in addition to its texts."""

COMPILED, CACHED, REFUSED, TOO_COMPLEX, CRASHED = "compiled", "cached", "refused", "too_complex", "crashed"
OUTCOMES = (COMPILED, CACHED, REFUSED, TOO_COMPLEX, CRASHED)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the engine can follow.

    Attributes:
        text: llguidance's JSON form.
        num_bytes: memory that it keeps once it is compiled; 0: unknown.
        tokenizer: the version's that it is for, as its `summary_text`.
    """

    text: str
    num_bytes: int = 0
    tokenizer: str = ""


class GrammarChecker:
    """Compile the grammars of requests in processes of their own, once for each tenant.

    Args:
        setup: called when a process is made.

    Attributes:
        num_by_outcome: grammars that were requested.
    """

    def __init__(
        self,
        setup: Callable[[], Setup],
        *,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_by_outcome: Counter[str] = Counter()
        self._setup, self._limits, self._clock = setup, limits, clock
        self._processes = TenantProcesses(lambda: WorkerProcess(_MODULE, msgspec.json.encode(self._setup())))
        self._known: TenantCache[Checked] = TenantCache(limits.max_checked_grammar_bytes)
        self._seconds = Timings()

    @property
    def check_s(self) -> Histogram:
        """Seconds of each compilation, without the wait for a process."""
        return self._seconds.histogram

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a process."""
        return self._processes.num_waiting

    async def check(self, tenant: str, wanted: AnswerFormat, tokenizer: str = "") -> Grammar:
        """Compile the grammar of a format.

        Args:
            tokenizer: the version's that it is for, as its `summary_text`; empty: the base's.

        Raises:
            InvalidRequest: it is no grammar, or can't be enforced; `param` names the place.
            GrammarTooComplex: compiling it takes more time or memory than it may.
            GrammarCrashed: it crashed its compiler.
            ConfigError, UnsupportedParameter: this base can't follow grammars.
        """
        asked = CheckFormat(wanted, tokenizer)
        key = hashlib.sha256(msgspec.json.encode(asked)).digest()
        checked = self._known.get(tenant, key)
        if checked is None:
            checked = await self._compile(tenant, key, asked)
            outcome = COMPILED
        else:
            outcome = CACHED
        if checked.error_code is None:
            self.num_by_outcome[outcome] += 1
            return Grammar(checked.grammar, checked.num_bytes, tokenizer)
        error = _error(checked)
        self.num_by_outcome[_OUTCOMES.get(type(error), REFUSED)] += 1
        raise error

    async def close(self) -> None:
        """Kill the processes."""
        await self._processes.close()

    async def _compile(self, tenant: str, key: bytes, asked: CheckFormat) -> Checked:
        async with self._processes.take(tenant) as process:
            # while this one waited, another may have needed the same
            known = self._known.get(tenant, key)
            if known is not None:
                return known
            started = self._clock()
            try:
                checked = await self._ask(process, asked)
            except (GrammarTooComplex, GrammarCrashed) as error:
                # not remembered: it may be this machine that was slow, or has little memory
                self._seconds.add(self._clock() - started)
                return Checked(error_code=error.code, message=error.message, hint=error.hint, param=asked.wanted.param)
        self._seconds.add(checked.seconds)
        self._known.put(tenant, key, checked, len(checked.grammar) + len(checked.message) + _ENTRY_BYTES)
        return checked

    async def _ask(self, process: WorkerProcess, asked: CheckFormat) -> Checked:
        """Have the process check a format.

        Raises:
            GrammarTooComplex: it took longer, or more memory or stack, than it may.
            GrammarCrashed: the process crashed.
            EngineUnavailable: no process can be started, or it was killed.
        """
        timeout_s = self._limits.grammar_timeout_s
        try:
            answer = await process.ask(msgspec.json.encode(asked), timeout_s, START_S)
        except TimeoutError:
            raise GrammarTooComplex(
                f"The grammar took longer than {timeout_s:g} s to compile.", hint="Simplify it."
            ) from None
        except WorkerDied as died:
            raise _death_error(died.death) from None
        except WorkerStartFailed as error:
            logger.exception("the process that compiles grammars can't be started")
            raise EngineUnavailable("Grammars can't be checked now: their process didn't start.") from error
        return msgspec.json.decode(answer, type=Checked)


_OUTCOMES: Mapping[type[LoraserveError], str] = {GrammarTooComplex: TOO_COMPLEX, GrammarCrashed: CRASHED}


def _death_error(death: Death) -> LoraserveError:
    """Choose the error of a request whose grammar ended its process."""
    match death:
        case Death.MEMORY:
            return GrammarTooComplex(
                f"The grammar takes more memory to compile than the {MAX_WORK_BYTES // MIB} MiB that one may.",
                hint="Simplify it.",
            )
        case Death.STACK:
            return GrammarTooComplex(
                "The grammar is nested too deeply: compiling it overflowed the stack.", hint="Simplify it."
            )
        case Death.TIME:
            return GrammarTooComplex("The grammar takes too much processor time to compile.", hint="Simplify it.")
        case Death.KILLED:
            logger.error("the process that compiles grammars was killed")
            return EngineUnavailable("The process that compiles grammars was killed.", hint="Send the request again.")
        case Death.CRASH:
            logger.error("the process that compiles grammars crashed")
            return GrammarCrashed("The grammar crashed the process that compiles it.", hint=CRASH_HINT)


def _error(checked: Checked) -> LoraserveError:
    """Rebuild the error that a process answered with."""
    error = error_from_code(checked.error_code or "", checked.message)
    error.hint = checked.hint
    if isinstance(error, InvalidRequest):
        error.param = checked.param
    return error
