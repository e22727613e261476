"""The engine in its own process: what the server sees of it,
and what it doesn't see of its deaths.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
import pytest_asyncio
from campaigns import default_and_campaign

from loraserve.engine_client.client import EngineClient
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.process import EngineProcess
from loraserve.errors import AdapterCorrupt, ConfigError, EngineCrashed, EngineUnavailable, ModelError, Overloaded
from loraserve.text.detokenizer import decode_stream
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, Tier

from .conftest import ADAPTERS, World, make_ref

_ids = itertools.count()
NAMES = [None, *ADAPTERS]


@asynccontextmanager
async def running(world: World, environment: dict[str, str] | None = None, **changes: object):
    client = EngineClient(world.config(**changes), Tokenizer(world.model_dir), max_queued_requests=100)
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", **(environment or {})})
    try:
        await client.start()
    finally:
        for name in environment or {}:
            os.environ.pop(name)
        os.environ.update(before)
    try:
        yield client
    finally:
        await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(world: World) -> AsyncIterator[EngineClient]:
    """An engine that several tests use, one after the other: none kills it."""
    async with running(world) as running_client:
        yield running_client


on_shared_loop = pytest.mark.asyncio(loop_scope="module")


def make(world: World, prompt: list[int], adapter: str | None = None, *, stop: tuple[str, ...] = (), **params: object):
    return GenerateRequest(
        request_id=RequestId(f"c{next(_ids)}"),
        tenant=TenantId("t"),
        adapter=None if adapter is None else world.refs[adapter],
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        stop=stop,
    )


async def collect(client: EngineClient, request: GenerateRequest, on_chunk=None):
    text, tokens, last = "", [], None
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            text += chunk.text
            tokens += chunk.token_ids
            last = chunk
            if on_chunk is not None:
                on_chunk(chunk)
    return text, tokens, last


async def until(condition, timeout: float = 60.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


def prompt(n: int) -> list[int]:
    return [(n * 37 + i * 11) % 320 for i in range(5 + n % 20)]


@on_shared_loop
async def test_concurrent_requests_are_answered_and_leave_no_state(world, client):
    num_steps = client.stats.num_steps
    tokenizer = Tokenizer(world.model_dir)
    requests = [make(world, prompt(n), NAMES[n % len(NAMES)]) for n in range(10)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    for n, (text, tokens, last) in enumerate(answers):
        assert tokens == world.expected(NAMES[n % len(NAMES)], prompt(n), 16)
        stream = decode_stream(tokenizer, prompt_token_ids=prompt(n))
        assert text == stream.push(tokens) + stream.finish()
        assert last.finish_reason is FinishReason.LENGTH
    assert client.num_live_requests == 0
    await until(lambda: client.stats.num_steps > num_steps)
    await until(lambda: client.stats.num_kv_blocks_used == client.stats.num_pins == client.stats.num_running == 0)


@on_shared_loop
async def test_client_detects_busy_processors_of_machine(world, client):
    assert not client.is_computing_here
    answers = client.generate(make(world, prompt(1), max_tokens=40))
    await anext(answers)
    assert client.is_computing_here
    # as an engine on a GPU would have said
    client._supervisor.device = "cuda"
    assert not client.is_computing_here
    client._supervisor.device = "cpu"
    await answers.aclose()
    assert not client.is_computing_here


@on_shared_loop
async def test_stop_string_ends_text_and_request(world, client):
    whole, tokens, _ = await collect(client, make(world, prompt(1), max_tokens=60))
    stop = whole[10:12]
    text, taken, last = await collect(client, make(world, prompt(1), stop=(stop,), max_tokens=60))
    assert text == whole[: whole.index(stop)]
    assert taken == tokens[: len(taken)]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    await until(lambda: client.stats.num_running == 0 and client.num_live_requests == 0)


@on_shared_loop
async def test_departed_reader_frees_request(world, client):
    num_steps = client.stats.num_steps
    async with aclosing(client.generate(make(world, prompt(2), "r8", max_tokens=200, ignore_eos=True))) as chunks:
        await anext(chunks)
    assert client.num_live_requests == 0
    await until(lambda: client.stats.num_steps > num_steps and client.stats.num_running == 0)
    assert client.stats.num_kv_blocks_used == client.stats.num_pins == 0


DRAWN = {"temperature": 1.0, "seed": 7}


@pytest.mark.parametrize("params", default_and_campaign([{}, DRAWN], default=[DRAWN]))
async def test_a_killed_engine_changes_no_text(world, params):
    requests = [(prompt(n), NAMES[n % len(NAMES)]) for n in range(8)]
    async with running(world) as client:
        wanted = [await collect(client, make(world, p, name, max_tokens=120, **params)) for p, name in requests]
        first_pid = client.pid
        seen = itertools.count()

        def kill_once(_chunk):
            if next(seen) == 100:
                os.kill(client.pid, signal.SIGKILL)

        got = await asyncio.gather(
            *(collect(client, make(world, p, name, max_tokens=120, **params), kill_once) for p, name in requests)
        )
        assert [(text, tokens) for text, tokens, _ in got] == [(text, tokens) for text, tokens, _ in wanted]
        assert client.num_restarts == 1
        assert client.pid != first_pid
        await until(lambda: client.is_ready)


async def test_engine_reuses_kernels_of_previous_engine(world, monkeypatch):
    """The clock chose those, and may choose others a second time, which round otherwise:
    streams go on with the same bits.
    """
    async with running(world, quantize="int8") as client:
        chosen = client._supervisor._process.ready.kernels
    assert {choice.format for choice in chosen} == {"int8"}
    widened = tuple(msgspec.structs.replace(one, arithmetic="w8a16", kernel="widened") for one in chosen)
    starts = itertools.count()

    def process(config, *arguments, **options):
        # what the clock would not choose
        config = msgspec.structs.replace(config, kernels=widened) if next(starts) == 0 else config
        return EngineProcess(config, *arguments, **options)

    monkeypatch.setattr("loraserve.engine_client.supervisor.EngineProcess", process)
    async with running(world, quantize="int8") as client:
        assert client.base.kernels == "widened"
        *wanted, _last_chunk = await collect(client, make(world, prompt(3)))
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1 and client.is_ready)
        assert client.base.kernels == "widened"
        # How many tokens come in one chunk depends on how busy the machine is.
        *found, _last_chunk = await collect(client, make(world, prompt(3)))
        assert found == wanted


async def test_bystander_of_crash_gets_whole_answer(world):
    # each engine dies when it has sent outputs for the 30th time: whoever is alive then is
    # suspected, nobody is guilty
    async with running(world, {"LORASERVE_FAULTS": "engine.after_outputs=kill@30"}) as client:
        answer = await collect(client, make(world, prompt(3), max_tokens=45))
        assert answer[1] == world.expected(None, prompt(3), 45)
        assert client.num_restarts >= 1


async def test_request_in_flight_at_two_consecutive_deaths_fails(world):
    environment = {"LORASERVE_FAULTS": "engine.before_step=kill@4"}
    async with running(world, environment, heartbeat_s=0.05) as client:
        # every engine dies at its fourth step with work; one that never gets a token through is
        # guilty
        os.environ["LORASERVE_FAULTS"] = "engine.before_step=kill"
        try:
            with pytest.raises(EngineCrashed):
                await collect(client, make(world, prompt(4), max_tokens=50))
        finally:
            del os.environ["LORASERVE_FAULTS"]
        _text, tokens, _ = await collect(client, make(world, prompt(5)))
        assert tokens == world.expected(None, prompt(5), 16)


async def test_suspect_is_cleared_by_second_token(world, monkeypatch):
    """A step may be in flight behind the one whose token was sent:
    the next suspect isn't sent into that one.
    """
    async with running(world) as client:
        tasks = [asyncio.create_task(collect(client, make(world, prompt(n), max_tokens=60))) for n in range(2)]
        await until(lambda: sum(bool(live.output_token_ids) for live in client._live.values()) == 2)
        counts: list[list[int]] = []
        send = client._supervisor.send_request

        def spy(live):
            counts.append([other.num_outputs_since_sent for other in client._live.values() if other.is_sent])
            send(live)

        monkeypatch.setattr(client._supervisor, "send_request", spy)
        os.kill(client.pid, signal.SIGKILL)
        for n, task in enumerate(tasks):
            assert (await task)[1] == world.expected(None, prompt(n), 60)
        assert len(counts) == 2
        assert min(counts[1]) >= 2


async def test_engine_unable_to_fork_is_retried_then_abandoned(world, monkeypatch, caplog):
    async with running(world) as client:
        failures = itertools.count()
        start = asyncio.create_subprocess_exec

        async def no_memory(*arguments, **options):
            if next(failures) == 0:
                raise OSError(12, "Cannot allocate memory")
            return await start(*arguments, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", no_memory)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1 and client.is_ready)
        _text, tokens, _ = await collect(client, make(world, prompt(5)))
        assert tokens == world.expected(None, prompt(5), 16)


async def test_broken_supervisor_fails_requests_and_reports_not_live(world, monkeypatch, caplog):
    async with running(world) as client:

        def broken(**_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(client._supervisor, "_count_crash", broken)
        with pytest.raises(EngineUnavailable):
            await collect(client, make(world, prompt(4), max_tokens=200), lambda _: os.kill(client.pid, signal.SIGKILL))
        assert not client.is_live
        with pytest.raises(EngineUnavailable):
            await collect(client, make(world, prompt(4)))


async def test_nonsensical_message_replaces_engine(world, monkeypatch, caplog):
    async with running(world) as client:
        receive, calls = client._on_message, itertools.count()

        def nonsense(message):
            if next(calls) == 1:
                raise ValueError("what?")
            receive(message)

        client._supervisor._process._on_message = nonsense
        answer = await collect(client, make(world, prompt(3), max_tokens=30))
        assert answer[1] == world.expected(None, prompt(3), 30)
        assert client.num_restarts == 1


@on_shared_loop
async def test_request_with_unstartable_text_is_removed(world, client, monkeypatch):
    def broken(*_arguments, **_options):
        raise ValueError("no such token")

    monkeypatch.setattr("loraserve.engine_client.output.decode_stream", broken)
    with pytest.raises(ValueError, match="no such token"):
        await collect(client, make(world, prompt(3)))
    assert client.num_live_requests == 0


async def test_long_replay_does_not_delay_readiness(world, monkeypatch):
    monkeypatch.setattr("loraserve.engine_client.supervisor._REPLAY_ALONE_S", 0.3)
    async with running(world, max_num_seqs=1, max_num_batched_tokens=16) as client:
        tasks = [
            asyncio.create_task(collect(client, make(world, prompt(n), max_tokens=100, ignore_eos=True)))
            for n in range(3)
        ]
        await until(lambda: any(live.output_token_ids for live in client._live.values()))
        # the next engine takes its time: the second suspect waits for its place, and all that time
        # nothing else would be sent
        os.environ["LORASERVE_FAULTS"] = "engine.before_step=delay:0.05"
        try:
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.num_restarts == 1)
        finally:
            del os.environ["LORASERVE_FAULTS"]
        await until(lambda: client.is_ready, timeout=2)
        assert not any(task.done() for task in tasks)
        for n, task in enumerate(tasks):
            assert (await task)[1] == world.expected(None, prompt(n), 100)


async def test_loading_engine_ends_with_dead_server(world, tmp_path):
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loraserve.engine.worker.main",
        f"ipc://{tmp_path}/inputs",
        f"ipc://{tmp_path}/outputs",
        str(dead.pid),
        stdin=asyncio.subprocess.PIPE,
    )
    await process.communicate(msgspec.json.encode(world.config()))
    # 1: one that made no progress for ten seconds, as on a busy machine, is ended by its pulse
    assert process.returncode in (0, 1)


async def test_a_full_queue_refuses_and_says_so(world):
    async with running(world, max_num_seqs=1, max_num_batched_tokens=16) as client:
        client._requests.bounds.max_live = 2
        first = client.generate(make(world, prompt(6), max_tokens=200, ignore_eos=True))
        second = client.generate(make(world, prompt(7), max_tokens=200, ignore_eos=True))
        async with aclosing(first), aclosing(second):
            await anext(first)
            waiting = asyncio.create_task(anext(second))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await collect(client, make(world, prompt(8)))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@on_shared_loop
async def test_adapter_with_missing_bytes_fails_own_request_alone(world, client):
    gone = make(world, prompt(9))
    gone = GenerateRequest(
        request_id=gone.request_id,
        tenant=gone.tenant,
        adapter=make_ref("gone"),
        prompt_token_ids=gone.prompt_token_ids,
        params=gone.params,
    )
    results = await asyncio.gather(
        collect(client, gone), collect(client, make(world, prompt(9))), return_exceptions=True
    )
    assert isinstance(results[0], AdapterCorrupt)
    assert results[1][1] == world.expected(None, prompt(9), 16)


async def test_warmed_adapter_is_resident_and_pin_survives_restart(world):
    async with running(world) as client:
        await client.warm(world.refs["r8"])
        await client.pin(world.refs["r1"])
        rows = {row.digest: row for row in await client.residency()}
        assert rows[world.refs["r8"].digest].tier is Tier.DEVICE
        assert rows[world.refs["r1"].digest].is_pinned
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1 and client.is_ready)
        for _ in range(100):
            rows = {row.digest: row for row in await client.residency()}
            row = rows.get(world.refs["r1"].digest)
            if row is not None and row.tier is Tier.DEVICE:
                break
            await asyncio.sleep(0.02)
        assert row is not None
        assert row.is_pinned
        with pytest.raises(AdapterCorrupt):
            await client.warm(make_ref("gone"))


async def test_unloadable_base_reports_reason(world, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        async with running(world, model_dir=str(tmp_path)):
            pass
    with pytest.raises(ConfigError, match="memory budget"):
        async with running(world, memory_budget_bytes=1000):
            pass
