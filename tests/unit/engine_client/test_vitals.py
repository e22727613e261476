"""Times for which an engine was silent, and quiet: what counts, and what doesn't."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from stopped_clock import StoppedClock

from loraserve.engine_client.vitals import Vitals, core_wait_s
from loraserve.progress import Progress


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(100.0)


@pytest.fixture
def vitals(clock: StoppedClock) -> Vitals:
    return Vitals(max_tick_s=0.5, clock=clock)


def pass_time(clock: StoppedClock, vitals: Vitals, seconds: float, tick_s: float = 0.25) -> None:
    for _ in range(round(seconds / tick_s)):
        clock.now_s += tick_s
        vitals.tick()


def test_silent_process_counts_as_quiet(clock: StoppedClock, vitals: Vitals) -> None:
    pass_time(clock, vitals, 3)
    assert vitals.quiet_s == 3
    assert not vitals.has_spoken


def test_pulse_without_progress_keeps_process_quiet(clock: StoppedClock, vitals: Vitals) -> None:
    vitals.note_pulse(7, "computing a step", "computing a step")
    for _ in range(4):
        pass_time(clock, vitals, 1)
        vitals.note_pulse(7, "computing a step", "computing a step")
    assert vitals.quiet_s == 4
    vitals.note_pulse(8, "computing a step", "computing a step")
    assert vitals.quiet_s == 0


def test_a_message_of_the_working_thread_is_progress(clock: StoppedClock, vitals: Vitals) -> None:
    pass_time(clock, vitals, 3)
    vitals.note_message()
    assert vitals.quiet_s == 0


@pytest.mark.parametrize("away_s", [30, 86_400])
def test_watcher_pause_does_not_count_as_quiet(clock: StoppedClock, vitals: Vitals, away_s: float) -> None:
    """A laptop sleeps, or a container with both processes is frozen:
    the engine had no chance to speak either.
    """
    pass_time(clock, vitals, 1)
    clock.now_s += away_s
    vitals.tick()
    assert vitals.quiet_s == 1.5
    pass_time(clock, vitals, 1)
    assert vitals.quiet_s == 2.5


def test_wait_for_core_is_no_hang(clock: StoppedClock) -> None:
    """A wait is counted when it ends: what was counted as stuck before is taken back."""
    waited_s = 0.0
    vitals = Vitals(max_tick_s=0.5, clock=clock, core_wait_s=lambda: waited_s)
    for _ in range(100):
        pass_time(clock, vitals, 2)
        waited_s += 1.8
        clock.now_s += 0.0
        vitals.tick()
    assert vitals.quiet_s == pytest.approx(200)
    assert vitals.stuck_s == pytest.approx(20)
    pass_time(clock, vitals, 30)
    assert vitals.stuck_s == pytest.approx(50)
    vitals.note_message()
    assert vitals.stuck_s == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
def test_core_wait_counts_process_without_core() -> None:
    """Of two processes on one core, the one of lower priority waits for most of the time."""
    core = min(os.sched_getaffinity(0))
    script = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.nice(int(sys.argv[1]))\nwhile True: pass"
    rival, waiting = (subprocess.Popen([sys.executable, "-c", script, nice]) for nice in ("0", "10"))
    try:
        deadline = time.monotonic() + 60
        while core_wait_s(waiting.pid) < 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert core_wait_s(waiting.pid) >= 0.5
        # that of a process counts for the one that started it
        assert core_wait_s(os.getpid()) >= 0.5
    finally:
        for process in (rival, waiting):
            process.kill()
            process.wait()
    assert core_wait_s(None) == core_wait_s(waiting.pid) == 0.0


def test_progress_names_task_and_amount_done() -> None:
    progress = Progress()
    moves = [progress.num_moves]
    progress.begin("loading shard 1 of 2, tensors", 1200)
    moves.append(progress.num_moves)
    progress.advance(34)
    moves.append(progress.num_moves)
    assert str(progress) == "loading shard 1 of 2, tensors: 34 of 1,200"
    assert progress.what == "loading shard 1 of 2, tensors"
    progress.tick()
    moves.append(progress.num_moves)
    progress.begin("waiting for requests")
    moves.append(progress.num_moves)
    assert str(progress) == "waiting for requests"
    assert moves == sorted(set(moves))


def test_progress_resumes_previous_task_after_interruption() -> None:
    progress, told = Progress(), []
    progress.on_begin = lambda: told.append(progress.what)
    progress.begin("loading shard 1 of 2, tensors", 1200)
    progress.advance(34)
    with progress.aside("probing kernels for int8"):
        assert str(progress) == "probing kernels for int8"
    assert str(progress) == "loading shard 1 of 2, tensors: 34 of 1,200"
    assert told == ["loading shard 1 of 2, tensors", "probing kernels for int8", "loading shard 1 of 2, tensors"]
