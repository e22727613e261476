"""Work beside the steps: what it takes of the processors, when it runs again, and how it fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from loraserve import background
from loraserve.background import (
    BACKGROUND_NICENESS,
    LOADER_NICENESS,
    MIN_WORK_S,
    STEP_MAX_PAUSE_S,
    STEP_SHARE,
    UPLOAD_MAX_PAUSE_S,
    UPLOAD_MAX_WAIT_S,
    UPLOAD_PAUSE_FACTOR,
    BackgroundTask,
    Backoff,
    Pause,
    Throttle,
    collector_paused,
    lower_thread_priority,
)
from loraserve.errors import DatabaseUnavailable

Pauses = list[float]

logger = logging.getLogger("loraserve.test")

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")


# threads of low priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_idle_thread_is_scheduled_after_all_other_threads() -> None:
    def run() -> tuple[int, int]:
        lower_thread_priority(BACKGROUND_NICENESS, is_idle=True)
        return os.sched_getscheduler(threading.get_native_id()), niceness()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result() == (os.SCHED_IDLE, BACKGROUND_NICENESS)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@linux
def test_niceness_is_capped_at_the_highest() -> None:
    def run() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 18)
        lower_thread_priority(LOADER_NICENESS)
        return niceness()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result() == 19


def test_priorities_stay_unchanged_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with ThreadPoolExecutor(1, initializer=lower_thread_priority, initargs=(BACKGROUND_NICENESS,)) as executor:
        assert executor.submit(niceness).result() == niceness()


# throttle, as uploads use it


def uploads(**kwargs: object) -> Throttle:
    return Throttle(is_serving=lambda: True, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Return the list of pauses that are begun; none takes time."""
    taken: Pauses = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)

    loop = SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(background, "asyncio", loop)
    monkeypatch.setattr(Throttle, "_block", lambda _, seconds: taken.append(seconds))
    return taken


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that seems to work for so many seconds."""
    now = 0.0

    def do(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(background, "thread_time", lambda: now)
    return do


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_is_followed_by_proportional_pause(pauses: Pauses, work: Callable[[float], None]) -> None:
    assert await uploads().run(lambda: work(0.01)) is None
    assert pauses == [pytest.approx(0.01 * UPLOAD_PAUSE_FACTOR)]


async def test_a_pause_is_bounded(pauses: Pauses, work: Callable[[float], None]) -> None:
    await uploads().run(lambda: work(100.0))
    assert pauses == [pytest.approx(UPLOAD_MAX_PAUSE_S)]


async def test_pauses_of_many_uploads_follow_each_other(
    pauses: Pauses, work: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "monotonic", lambda: 100.0)
    shared = uploads()
    for _ in range(3):
        await shared.run(lambda: work(0.01))
    await shared.run_in_pieces(lambda pause: (work(0.01), pause()))
    assert pauses == [pytest.approx(0.01 * UPLOAD_PAUSE_FACTOR * i) for i in (1, 2, 3, 4)]
    # they are over
    monkeypatch.setattr(background, "monotonic", lambda: 101.0)
    await shared.run(lambda: work(0.01))
    assert pauses[4] == pytest.approx(0.01 * UPLOAD_PAUSE_FACTOR)
    pauses.clear()
    for _ in range(20):
        await shared.run(lambda: work(1.0))
    assert max(pauses) == pytest.approx(UPLOAD_MAX_WAIT_S)


async def test_work_pauses_only_while_serving(pauses: Pauses, work: Callable[[float], None]) -> None:
    is_serving = False
    throttle = Throttle(is_serving=lambda: is_serving)
    assert await throttle.run(lambda: work(1.0) or "done") == "done"

    def in_pieces(pause: Pause) -> str:
        nonlocal is_serving
        work(1.0)
        pause()
        assert pauses == []
        is_serving = True
        # work done before doesn't count any more
        pause()
        assert pauses == []
        work(0.01)
        pause()
        return "done"

    assert await throttle.run_in_pieces(in_pieces) == "done"
    assert pauses == [pytest.approx(0.01 * UPLOAD_PAUSE_FACTOR)]


async def test_short_pieces_accumulate_until_worth_a_pause(pauses: Pauses, work: Callable[[float], None]) -> None:
    work(100.0)

    def in_pieces(pause: Pause) -> None:
        for _ in range(5):
            work(MIN_WORK_S * 0.3)
            pause()

    await uploads().run_in_pieces(in_pieces)
    assert pauses == [pytest.approx(MIN_WORK_S * 1.2 * UPLOAD_PAUSE_FACTOR)]


async def test_work_in_pieces_runs_on_the_threads_given() -> None:
    with ThreadPoolExecutor(1) as threads:
        own = uploads(threads=threads)
        names = await asyncio.gather(
            *(own.run_in_pieces(lambda pause: threading.current_thread().name) for _ in range(3))
        )
        assert len(set(names)) == 1
        assert names[0] != await asyncio.to_thread(lambda: threading.current_thread().name)


async def test_the_time_of_the_working_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Pauses = []

    def queue(_: Throttle, work_s: float) -> float:
        taken.append(work_s)
        return 0.0

    monkeypatch.setattr(Throttle, "_queue", queue)
    # the event loop's thread has had more than the other will
    spin(0.05)
    await uploads().run_in_pieces(lambda pause: (spin(0.01), pause()))
    assert taken == [pytest.approx(0.01, rel=0.5)]


async def test_an_error_comes_without_a_pause(pauses: Pauses) -> None:
    with pytest.raises(ZeroDivisionError):
        await uploads().run(lambda: 1 // 0)
    assert pauses == []


async def test_the_event_loop_goes_on_meanwhile() -> None:
    began = time.perf_counter()
    task = asyncio.create_task(uploads().run(lambda: spin(0.02)))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks >= 5
    assert time.perf_counter() - began >= 0.02 * (1 + UPLOAD_PAUSE_FACTOR) * 0.95


# throttle, as background work in the engine uses it


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def pause_after(throttle: Throttle, work_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the seconds that a thread pauses after so much work."""
    clock = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(background, "thread_time", lambda: clock[0])
        pause = throttle.on_thread()
        clock[0] = work_s
        return pause()


