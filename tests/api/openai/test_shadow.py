"""Copies of requests on a shadow version: compared with the answers, and seen by nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
import pytest

from loraserve.api.shadow import PRIORITY
from loraserve.errors import AdapterCorrupt, AdapterNumerics, Overloaded
from loraserve.limits import Limits
from loraserve.registry.binding import Binding, Fallback, Shadow
from loraserve.registry.model_name import parse_model
from loraserve.registry.repository import AdapterRepository
from loraserve.types import AdapterRef, EngineStats

pytestmark = pytest.mark.usefixtures("no_leaks")


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        await asyncio.sleep(0.002)


async def ask(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post(
        "/v1/completions", json={"model": "sql", "prompt": "x", "max_tokens": 12, "seed": 1, **body}
    )


@pytest.fixture
async def versions(services: Any, acme: Any, publish: Callable[..., Any]) -> dict[int, AdapterRef]:
    """Two versions of ``sql``."""
    numbers = [await publish(seed=seed) for seed in range(2)]
    return {
        number: await services.registry.resolve(acme.caller.tenant, parse_model(f"sql@{number}", "base"))
        for number in numbers
    }


@pytest.fixture
async def shadow(services: Any, acme: Any, versions: dict[int, AdapterRef], monkeypatch: pytest.MonkeyPatch) -> Shadow:
    """Every request for ``sql`` is answered by its version 1, and has a copy on version 2."""
    async with services.registry._database.read() as session:
        adapter_id = (await AdapterRepository(session, acme.caller.tenant).adapter("sql")).id
    shadow = Shadow(versions[2], adapter_id, "live", 1.0)
    bind_to(services, Binding(versions[1], shadow=shadow), monkeypatch)
    return shadow


def bind_to(services: Any, binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bound(*_: Any, **__: Any) -> Binding:
        return binding

    monkeypatch.setattr(services.registry, "bind", bound)


@pytest.fixture
def scripts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, str | Exception]:
    """What versions answer instead of the usual, or fail with before their first token."""
    scripts: dict[int, str | Exception] = {}
    generate = engine.generate

    async def scripted(request: Any) -> AsyncGenerator[Any, None]:
        script = scripts.get(request.adapter.version, "the answer of both")
        if isinstance(script, Exception):
            engine.seen.append(request)
            raise script
        usual, engine.script = engine.script, script
        try:
            chunks = generate(request)
            # its text is read before the first chunk
            first = await anext(chunks)
        finally:
            engine.script = usual
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    monkeypatch.setattr(engine, "generate", scripted)
    return scripts


@pytest.fixture
def gate(engine: Any, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Copies have no token before it is set."""
    gate = asyncio.Event()
    generate = engine.generate

    async def gated(request: Any) -> AsyncGenerator[Any, None]:
        if request.priority == PRIORITY:
            await gate.wait()
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", gated)
    return gate


async def compared(services: Any, acme: Any) -> Any:
    """What is kept of the copies that were compared; they are at their end."""
    await until(lambda: services.shadows.num_live == 0)
    await services.registry.shadow_hours.flush()
    page = await services.registry.shadow_hours.list(acme.caller.tenant, "sql", "live")
    return page.items


def outcomes(services: Any) -> dict[str, int]:
    names = ("compared", "failed", "dropped", "abandoned")
    read = services.metrics.registry.get_sample_value
    values = {name: int(read("loraserve_shadow_requests_total", {"outcome": name})) for name in names}
    return {name: value for name, value in values.items() if value}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_copy_runs_on_shadow_version_without_reaching_client(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow, scripts: Any, is_stream: bool
) -> None:
    scripts.update({1: "the answer of one", 2: "the answer of two"})
    response = await ask(client, stream=is_stream, max_tokens=100, logprobs=3)
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert "two" not in "".join(part for part in response.text if part.isalpha())
    (row,) = await compared(services, acme)
    assert (row.version, row.shadow_version) == (1, 2)
    assert (row.tally.num_requests, row.tally.num_failed, row.tally.num_equal) == (1, 0, 0)
    # 17 letters and the end, of which the first 14 are the same
    assert (row.tally.num_tokens, row.tally.num_agreed_tokens) == (18, 14)
    live, copy = engine.seen
    assert (copy.adapter, copy.tenant, copy.priority) == (shadow.adapter, live.tenant, PRIORITY)
    assert (copy.prompt_token_ids, copy.params.seed) == (live.prompt_token_ids, live.params.seed)
    assert copy.params.logprobs is None, "nobody looks at them"
    assert (live.is_background, copy.is_background) == (False, True)
    traffic = services.metrics.activity.traffic.of(acme.caller.tenant, "sql", 3600)
    assert [(key.version, key.role) for key in traffic] == [(1, "answer"), (2, "shadow")]
    for tally in traffic.values():
        assert (tally.num_requests, tally.num_failed, tally.completion_tokens) == (1, 0, 18)
        assert (sum(tally.first_token_counts), sum(tally.per_token_counts)) == (1, 1)


