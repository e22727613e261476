"""Uploads stand back for steps that are computed on the same processors, and for nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from loraserve import rests
from loraserve.rests import FACTOR, LONGEST_S, LONGEST_TURN_S, WORTH_S, Rest, Rests

Naps = list[float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module's own clock; other threads of the process have theirs."""
    clock = SimpleNamespace(sleep=time.sleep, thread_time=time.thread_time, monotonic=time.monotonic)
    monkeypatch.setattr(rests, "time", clock)
    return clock


@pytest.fixture
def naps(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Naps:
    """The rests that are taken, none of which is waited for."""
    taken: Naps = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)

    loop = SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(rests, "asyncio", loop)
    clock.sleep = taken.append
    return taken


@pytest.fixture
def work(clock: SimpleNamespace) -> Callable[[float], None]:
    """What takes a processor so many seconds."""
    now = 0.0

    def do(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock.thread_time = lambda: now
    return do


async def test_a_piece_of_work_is_followed_by_a_rest_in_proportion(naps: Naps, work: Callable[[float], None]) -> None:
    assert await Rests(lambda: True).after(lambda: work(0.01)) is None
    assert naps == [pytest.approx(0.01 * FACTOR)]


async def test_a_rest_is_bounded(naps: Naps, work: Callable[[float], None]) -> None:
    await Rests(lambda: True).after(lambda: work(100.0))
    assert naps == [LONGEST_S]


async def test_rests_of_many_follow_each_other(
    naps: Naps, work: Callable[[float], None], clock: SimpleNamespace
) -> None:
    clock.monotonic = lambda: 100.0
    shared = Rests(lambda: True)
    for _ in range(3):
        await shared.after(lambda: work(0.01))
    await shared.in_pieces(lambda rest: (work(0.01), rest()))
    assert naps == [pytest.approx(0.01 * FACTOR * i) for i in (1, 2, 3, 4)]
    # they are over
    clock.monotonic = lambda: 101.0
    await shared.after(lambda: work(0.01))
    assert naps[4] == pytest.approx(0.01 * FACTOR)
    naps.clear()
    for _ in range(20):
        await shared.after(lambda: work(1.0))
    assert max(naps) == pytest.approx(LONGEST_TURN_S)


async def test_where_nothing_is_computed_nothing_rests(naps: Naps, work: Callable[[float], None]) -> None:
    is_computing = False
    between = Rests(lambda: is_computing)
    assert await between.after(lambda: work(1.0) or "done") == "done"

    def in_pieces(rest: Rest) -> str:
        nonlocal is_computing
        work(1.0)
        rest()
        assert naps == []
        is_computing = True
        # what was done before doesn't count any more
        rest()
        assert naps == []
        work(0.01)
        rest()
        return "done"

    assert await between.in_pieces(in_pieces) == "done"
    assert naps == [pytest.approx(0.01 * FACTOR)]


async def test_on_a_thread_pieces_add_up_to_what_is_worth_a_rest(naps: Naps, work: Callable[[float], None]) -> None:
    work(100.0)

    def in_pieces(rest: Rest) -> None:
        for _ in range(5):
            work(WORTH_S * 0.3)
            rest()

    await Rests(lambda: True).in_pieces(in_pieces)
    assert naps == [pytest.approx(WORTH_S * 1.2 * FACTOR)]


async def test_what_rests_on_its_thread_keeps_none_from_others() -> None:
    with ThreadPoolExecutor(1) as threads:
        own = Rests(lambda: True, threads)
        names = await asyncio.gather(*(own.in_pieces(lambda rest: threading.current_thread().name) for _ in range(3)))
        assert len(set(names)) == 1
        assert names[0] != await asyncio.to_thread(lambda: threading.current_thread().name)


async def test_the_time_of_the_thread_that_works_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Naps = []

    def rest_s(work_s: float) -> float:
        taken.append(work_s)
        return 0.0

    def spin(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    def in_pieces(rest: Rest) -> None:
        spin(0.01)
        rest()

    monkeypatch.setattr(rests, "_rest_s", rest_s)
    # the event loop's thread has had more than the other will
    spin(0.05)
    await Rests(lambda: True).in_pieces(in_pieces)
    assert taken == [pytest.approx(0.01, rel=0.5)]


async def test_an_error_comes_without_a_rest(naps: Naps) -> None:
    with pytest.raises(ZeroDivisionError):
        await Rests(lambda: True).after(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert naps == []


async def test_others_go_on_meanwhile() -> None:
    began = time.perf_counter()
    busy = Rests(lambda: True)

    def spin() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    task = asyncio.create_task(busy.after(spin))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks >= 5
    assert time.perf_counter() - began >= 0.02 * (1 + FACTOR) * 0.95
