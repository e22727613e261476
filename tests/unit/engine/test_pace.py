"""Work beside the steps rests for as long as its share of the processors says, and for nobody who isn't there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraserve.engine import pace as module
from loraserve.engine.pace import Pace
from loraserve.engine.worker.startup import build_engine

from .conftest import World
from .test_engine import add, run


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def rest_after(pace: Pace, work_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """The seconds that who has worked so long rests."""
    clock = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(module, "thread_time", lambda: clock[0])
        rest = pace.on_thread()
        clock[0] = work_s
        return rest()


def serving(num_processors: float = 2.0) -> Pace:
    pace = Pace(num_processors)
    pace.note(is_serving=True)
    return pace


def test_work_has_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", 0.1)
    rested_s = rest_after(serving(), 0.02, monkeypatch)
    assert 0.08 <= rested_s < 0.5


def test_rests_follow_one_another(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads get no more, all together, than one."""
    monkeypatch.setattr(module, "SHARE", 0.1)
    pace = serving()
    began_s = time.monotonic()
    list(threads.map(pace._rest, [0.02] * 3))
    assert time.monotonic() - began_s >= 3 * 0.08


def test_nobody_rests_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rest_after(Pace(2), 0.5, monkeypatch) < 0.05
    assert rest_after(serving(math.inf), 0.5, monkeypatch) == 0.0
    assert rest_after(serving(1 / module.SHARE), 0.5, monkeypatch) == 0.0
    # what is hardly anything is added up, but doesn't begin another piece in a long step
    assert rest_after(serving(), module.WORTH_S / 2, monkeypatch) == 0.0


def test_rest_ends_with_the_requests(threads: ThreadPoolExecutor) -> None:
    pace = serving()
    resting = [threads.submit(pace._rest, 10.0) for _ in range(2)]
    time.sleep(0.05)
    assert not any(rest.done() for rest in resting)
    pace.note(is_serving=False)
    assert all(rest.result(1.0) < module.LONGEST_S / 2 for rest in resting)
    # and is forgotten
    pace.note(is_serving=True)
    assert pace._rest(0.0) < 0.05


def test_a_rest_is_not_longer_than_somebody_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.1)
    assert 0.1 <= serving()._rest(0.5) < 5.0


def test_nothing_begins_in_long_steps_unless_they_have_no_end(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    pace = Pace(2)
    pace.note(is_serving=True, is_long=True)
    resting = threads.submit(pace._rest, 0.0)
    time.sleep(0.05)
    assert not resting.done()
    pace.note(is_serving=True)
    assert resting.result(10.0) < 2.0
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    pace.note(is_serving=True, is_long=True)
    assert 0.1 <= pace._rest(0.0) < 2.0


@pytest.mark.parametrize("num_loading", [0, 1])
def test_steps_tell_what_they_compute(num_loading: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = build_engine(world.config())
    told: list[tuple[bool, bool]] = []
    note = engine.pace.note

    def noted(*, is_serving: bool, is_long: bool = False) -> None:
        told.append((is_serving, is_long))
        note(is_serving=is_serving, is_long=is_long)

    monkeypatch.setattr(engine.pace, "note", noted)
    monkeypatch.setattr(type(engine.pager), "num_loading", property(lambda _: num_loading))
    add(engine, world, [5, 6, 7, 8], max_tokens=3)
    run(engine)
    # the step with the prompt, two with a token, and that it's over
    beside_load = num_loading > 0
    assert told == [(True, True), (True, beside_load), (True, beside_load), (False, False)]
    assert engine.pace.is_needed == (module.SHARE * torch.get_num_threads() < 1)
    # also where no step follows
    aborted = add(engine, world, [5, 6, 7, 8], max_tokens=30)
    engine.step()
    assert told[-1][0]
    engine.abort(aborted)
    assert told[-1] == (False, False)
    assert engine.verifications is not None
    engine.verifications.close()
    engine.pager.close()
