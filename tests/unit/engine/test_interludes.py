"""Pieces of another thread's work run between steps, and take a bounded part of their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from loraserve.engine import interludes as module
from loraserve.engine.interludes import PATIENCE_S, Interludes


class World:
    """A working thread whose pieces take as many seconds of its processor as is said, and no time at all."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.interludes = Interludes()
        self.worked_s = 0.0
        self.num_pieces = 0
        self._executor = executor

    def start(self, num_pieces: int, piece_s: float, do: Callable[[], object] = lambda: None) -> Future[None]:
        """A job of so many pieces."""

        def run() -> None:
            with self.interludes.job():
                for i in range(num_pieces):
                    if i:
                        self.interludes.pause()
                    self.num_pieces += 1
                    self.worked_s += piece_s
                    do()

        return self._executor.submit(run)

    def give(self, step_s: float, share: float = 0.05) -> int:
        """How many pieces ran between two steps, once the thread stands before the next."""
        before = self.num_pieces
        self.interludes.give(step_s, share)
        return self.num_pieces - before

    def wait_for_worker(self) -> None:
        until_s = time.monotonic() + 10
        while not self.interludes._is_waiting:
            assert time.monotonic() < until_s
            time.sleep(0.001)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with ThreadPoolExecutor(1) as executor:
        world = World(executor)
        clock = SimpleNamespace(thread_time=lambda: world.worked_s, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", clock)
        yield world
        world.interludes.open()


def test_where_nobody_is_served_pieces_follow_each_other(world: World) -> None:
    world.start(100, 1.0).result(10)
    assert world.num_pieces == 100
    assert world.interludes.given_s == 0


def test_pieces_run_when_they_are_let_and_take_their_share(world: World) -> None:
    assert world.give(100.0) == 0
    job = world.start(8, 2.0)
    world.wait_for_worker()
    # 5 s are earned; three pieces of 2 s are one more than that
    assert world.give(100.0) == 3
    assert world.give(20.0) == 0
    assert world.give(100.0) == 3
    assert not job.done()
    assert world.give(100.0, share=0.25) == 2
    job.result(10)
    assert world.interludes.given_s > 0


def test_a_share_that_nobody_took_is_not_kept(world: World) -> None:
    for _ in range(10):
        assert world.give(100.0) == 0
    world.start(9, 2.0)
    world.wait_for_worker()
    assert world.give(100.0) == 3


def test_what_was_done_while_nobody_was_served_is_owed_to_nobody(world: World) -> None:
    world.start(5, 100.0).result(10)
    world.give(0.0)
    world.start(5, 2.0)
    world.wait_for_worker()
    world.interludes.open()
    world.start(5, 100.0).result(10)
    world.give(0.0)
    world.start(9, 2.0)
    world.wait_for_worker()
    assert world.give(100.0) == 3


def test_who_waits_goes_on_when_nobody_is_served_any_more(world: World) -> None:
    world.give(1.0)
    job = world.start(5, 2.0)
    world.wait_for_worker()
    world.interludes.open()
    job.result(10)
    assert world.num_pieces == 5


def test_a_long_piece_is_waited_for_a_while_and_counts_whole(world: World) -> None:
    gate = threading.Event()
    world.give(1.0)
    world.start(2, 8.0, lambda: gate.wait(10))
    world.wait_for_worker()
    began = time.perf_counter()
    assert world.give(100.0) == 1
    assert PATIENCE_S <= time.perf_counter() - began < 1
    # it's still at it: nothing to wait for
    began = time.perf_counter()
    assert world.give(0.0) == 0
    assert time.perf_counter() - began < PATIENCE_S
    gate.set()
    world.wait_for_worker()
    # 8 s of which 5 were earned
    assert world.give(20.0) == 0
    assert world.give(20.0) == 0
    assert world.give(80.0) == 1


def test_an_error_ends_a_job_and_leaves_the_next_its_turn(world: World) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    world.give(1.0)
    job = world.start(3, 2.0, fail)
    world.wait_for_worker()
    assert world.give(100.0) == 1
    with pytest.raises(ZeroDivisionError):
        job.result(10)
    world.start(1, 2.0)
    world.wait_for_worker()
    assert world.give(100.0) == 1
