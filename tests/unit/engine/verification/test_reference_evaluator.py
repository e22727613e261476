"""What certificates compare with: several adapters in one pass,
none of which suffers from another.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from adapters_store import open_store
from loraserve import background
from loraserve.adapters.compiler import Reserve
from loraserve.adapters.format.peft_format import Buffer
from loraserve.adapters.ir import AdapterIR
from loraserve.background import Throttle
from loraserve.engine.engine import Engine
from loraserve.engine.verification import reference_evaluator as module
from loraserve.engine.verification.reference_evaluator import Reference, ReferenceEvaluator
from loraserve.engine.worker.startup import build_engine
from loraserve.errors import AdapterCorrupt
from loraserve.model.reference_model import ReferenceBase
from loraserve.model.reference_pass import Evaluation, Stopped, Subject
from loraserve.types import BaseSpec, Digest

from ..conftest import World

NAMES = ("r1", "r8", "rs", "mixed")


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Engine]:
    parts = build_engine(world.config())
    yield parts.engine
    parts.close()


@pytest.fixture
def throttle() -> Throttle:
    return Throttle.beside_steps(math.inf)


@pytest.fixture
def pauses(throttle: Throttle, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the threads of all pauses, by the start of their names; no pause takes time."""
    threads: list[str] = []

    def note(work_s: float) -> float:
        threads.append(threading.current_thread().name.split("_")[0])
        return 0.0

    monkeypatch.setattr(background, "MIN_WORK_S", -1.0)
    monkeypatch.setattr(throttle, "is_needed", True)
    monkeypatch.setattr(throttle, "_pause", note)
    return threads


