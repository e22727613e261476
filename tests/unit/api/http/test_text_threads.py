"""Threads for long texts: in turns among tenants, one of whom never has them all."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from loraserve.api.http import text_threads
from loraserve.api.http.text_threads import ON_LOOP_BYTES, TextThreads
from loraserve.demo.pack import base_dir
from loraserve.text.tokenizer import Tokenizer

LONG = ON_LOOP_BYTES + 1


class Gates:
    """Jobs that stay in their threads until they are let go, in whatever order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def job(self, name: str) -> Callable[[], str]:
        gate = self._gates.setdefault(name, threading.Event())

        def work() -> str:
            self.begun.append(name)
            assert gate.wait(10)
            return name

        return work

    def open(self, *names: str) -> None:
        for name in names or tuple(self._gates):
            self._gates[name].set()

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while self.begun != [*names]:
                await asyncio.sleep(0.001)


@pytest.fixture
async def gates() -> AsyncIterator[Gates]:
    made = Gates()
    yield made
    made.open()


def ask(threads: TextThreads, gates: Gates, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(threads.run(name[0], LONG, gates.job(name)))


async def test_only_long_text_is_read_off_the_loop() -> None:
    threads = TextThreads(2)
    assert await threads.run("a", ON_LOOP_BYTES, threading.current_thread) is threading.current_thread()
    assert (await threads.run("a", LONG, threading.current_thread)).name.startswith("text")


async def test_busy_tenant_leaves_thread_for_remaining_tenants(gates: Gates) -> None:
    threads = TextThreads(2)
    flood = [ask(threads, gates, f"a{i}") for i in range(4)]
    await gates.until("a0")
    await asyncio.sleep(0.02)
    other = ask(threads, gates, "b0")
    await gates.until("a0", "b0")
    assert threads.num_waiting == 3
    gates.open("b0")
    assert await other == "b0"
    gates.open()
    assert await asyncio.gather(*flood) == ["a0", "a1", "a2", "a3"]


async def test_tenants_have_turns(gates: Gates) -> None:
    threads = TextThreads(3)
    tasks = [ask(threads, gates, name) for name in ("a0", "a1", "b0", "a2", "a3", "b1", "c0")]
    await gates.until("a0", "a1", "b0")
    gates.open("a0")
    await gates.until("a0", "a1", "b0", "a2")
    gates.open("b0")
    await gates.until("a0", "a1", "b0", "a2", "b1")
    gates.open("a1")
    await gates.until("a0", "a1", "b0", "a2", "b1", "c0")
    gates.open()
    await asyncio.gather(*tasks)
    assert gates.begun[-1] == "a3"


async def test_thread_outlasts_client_and_queue_slot_does_not(
    gates: Gates,
) -> None:
    threads = TextThreads(2)
    running, waiting, last = (ask(threads, gates, name) for name in ("a0", "a1", "a2"))
    await gates.until("a0")
    running.cancel()
    waiting.cancel()
    await asyncio.sleep(0.02)
    assert gates.begun == ["a0"]
    assert threads.num_waiting == 1
    gates.open("a0")
    await gates.until("a0", "a2")
    gates.open()
    assert await last == "a2"
    assert threads.num_waiting == 0


async def test_error_reaches_caller_and_frees_thread() -> None:
    threads = TextThreads(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", LONG, lambda: 1 // 0)
    assert await threads.run("a", LONG, lambda: 1) == 1


async def test_memory_is_given_back_once_after_large_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    # longer than any test: it is given back when this one says so
    monkeypatch.setattr(text_threads, "_TRIM_DELAY_S", 3600.0)
    given: list[str] = []
    monkeypatch.setattr(text_threads, "give_memory_back", lambda: given.append(threading.current_thread().name))
    threads = TextThreads(2)
    await threads.run("a", LONG, lambda: None)
    assert threads._trim_timer is None
    await threads.run("a", 1 << 20, lambda: None)
    timer = threads._trim_timer
    assert timer is not None
    await asyncio.gather(*(threads.run("a", 1 << 20, lambda: None) for _ in range(4)))
    assert threads._trim_timer is timer
    assert given == []
    timer.cancel()
    threads._trim()
    while not given:
        await asyncio.sleep(0.005)
    assert threads._trim_timer is None
    assert [name.startswith("text") for name in given] == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_release_callback_exists() -> None:
    text_threads.give_memory_back()


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_other_threads_run_while_long_text_is_tokenized(what: str) -> None:
    tokenizer = Tokenizer(base_dir())
    text = "the quick brown fox " * (20_000 if what == "encode" else 200_000)
    ids = tokenizer.encode(text)
    num_turns, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            time.sleep(0.001)
            num_turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    time.sleep(0.02)
    before = num_turns
    if what == "encode":
        tokenizer.encode(text)
    else:
        tokenizer.decode(ids)
    turns = num_turns - before
    is_over.set()
    counter.join()
    # with the interpreter's lock held it would be none, or one around the call's ends
    assert turns >= 5
