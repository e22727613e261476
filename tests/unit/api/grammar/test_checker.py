"""Grammars checked in processes: once each, in tenants' turns, within bounds, whatever breaks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from core_clock import scheduled_s

from loraserve.api.grammar.checker import GrammarChecker
from loraserve.demo.pack import base_dir
from loraserve.errors import (
    EngineUnavailable,
    GrammarCrashed,
    GrammarTooComplex,
    InvalidRequest,
    LoraserveError,
    UnsupportedParameter,
)
from loraserve.limits import LIMITS, Limits
from loraserve.text.answer_format import AnswerFormat, AnswerKind
from loraserve.text.grammar_worker import Setup
from loraserve.text.workers.process import Death, WorkerDied, WorkerProcess


@pytest.fixture
async def make_checker() -> AsyncIterator[Callable[..., GrammarChecker]]:
    made: list[GrammarChecker] = []

    def make(*, eos: tuple[int, ...] = (3,), **limits: float) -> GrammarChecker:
        changed = Limits(**{**LIMITS.as_dict(), **limits})  # type: ignore[arg-type]
        made.append(GrammarChecker(lambda: Setup(str(base_dir()), 1536, eos), limits=changed))
        return made[-1]

    yield make
    for checker in made:
        await checker.close()


def regex(text: str) -> AnswerFormat:
    return AnswerFormat(kind=AnswerKind.REGEX, value=text, param="regex")


def endless(first: int = 0) -> AnswerFormat:
    """A schema with so many alternatives that comparing them takes many seconds."""
    schema = {"oneOf": [{"const": first + number} for number in range(8000)]}
    return AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=schema, param="schema")


def rules(count: int) -> AnswerFormat:
    """A chain of rules that takes more stack than there is."""
    lines = ["start: r0", *(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"']
    return AnswerFormat(kind=AnswerKind.LARK, value="\n".join(lines), param="grammar")


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_grammar_is_measured_and_remembered(make_checker) -> None:
    checker = make_checker()
    first, again = await checker.check("a", regex("[0-9]+")), await checker.check("a", regex("[0-9]+"))
    assert first == again
    assert first.num_bytes > 0
    assert checker.num_by_outcome == {"compiled": 1, "cached": 1}
    assert checker.check_s.num == 1


async def test_foreign_grammar_is_recompiled_and_leaks_no_timing(make_checker) -> None:
    checker = make_checker()
    # one after the other, together, and one that is wrong: b waits as long as if a weren't there
    await checker.check("a", regex("[0-9]+"))
    await checker.check("b", regex("[0-9]+"))
    await asyncio.gather(*(checker.check(tenant, regex("[a-z]+")) for tenant in "ab"))
    for tenant in "ab":
        with pytest.raises(InvalidRequest):
            await checker.check(tenant, regex("("))
    assert checker.check_s.num == 6
    assert checker.num_by_outcome == {"compiled": 4, "refused": 2}


async def test_requests_for_same_grammar_compile_once(make_checker) -> None:
    checker = make_checker()
    grammars = await asyncio.gather(*(checker.check("a", regex("[0-9]{4}")) for _ in range(8)))
    assert len({grammar.text for grammar in grammars}) == 1
    assert checker.check_s.num == 1
    assert checker.num_waiting == 0


async def test_grammar_errors_are_cached(make_checker) -> None:
    checker = make_checker()
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await checker.check("a", regex("("))
        assert caught.value.param == "regex"
    assert checker.num_by_outcome == {"refused": 2}
    assert checker.check_s.num == 1


async def test_memory_of_grammars_is_bounded(make_checker) -> None:
    checker = make_checker(max_checked_grammar_bytes=4000)
    for number in range(30):
        await checker.check("a", regex(f"[0-9]{{{number}}}x"))
    assert len(checker._known) < 15
    assert checker._known.num_bytes <= 4000


async def test_slow_process_is_killed_and_replaced(make_checker) -> None:
    checker = make_checker(grammar_timeout_s=0.5)
    await checker.check("a", regex("a"))
    started = scheduled_s()
    with pytest.raises(GrammarTooComplex, match=r"longer than 0\.5 s"):
        await checker.check("a", endless())
    assert scheduled_s() - started < 5
    assert (await checker.check("a", regex("b"))).text
    assert checker._processes._all[0].num_starts == 2
    # it is tried again: it may be the machine that was slow
    with pytest.raises(GrammarTooComplex):
        await checker.check("a", endless())
    assert checker.check_s.num == 4


async def test_broken_process_fails_only_own_request(make_checker) -> None:
    checker = make_checker()
    with pytest.raises(GrammarTooComplex, match="nested too deeply"):
        await checker.check("a", rules(9000))
    assert (await checker.check("a", rules(3))).text


async def test_cause_of_process_end_is_reported(make_checker, monkeypatch, subtests) -> None:
    checker = make_checker()
    await checker.check("a", regex("a"))
    for death, error, words in (
        (Death.MEMORY, GrammarTooComplex, "more memory to compile than the 512 MiB"),
        (Death.STACK, GrammarTooComplex, "nested too deeply"),
        (Death.TIME, GrammarTooComplex, "processor time"),
        (Death.CRASH, GrammarCrashed, "crashed the process"),
        (Death.KILLED, EngineUnavailable, "was killed"),
    ):

        async def die(*_: object, death: Death = death) -> bytes:
            raise WorkerDied(death)

        with subtests.test(death.value), monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "ask", die)
            with pytest.raises(LoraserveError, match=words) as caught:
                await checker.check("a", regex("b"))
            assert type(caught.value) is error
    assert checker.num_by_outcome == {"compiled": 1, "too_complex": 3, "crashed": 1}
    # nothing of it is remembered
    assert (await checker.check("a", regex("b"))).text


async def test_killed_process_is_restarted(make_checker) -> None:
    checker = make_checker()
    await checker.check("a", regex("a"))
    (process,) = checker._processes._all
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    await process._process.wait()
    assert (await checker.check("a", regex("b"))).text
    assert process.num_starts == 2


async def test_cancelled_check_kills_process_and_frees_slot(make_checker) -> None:
    checker = make_checker()
    await checker.check("a", regex("a"))
    pid = checker._processes._all[0]._process.pid
    task = asyncio.create_task(checker.check("a", endless()))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(pid)
    assert (await checker.check("a", regex("b"))).text


async def test_a_tenant_never_has_all_processes(make_checker) -> None:
    checker = make_checker()
    await asyncio.gather(checker.check("a", regex("a")), checker.check("b", regex("b")))
    hostile = [asyncio.create_task(checker.check("a", endless(i))) for i in range(4)]
    await asyncio.sleep(0.1)
    assert checker.num_waiting == 3
    await checker.check("b", regex("c"))
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_base_without_grammar_support_reports_so(make_checker) -> None:
    with pytest.raises(UnsupportedParameter, match="end-of-text"):
        await make_checker(eos=()).check("a", regex("a"))


async def test_unstartable_process_is_no_request_error(make_checker, monkeypatch) -> None:
    checker = make_checker()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EngineUnavailable):
        await checker.check("a", regex("a"))
    monkeypatch.undo()
    assert (await checker.check("a", regex("a"))).text


async def test_closing_leaves_no_process_behind(make_checker) -> None:
    checker = make_checker()
    await checker.check("a", regex("a"))
    pid = checker._processes._all[0]._process.pid
    await checker.close()
    assert not is_running(pid)
