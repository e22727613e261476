"""An engine that hangs, in a load or in a step, is found out, reported with its stack and replaced;
one that is slow is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from loraserve.engine_client import process as process_module
from loraserve.engine_client import supervisor as supervisor_module
from loraserve.engine_client.client import EngineClient
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.process import EngineProcess
from loraserve.errors import DeadlineExceeded, EngineDied, EngineError, EngineUnavailable
from loraserve.faults import VARIABLE
from loraserve.text.tokenizer import Tokenizer

from . import test_client
from .conftest import World

HANG_S, LOAD_S = 1.5, 60.0


@asynccontextmanager
async def running(
    world: World, *, faults: str = "", load_s: float = LOAD_S, hang_s: float = HANG_S, **changes: object
) -> AsyncIterator[EngineClient]:
    """A client whose first engine has these faults, and the following ones none."""
    client = EngineClient(
        world.config(heartbeat_s=0.1, **changes),
        Tokenizer(world.model_dir),
        hang_timeout_s=hang_s,
        load_timeout_s=load_s,
    )
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", VARIABLE: faults})
    try:
        await client.start()
        os.environ.pop(VARIABLE)
        yield client
    finally:
        os.environ.clear()
        os.environ.update(before)
        await client.stop()


def make(world: World, number: int, **options: object) -> GenerateRequest:
    request = test_client.make(world, test_client.prompt(number), max_tokens=40, ignore_eos=True)
    return GenerateRequest(**{name: getattr(request, name) for name in request.__struct_fields__} | options)


async def test_stopped_engine_is_replaced_and_no_text_changes(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with running(world) as client:
        wanted = [await test_client.collect(client, make(world, n)) for n in range(3)]
        first_pid, stopped_s = client.pid, 0.0
        assert first_pid is not None

        def stop_once(chunk: object) -> None:
            nonlocal stopped_s
            if not stopped_s:
                stopped_s = time.monotonic()
                os.kill(first_pid, signal.SIGSTOP)

        tasks = [asyncio.create_task(test_client.collect(client, make(world, n), stop_once)) for n in range(3)]
        await test_client.until(lambda: stopped_s > 0 and not client.is_ready)
        assert client.status is not None
        waiting = asyncio.create_task(test_client.collect(client, make(world, 4, timeout_s=60.0)))
        for task, answer in zip(tasks, wanted, strict=True):
            assert (await task)[:2] == answer[:2]
        assert (await waiting)[1] == world.expected(None, test_client.prompt(4), 40)
        assert client.num_restarts == 1
        assert client.pid != first_pid
        assert client.is_ready
        assert client.is_live
        assert client.status is None
    assert "was stopped by SIGSTOP for 1.5 s" in caplog.text


async def test_request_times_out_while_engine_is_stopped(world: World) -> None:
    async with running(world, hang_s=60) as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        stopped = psutil.Process(client.pid)
        await test_client.until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await test_client.collect(client, make(world, 1, timeout_s=0.5))
        assert time.monotonic() - begun_s < 4
        await test_client.until(lambda: not client.is_ready, timeout=5)
        assert client.is_live
        # what asks the engine itself isn't kept waiting either
        with pytest.raises(EngineUnavailable):
            await client.residency()
        os.kill(client.pid, signal.SIGCONT)
        await test_client.until(lambda: client.is_ready)
        assert client.num_restarts == 0


async def test_engine_is_spared_when_watcher_slept_too(world: World) -> None:
    async with running(world, hang_s=1.0) as client:
        pid = client.pid
        assert pid is not None
        for _ in range(2):
            # as a machine that is suspended: nothing runs, and both go on at once
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.5)  # noqa: ASYNC251 (the loop stands still)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.3)
        assert client.pid == pid
        assert client.num_restarts == 0


async def test_hanging_step_is_reported_with_stack(world: World, caplog: pytest.LogCaptureFixture) -> None:
    # the first step, before the engine is ready, has 28
    async with running(world, faults="model.layer=delay:3600@37") as client:
        async with asyncio.timeout(60):
            _text, tokens, _ = await test_client.collect(client, make(world, 5))
        assert tokens == world.expected(None, test_client.prompt(5), 40)
        assert client.num_restarts == 1
    assert re.search(r"made no progress for 1.5 s while it was computing step \d+ of 1 requests", caplog.text)
    assert re.search(
        r"it hangs in faults.py:\d+ in <lambda> < faults.py:\d+ in hit < step_program.py:\d+ in _run_items", caplog.text
    )
    stacks = next(record.getMessage() for record in caplog.records if "Its Python stacks" in record.getMessage())
    assert 'loraserve/engine/worker/main.py"' in stacks
    assert "in _run_module_as_main" in stacks


async def test_slow_progressing_step_is_no_hang(world: World) -> None:
    # each step takes longer than the timeout, layer by layer
    async with running(world, faults="model.layer=delay:0.6", hang_s=1.0) as client:
        request = test_client.make(world, test_client.prompt(6), max_tokens=2, ignore_eos=True)
        begun_s = time.monotonic()
        _text, tokens, _ = await test_client.collect(client, request)
        assert time.monotonic() - begun_s > 2
        assert tokens == world.expected(None, test_client.prompt(6), 2)
        assert client.num_restarts == 0


async def test_unkillable_engine_fails_live_requests_and_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk in state D,
    where SIGKILL takes effect only when the wait is over.
    """
    monkeypatch.setattr(supervisor_module, "KILL_PATIENCE_S", 0.5)
    monkeypatch.setattr(EngineProcess, "kill", lambda _: None)
    async with running(world) as client:
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(EngineUnavailable, match=f"process {pid} was killed 0.5 s ago and hasn't ended"):
                await test_client.collect(client, make(world, 1))
        assert not client.is_live
        with pytest.raises(EngineUnavailable, match="hasn't ended"):
            await test_client.collect(client, make(world, 2))
        assert client.num_live_requests == 0
        os.kill(pid, signal.SIGKILL)
        await test_client.until(lambda: client.is_ready)
        assert client.is_live
        assert client.num_restarts == client.num_hangs == 1
        _text, tokens, _ = await test_client.collect(client, make(world, 1))
        assert tokens == world.expected(None, test_client.prompt(1), 40)


