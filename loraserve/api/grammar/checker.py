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
from loraserve.tenancy.limits.turns import TenantTurns
from loraserve.tenant_cache import TenantCache
from loraserve.text.answer_format import AnswerFormat
from loraserve.text.grammar import CRASH_HINT
from loraserve.text.grammar_worker import MAX_WORK_BYTES, Checked, Setup
from loraserve.text.workers.process import Death, WorkerDied, WorkerProcess, WorkerStartFailed
from loraserve.types import Histogram

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""Processes that compile grammars, started when they are needed. A tenant never has both."""
_START_S = 30.0
"""Seconds that a process may take to start and to read the tokenizer."""

_ENTRY_BYTES = 256
"""Bytes that a checked grammar takes beside its texts."""

COMPILED, CACHED, REFUSED, TOO_COMPLEX, CRASHED = "compiled", "cached", "refused", "too_complex", "crashed"
OUTCOMES = (COMPILED, CACHED, REFUSED, TOO_COMPLEX, CRASHED)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the engine can follow.

    Attributes:
        text: llguidance's JSON form.
        num_bytes: memory that it keeps once it is compiled; 0: unknown.
    """

    text: str
    num_bytes: int = 0


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
            GrammarCrashed: the process crashed.
            EngineUnavailable: no process can be started, or it was killed.
        """
        try:
            answer = await self._process.ask(msgspec.json.encode(wanted), timeout_s, start_timeout_s)
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

    async def close(self) -> None:
        """Kill the process, if there is one."""
        await self._process.close()


class GrammarChecker:
    """Compile the grammars of requests in processes of their own, once for each tenant.

    Args:
        setup: called when a process is made.

    Attributes:
        num_by_outcome: grammars that were asked for.
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
        self._turns = TenantTurns(NUM_PROCESSES)
        self._idle: list[GrammarProcess] = []
        self._all: list[GrammarProcess] = []
        self._known: TenantCache[Checked] = TenantCache(limits.max_checked_grammar_bytes)
        self._seconds = Timings()

    @property
    def check_s(self) -> Histogram:
        """Seconds of each compilation, without the wait for a process."""
        return self._seconds.histogram

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a process."""
        return self._turns.num_waiting

    async def check(self, tenant: str, wanted: AnswerFormat) -> Grammar:
        """Return the grammar of a format, once it has been compiled.

        Raises:
            InvalidRequest: it is no grammar, or can't be enforced; `param` names the place.
            GrammarTooComplex: compiling it takes more time or memory than it may.
            GrammarCrashed: it crashed its compiler.
            ConfigError, UnsupportedParameter: this base can't follow grammars.
        """
        key = hashlib.sha256(msgspec.json.encode(wanted)).digest()
        checked = self._known.get(tenant, key)
        if checked is None:
            checked = await self._compile(tenant, key, wanted)
            outcome = COMPILED
        else:
            outcome = CACHED
        if checked.error_code is None:
            self.num_by_outcome[outcome] += 1
            return Grammar(checked.grammar, checked.num_bytes)
        error = _error(checked)
        self.num_by_outcome[_OUTCOMES.get(type(error), REFUSED)] += 1
        raise error

    async def close(self) -> None:
        """Kill the processes."""
        for process in self._all:
            await process.close()

    async def _compile(self, tenant: str, key: bytes, wanted: AnswerFormat) -> Checked:
        await self._turns.take(tenant)
        try:
            # while this one waited, another may have asked for the same
            known = self._known.get(tenant, key)
            if known is not None:
                return known
            if not self._idle:
                self._all.append(GrammarProcess(self._setup()))
                self._idle.append(self._all[-1])
            process = self._idle.pop()
            started = self._clock()
            try:
                checked = await process.ask(wanted, self._limits.grammar_timeout_s, _START_S)
            except (GrammarTooComplex, GrammarCrashed) as error:
                # not remembered: it may be this machine that was slow, or has little memory
                self._seconds.add(self._clock() - started)
                return Checked(error_code=error.code, message=error.message, hint=error.hint, param=wanted.param)
            finally:
                self._idle.append(process)
        finally:
            self._turns.give_back(tenant)
        self._seconds.add(checked.seconds)
        self._known.put(tenant, key, checked, len(checked.grammar) + len(checked.message) + _ENTRY_BYTES)
        return checked


_OUTCOMES: Mapping[type[LoraserveError], str] = {GrammarTooComplex: TOO_COMPLEX, GrammarCrashed: CRASHED}


def _death_error(death: Death) -> LoraserveError:
    """Return the error of a request whose grammar ended its process."""
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
    """Return the error that a process answered with."""
    error = error_from_code(checked.error_code or "", checked.message)
    error.hint = checked.hint
    if isinstance(error, InvalidRequest):
        error.param = checked.param
    return error