def serving(num_processors: float = 2.0) -> Throttle:
    throttle = Throttle.beside_steps(num_processors)
    throttle.note(is_serving=True)
    return throttle


def test_background_work_gets_fixed_processor_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "STEP_SHARE", 0.1)
    assert 0.08 <= pause_after(serving(), 0.02, monkeypatch) < 0.5


def test_three_threads_share_single_threads_allowance(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "STEP_SHARE", 0.1)
    throttle = serving()
    began_s = time.monotonic()
    list(threads.map(throttle._pause, [0.02] * 3))
    assert time.monotonic() - began_s >= 3 * 0.08


def test_no_pause_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pause_after(Throttle.beside_steps(2), 0.5, monkeypatch) < 0.05
    assert pause_after(serving(math.inf), 0.5, monkeypatch) == 0.0
    assert pause_after(serving(1 / STEP_SHARE), 0.5, monkeypatch) == 0.0
    # short work adds up, but doesn't begin another piece in a long step
    assert pause_after(serving(), MIN_WORK_S / 2, monkeypatch) == 0.0


def test_pauses_end_with_the_requests(threads: ThreadPoolExecutor) -> None:
    throttle = serving()
    pausing = [threads.submit(throttle._pause, 10.0) for _ in range(2)]
    time.sleep(0.05)
    assert not any(pause.done() for pause in pausing)
    throttle.note(is_serving=False)
    assert all(pause.result(1.0) < STEP_MAX_PAUSE_S / 2 for pause in pausing)
    # and are forgotten
    throttle.note(is_serving=True)
    assert throttle._pause(0.0) < 0.05


def test_a_pause_beside_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "STEP_MAX_PAUSE_S", 0.1)
    assert 0.1 <= serving()._pause(0.5) < 5.0


