"""Memory of loads that run at once: within a budget, in their order, and given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from loraserve.adapters.load_memory import LoadMemory, NotEnoughMemory, Reservation
from loraserve.errors import AdapterUnavailable


@pytest.fixture
def memory() -> Iterator[LoadMemory]:
    made = LoadMemory(100)
    yield made
    assert made.check() == []
    assert made.num_bytes == 0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def wait_for_waiting(memory: LoadMemory, count: int) -> None:
    """Return once that many threads wait for bytes."""
    arrived = threading.Event()
    while len(memory._waiting) < count:
        arrived.wait(0.0005)


def reserve(threads: ThreadPoolExecutor, memory: LoadMemory, num_bytes: int, position: int) -> Future[Reservation]:
    future = threads.submit(memory.reserve, num_bytes)
    wait_for_waiting(memory, position)
    return future


def test_load_waits_for_bytes_given_back(memory: LoadMemory, threads: ThreadPoolExecutor) -> None:
    first = memory.reserve(60)
    second = reserve(threads, memory, 50, 1)
    assert not second.done()
    first.shrink(50)
    held = second.result(10)
    assert memory.num_bytes == 100
    first.give_back()
    held.give_back()
    held.give_back()


def test_load_over_budget_runs_alone(memory: LoadMemory, threads: ThreadPoolExecutor) -> None:
    small = memory.reserve(1)
    large = reserve(threads, memory, 500, 1)
    # a later small load doesn't pass the large one
    later = reserve(threads, memory, 1, 2)
    small.give_back()
    held = large.result(10)
    assert (memory.num_bytes, later.done()) == (500, False)
    held.give_back()
    later.result(10).give_back()


def test_load_takes_more_memory_while_free(memory: LoadMemory) -> None:
    with memory.reserved(10) as first, memory.reserved(20) as second:
        first.take(10)
        first.take(70)
        assert memory.num_bytes == 100
        with pytest.raises(NotEnoughMemory) as caught:
            second.take(21)
        assert caught.value.num_bytes == 21
        assert memory.num_bytes == 100


def test_close_refuses_waiting_loads(threads: ThreadPoolExecutor) -> None:
    memory = LoadMemory(10)
    held = memory.reserve(10)
    waiting = reserve(threads, memory, 1, 1)
    memory.close()
    with pytest.raises(AdapterUnavailable):
        waiting.result(10)
    held.give_back()
    with pytest.raises(AdapterUnavailable):
        memory.reserve(1)