async def test_closing_does_not_wait_for_unkillable_process(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck:
        pid, returncode = 4_000_000, None

        def kill(self) -> None: ...

        async def wait(self) -> int:
            await asyncio.sleep(3600)
            return 0

    monkeypatch.setattr(process_module, "KILL_PATIENCE_S", 0.1)
    process = EngineProcess(world.config(), lambda _: None, hang_timeout_s=30, load_timeout_s=10)
    process._process = Stuck()  # type: ignore[assignment]
    async with asyncio.timeout(5):
        await process.close(grace_s=0.1)
    assert "process 4000000 was killed and hasn't ended" in caplog.text


async def test_slow_progressing_stage_is_no_hang(world: World) -> None:
    """Rank 0 waits longer for it than an engine may stand still."""
    request = test_client.make(world, test_client.prompt(1), max_tokens=1, ignore_eos=True)
    async with running(world, faults="model.layer=delay:1", pipeline_parallel=2) as client:
        pid, begun_s = client.pid, time.monotonic()
        _, tokens, _ = await test_client.collect(client, request)
        # two of three layers are the first stage's
        assert time.monotonic() - begun_s > 2 * HANG_S
        assert tokens == world.expected(None, test_client.prompt(1), 1)
        assert client.pid == pid


async def test_hanging_load_is_reported_with_stack(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "model.tensor=delay:3600@3")
    process = EngineProcess(world.config(), lambda _: None, hang_timeout_s=30, load_timeout_s=10)
    try:
        with pytest.raises(EngineDied) as caught:
            await process.start()
    finally:
        process.kill()
        await process.close()
    assert re.search(
        r"it made no progress for 10 s while it was loading shard 1 of 1, tensors: 2 of \d+; "
        r"it hangs in faults.py:\d+ in <lambda> < faults.py:\d+ in hit < loader.py:\d+ in _stream",
        str(caught.value),
    )
    assert caplog.text.count("Its Python stacks") == 1


async def test_slow_progressing_load_is_no_hang(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loraserve.engine_client.process")
    seen: list[str | None] = []

    async def look(client: EngineClient) -> None:
        while True:
            seen.append(client.status)
            await asyncio.sleep(0.1)

    client = EngineClient(
        world.config(heartbeat_s=0.1), Tokenizer(world.model_dir), hang_timeout_s=30, load_timeout_s=8.0
    )
    num_tensors = 3 + 9 * world.model.config.num_hidden_layers
    os.environ[VARIABLE] = f"model.tensor=delay:{10 / num_tensors}"
    looking = asyncio.create_task(look(client))
    begun_s = time.monotonic()
    try:
        await client.start()
    finally:
        os.environ.pop(VARIABLE)
        looking.cancel()
    assert time.monotonic() - begun_s > 8
    await client.stop()
    counts = {int(found[1]) for status in seen if (found := re.search(r"tensors: (\d+) of", status or ""))}
    assert len(counts) > 5
    assert "the engine is loading shard 1 of 1, tensors" in caplog.text
    assert re.search(r"\(loading shard 1 of 1, tensors took \d+\.\d s\)", caplog.text)
    assert re.search(r"the engine is ready \(.* took \d+\.\d s\)", caplog.text)


async def test_engine_dying_before_ready_is_tried_three_times(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineUnavailable, match=r"died 3 times in a row .* was killed by SIGKILL") as caught:
        async with running(world, faults="engine.load=kill"):
            raise AssertionError("it is ready")
    assert "lack of memory" in str(caught.value)
    assert caplog.text.count("the engine died before it was ready") == 3


async def test_engine_failing_before_ready_reports_reason_without_retry(
    world: World,
) -> None:
    with pytest.raises(EngineError, match="PermissionError while it was looking for devices"):
        async with running(world, faults="engine.load=EACCES"):
            raise AssertionError("it is ready")