def test_work_avoids_long_steps_unless_endless(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LONG_STEP_PATIENCE_S", 2.0)
    throttle = Throttle.beside_steps(2)
    throttle.note(is_serving=True, is_long=True)
    pausing = threads.submit(throttle._pause, 0.0)
    time.sleep(0.05)
    assert not pausing.done()
    throttle.note(is_serving=True)
    assert pausing.result(10.0) < 2.0
    monkeypatch.setattr(background, "LONG_STEP_PATIENCE_S", 0.1)
    throttle.note(is_serving=True, is_long=True)
    assert 0.1 <= throttle._pause(0.0) < 2.0


# tasks that run again and again


async def test_task_runs_once_per_interval_until_closed() -> None:
    calls = asyncio.Queue[None]()

    async def work() -> None:
        calls.put_nowait(None)

    task = BackgroundTask("test", work, 0.0, failure="the test fails", logger=logger)
    assert not task.is_running
    task.start()
    assert task.is_running
    for _ in range(3):
        await asyncio.wait_for(calls.get(), 5.0)
    await task.close()
    assert not task.is_running
    num_calls = calls.qsize()
    await asyncio.sleep(0.02)
    assert calls.qsize() == num_calls


async def test_unstarted_task_can_be_closed() -> None:
    async def work() -> None: ...

    await BackgroundTask("test", work, 1.0, failure="the test fails", logger=logger).close()


async def test_close_cancels_the_call_under_way() -> None:
    has_begun, was_cancelled = asyncio.Event(), False

    async def work() -> None:
        nonlocal was_cancelled
        has_begun.set()
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    task = BackgroundTask("test", work, 0.0, failure="the test fails", logger=logger)
    task.start()
    await has_begun.wait()
    await task.close()
    assert was_cancelled


@pytest.mark.parametrize(("first_delay_s", "expected"), [(None, [7.0, 7.0, 8.0]), (0.5, [0.5, 7.0, 8.0])])
async def test_the_interval_is_asked_for_each_time(
    first_delay_s: float | None, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    intervals = [7.0, 7.0, 8.0] if first_delay_s is None else [7.0, 8.0]
    has_ended = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if not intervals:
            has_ended.set()
            raise asyncio.CancelledError

    async def work() -> None: ...

    monkeypatch.setattr(background, "asyncio", SimpleNamespace(sleep=sleep))
    task = BackgroundTask(
        "test", work, lambda: intervals.pop(0), failure="the test fails", logger=logger, first_delay_s=first_delay_s
    )
    with pytest.raises(asyncio.CancelledError):
        await task.run()
    assert slept == expected


@pytest.mark.parametrize(("logs_once", "num_logged"), [(False, 4), (True, 2)])
async def test_failing_task_is_logged_and_retried(
    logs_once: bool, num_logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception | None] = [DatabaseUnavailable("away"), ZeroDivisionError("ours"), None]
    errors += [DatabaseUnavailable("away"), ZeroDivisionError("ours")]
    is_over = asyncio.Event()

    async def work() -> None:
        if not errors:
            is_over.set()
            return
        error = errors.pop(0)
        if error is not None:
            raise error

    caplog.set_level(logging.INFO, logger.name)
    task = BackgroundTask(
        "test", work, 0.0, failure="the test fails", logger=logger, level=logging.INFO, logs_once=logs_once
    )
    task.start()
    await asyncio.wait_for(is_over.wait(), 5.0)
    await task.close()
    assert len(caplog.records) == num_logged
    first = caplog.records[0]
    assert (first.levelno, first.getMessage(), first.exc_info) == (logging.INFO, "the test fails: away", None)
    if not logs_once:
        assert (caplog.records[1].levelno, bool(caplog.records[1].exc_info)) == (logging.ERROR, True)


# delays


def test_delays_double_up_to_a_bound() -> None:
    backoff = Backoff(0.5, 5.0)
    assert [backoff.delay_s(num) for num in (1, 2, 3, 4, 5, 10_000)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_objects_created_during_imports_are_never_garbage_collected() -> None:
    collections: list[str] = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with collector_paused():
            made = [[] for _ in range(100_000)]
        assert collections == []
        collected = gc.get_objects()
        assert gc.isenabled()
        assert not any(one is made for one in collected)
        gc.collect()
        assert collections == ["start", "stop"]
    finally:
        gc.callbacks.pop()


def test_garbage_collector_resumes_after_failed_import() -> None:
    with pytest.raises(ImportError), collector_paused():
        raise ImportError("no such library")
    assert gc.isenabled()