async def test_equal_answers_are_counted_as_equal(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow, scripts: Any
) -> None:
    engine.step_s = 0.002
    await asyncio.gather(*(ask(client) for _ in range(3)))
    (row,) = await compared(services, acme)
    assert (row.tally.num_requests, row.tally.num_equal) == (3, 3)
    assert row.tally.num_tokens == row.tally.num_agreed_tokens == 36
    assert row.tally.live_ms >= 3 * 11 * 2
    assert row.tally.shadow_ms >= 3 * 11 * 2
    assert outcomes(services) == {"compared": 3}


async def test_a_copy_waits_until_the_answer_has_begun(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow
) -> None:
    engine.step_s = 0.3
    asking = asyncio.create_task(ask(client, max_tokens=2))
    await until(lambda: len(engine.seen) == 1)
    await asyncio.sleep(0.02)
    assert services.shadows.num_live == 0
    await asking
    assert len(engine.seen) == 2
    await compared(services, acme)


async def test_share_determines_number_of_copied_requests(
    client: httpx2.AsyncClient,
    services: Any,
    engine: Any,
    acme: Any,
    shadow: Shadow,
    versions: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = Shadow(shadow.adapter, shadow.adapter_id, "live", 0.3)
    bind_to(services, Binding(versions[1], shadow=some), monkeypatch)
    drawn = iter([0.0, 0.29, 0.3, 0.99])
    monkeypatch.setattr(services.shadows, "_draw", lambda: next(drawn))
    for _ in range(4):
        await ask(client)
    assert [request.priority == PRIORITY for request in engine.seen].count(True) == 2
    await compared(services, acme)


async def test_failing_shadow_does_not_fail_request(
    client: httpx2.AsyncClient, services: Any, acme: Any, shadow: Shadow, scripts: Any
) -> None:
    scripts[2] = AdapterCorrupt("Damaged.")
    assert (await ask(client)).status_code == 200
    (row,) = await compared(services, acme)
    assert (row.tally.num_requests, row.tally.num_failed, row.tally.num_tokens) == (1, 1, 0)
    assert outcomes(services) == {"failed": 1}
    traffic = services.metrics.activity.traffic.of(acme.caller.tenant, "sql", 3600)
    assert [(tally.num_requests, tally.num_failed) for tally in traffic.values()] == [(1, 0), (1, 1)]


async def test_non_finite_shadow_answer_is_strike_against_shadow(
    client: httpx2.AsyncClient, services: Any, acme: Any, shadow: Shadow, scripts: Any
) -> None:
    scripts[2] = AdapterNumerics("Its logits were not finite.")
    await ask(client)
    await compared(services, acme)
    await services.registry.numeric_failures.close()
    for number, strikes in ((1, []), (2, [1])):
        version = await services.registry.get_version(acme.caller.tenant, "sql", number)
        assert [check["strikes"] for check in version.checks if check["name"] == "numerics"] == strikes


async def test_copy_refused_by_full_engine_is_not_failure(
    client: httpx2.AsyncClient, services: Any, acme: Any, shadow: Shadow, scripts: Any
) -> None:
    scripts[2] = Overloaded("The queue is full.")
    assert (await ask(client)).status_code == 200
    assert await compared(services, acme) == ()
    assert outcomes(services) == {"dropped": 1}


@pytest.mark.parametrize("limits", [Limits(shadow_timeout_s=0.05)])
async def test_slow_copy_is_abandoned_and_counts_as_failed(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow, limits: Limits
) -> None:
    engine.step_s = 0.01
    await ask(client, max_tokens=20)
    (row,) = await compared(services, acme)
    assert row.tally.num_failed == 1


BUSY = [
    EngineStats(num_waiting=1),
    EngineStats(num_kv_blocks=100, num_kv_blocks_used=80),
]


@pytest.mark.parametrize("stats", BUSY, ids=["a queue", "little memory"])
async def test_a_busy_server_makes_no_copies(
    client: httpx2.AsyncClient, services: Any, engine: Any, shadow: Shadow, stats: EngineStats
) -> None:
    engine.stats = stats
    await ask(client)
    assert len(engine.seen) == 1
    assert outcomes(services) == {"dropped": 1}


async def test_copy_yields_to_waiting_requests(
    client: httpx2.AsyncClient,
    services: Any,
    engine: Any,
    acme: Any,
    shadow: Shadow,
    gate: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraserve.api.shadow._LOOK_S", 0.01)
    assert (await ask(client)).status_code == 200
    await until(lambda: services.shadows.num_live == 1)
    # it is the copy itself that waits
    engine.stats = EngineStats(num_waiting=1)
    await asyncio.sleep(0.05)
    assert services.shadows.num_live == 1
    engine.stats = EngineStats(num_waiting=2)
    await until(lambda: services.shadows.num_live == 0)
    assert outcomes(services) == {"dropped": 1}
    assert await compared(services, acme) == ()


async def test_disconnect_ends_shadow_copy(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow, gate: asyncio.Event
) -> None:
    engine.step_s = 0.05
    asking = asyncio.create_task(ask(client, max_tokens=50))
    await until(lambda: services.shadows.num_live == 1)
    asking.cancel()
    await until(lambda: not engine.live)
    assert await compared(services, acme) == ()
    assert outcomes(services) == {"abandoned": 1}


@pytest.mark.parametrize("limits", [Limits(max_shadow_requests=3, max_shadow_requests_per_tenant=2)])
async def test_copies_are_bounded_in_total_and_per_tenant(
    client: httpx2.AsyncClient,
    services: Any,
    acme: Any,
    shadow: Shadow,
    gate: asyncio.Event,
    make_tenant: Any,
    url: str,
    limits: Limits,
    versions: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    globex = await make_tenant("globex")

    async def bound(tenant: Any, *_: Any, **__: Any) -> Binding:
        own = msgspec.structs.replace(shadow.adapter, tenant=tenant)
        return Binding(versions[1], shadow=replace(shadow, adapter=own))

    monkeypatch.setattr(services.registry, "bind", bound)
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers, timeout=10) as theirs:
        await asyncio.gather(*(ask(client) for _ in range(3)))
        assert (services.shadows.num_live, outcomes(services)) == (2, {"dropped": 1})
        await asyncio.gather(*(ask(theirs) for _ in range(2)))
        assert (services.shadows.num_live, outcomes(services)) == (3, {"dropped": 2})
    gate.set()
    await compared(services, acme)
    assert services.shadows._num_by_tenant == {}


async def test_grantee_request_runs_no_copy_for_owner(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow, make_tenant: Any, url: str
) -> None:
    globex = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers, timeout=10) as theirs:
        assert (await ask(theirs)).status_code == 200
    assert [request.is_background for request in engine.seen] == [False]
    assert outcomes(services) == {}
    assert await compared(services, acme) == ()


async def test_where_the_fallback_answers_no_copy_runs(
    client: httpx2.AsyncClient,
    services: Any,
    engine: Any,
    shadow: Shadow,
    scripts: Any,
    versions: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind_to(services, Binding(versions[1], fallback=Fallback(versions[2]), shadow=shadow), monkeypatch)
    scripts[1] = AdapterCorrupt("Damaged.")
    assert (await ask(client)).headers["x-loraserve-adapter"].startswith("sql@2; fallback-from=sql@1")
    assert [request.priority for request in engine.seen] == [0, 0]


async def test_copies_are_in_nobodys_figures(
    client: httpx2.AsyncClient, services: Any, engine: Any, acme: Any, shadow: Shadow
) -> None:
    await ask(client)
    await compared(services, acme)
    read = services.metrics.registry.get_sample_value
    assert read("loraserve_generation_tokens_total") == 12
    assert read("loraserve_completions_total", {"reason": "length"}) == 1
    assert read("loraserve_shadow_tokens_total") == 12


async def test_closing_server_runs_no_copies(
    client: httpx2.AsyncClient, services: Any, engine: Any, shadow: Shadow
) -> None:
    engine.step_s = 0.01
    asking = asyncio.create_task(ask(client, max_tokens=30))
    await until(lambda: services.shadows.num_live == 1)
    await services.shadows.close()
    assert services.shadows.num_live == 0
    assert (await asking).status_code == 200
    await ask(client)
    assert services.shadows.num_live == 0
    assert outcomes(services) == {"dropped": 2}