@pytest.fixture
def evaluator(world: World, engine: Engine, throttle: Throttle) -> Iterator[ReferenceEvaluator]:
    made = ReferenceEvaluator(
        engine._pipeline._runner._decoder, engine.base, open_store(world.store_url), lambda: None, throttle
    )  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many adapters went through each pass over the base, and on which thread."""
    seen: list[tuple[int, int]] = []
    evaluate = module.evaluate

    def counted(base: ReferenceBase, subjects: Sequence[Subject], **options: Any) -> list[Evaluation]:
        seen.append((len(subjects), threading.get_native_id()))
        return evaluate(base, subjects, **options)

    monkeypatch.setattr(module, "evaluate", counted)
    return seen


def make(evaluator: ReferenceEvaluator, world: World, names: Sequence[str] = NAMES) -> dict[str, Reference]:
    made = {name: Reference(world.refs[name]) for name in names}
    evaluator.make([*made.values()], {})
    return made


def test_adapters_evaluated_together_match_single_evaluations(
    evaluator: ReferenceEvaluator, world: World, passes: list[tuple[int, int]]
) -> None:
    together = make(evaluator, world)
    assert [count for count, _ in passes] == [4]
    for name, reference in together.items():
        alone = make(evaluator, world, [name])[name].evaluation.result()
        found = reference.evaluation.result()
        for own, other in zip((*found.base, *found.adapted), (*alone.base, *alone.adapted), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=0)


def test_unreadable_adapter_alone_gets_no_reference(evaluator: ReferenceEvaluator, world: World) -> None:
    gone = msgspec.structs.replace(world.refs["rs"], weights_blob=Digest("0" * 64))
    made = [Reference(world.refs["r8"]), Reference(gone), Reference(world.refs["r1"])]
    evaluator.make(made, {})
    with pytest.raises(AdapterCorrupt):
        made[1].sequences.result(0)
    assert not made[1].evaluation.done()
    assert all(made[i].evaluation.result(0) for i in (0, 2))


def test_failing_evaluation_leaves_sibling_adapters_evaluated(
    evaluator: ReferenceEvaluator, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = module.evaluate

    def failing(base: ReferenceBase, subjects: Sequence[Subject], **options: Any) -> list[Evaluation]:
        if any(subject.terms[0][0].modules[0].rank == 8 for subject in subjects):
            raise RuntimeError("of r8")
        return evaluate(base, subjects, **options)

    monkeypatch.setattr(module, "evaluate", failing)
    made = make(evaluator, world)
    assert [name for name in NAMES if made[name].evaluation.exception(0) is not None] == ["r8"]


def test_large_adapters_are_evaluated_separately(
    evaluator: ReferenceEvaluator, world: World, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 0)
    assert all(reference.evaluation.done() for reference in make(evaluator, world).values())
    assert [count for count, _ in passes] == [1, 1, 1, 1]


def test_unfolded_bytes_count_as_held(
    evaluator: ReferenceEvaluator, world: World, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_adapter, unfolded = module.open_adapter, 1 << 20

    def unfolding(config: Buffer, weights: Buffer, spec: BaseSpec, *, reserve: Reserve) -> AdapterIR:
        # as LoKr of a few kilobytes
        reserve(unfolded)
        return open_adapter(config, weights, spec)

    monkeypatch.setattr(module, "open_adapter", unfolding)
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 3 * unfolded // 2)
    assert all(reference.evaluation.done() for reference in make(evaluator, world).values())
    assert [count for count, _ in passes] == [2, 2]


def test_unwanted_references_are_neither_read_nor_evaluated(
    evaluator: ReferenceEvaluator, world: World, passes: list[tuple[int, int]]
) -> None:
    made = [Reference(world.refs[name]) for name in NAMES]
    made[0].is_wanted = made[2].is_wanted = False
    evaluator.make(made, {})
    assert [reference.sequences.done() for reference in made] == [False, True, False, True]
    assert [count for count, _ in passes] == [2]


def test_evaluation_stops_once_reference_is_unwanted(evaluator: ReferenceEvaluator, world: World) -> None:
    made = Reference(world.refs["r8"])
    evaluator._when_read = lambda: setattr(made, "is_wanted", False)
    evaluator.make([made], {})
    assert isinstance(made.evaluation.exception(0), Stopped)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_starved_evaluation_moves_to_normal_priority_thread(
    evaluator: ReferenceEvaluator, world: World, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARVED_AFTER_S", 0.0)
    monkeypatch.setattr(module, "STARVED_SHARE", 1e9)
    made = make(evaluator, world, ["r8"])["r8"]
    assert made.evaluation.result(0).adapted
    (_, starved), (_, other) = passes
    assert starved != other == threading.get_native_id()
    assert (os.sched_getscheduler(starved), os.sched_getscheduler(other)) == (os.SCHED_IDLE, os.SCHED_OTHER)


def test_brief_work_runs_in_idle_time_or_immediately(
    evaluator: ReferenceEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluator.in_idle_time(threading.get_native_id) != threading.get_native_id()
    gate = threading.Event()
    evaluating = evaluator._idle.submit(gate.wait, 30)
    assert evaluator.in_idle_time(threading.get_native_id) != threading.get_native_id()
    busy = evaluator._briefly_idle.submit(gate.wait, 30)
    monkeypatch.setattr(module, "STARVED_AFTER_S", 0.01)
    assert evaluator.in_idle_time(threading.get_native_id) == threading.get_native_id()
    gate.set()
    assert busy.result(10)
    assert evaluating.result(10)
    with pytest.raises(ZeroDivisionError):
        evaluator.in_idle_time(lambda: 1 // 0)


def test_evaluation_reading_and_verdict_are_throttled(
    evaluator: ReferenceEvaluator, engine: Engine, world: World, pauses: list[str]
) -> None:
    """Evaluations between their products, readings and verdicts between one and the next;
    each on its own thread.
    """
    make(evaluator, world, ["r8", "r1"])
    assert pauses.count(threading.current_thread().name) == 2 + 1
    assert pauses.count("evaluation") == world_products(engine)
    evaluator.in_idle_time(lambda: None)
    assert pauses[-1] == "verdict"


def test_evaluation_is_not_throttled_without_end(
    evaluator: ReferenceEvaluator, world: World, pauses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_THROTTLED_S", 0.0)
    make(evaluator, world, ["r8"])
    assert "evaluation" not in pauses


def world_products(engine: Engine) -> int:
    """Of the base's weights in one pass: q, k and v, o, gate and up, and down of each layer,
    and the head.
    """
    return 4 * engine._pipeline._runner._decoder.config.num_layers + 1  # type: ignore[attr-defined]


def test_pauses_are_no_starvation(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"monotonic": 100.0, "thread_time": 1.0}
    for name in clocks:
        monkeypatch.setattr(module, name, lambda name=name: clocks[name])
    share = module._Share()
    clocks.update(monotonic=120.0, thread_time=1.9)
    share.leave_out(3.0)
    assert not share.is_starved()
    clocks["monotonic"] += 3.0
    assert share.is_starved()


def test_failed_reading_resolves_every_pending_future(evaluator: ReferenceEvaluator, world: World) -> None:
    made = [Reference(world.refs[name]) for name in NAMES]
    evaluator._when_read = lambda: 1 / 0
    evaluator.make(made, {})
    assert all(reference.sequences.done() and reference.evaluation.done() for reference in made)


def test_working_thread_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"monotonic": 100.0, "thread_time": 1.0}
    for name in clocks:
        monkeypatch.setattr(module, name, lambda name=name: clocks[name])
    share = module._Share()
    for elapsed_s, worked_s, expected in ((4.0, 0.0, False), (20.0, 1.1, False), (20.0, 0.9, True)):
        clocks.update(monotonic=100.0 + elapsed_s, thread_time=1.0 + worked_s)
        assert share.is_starved() is expected
