"""How long a request may take, in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import msgspec
import pytest

from loraserve.errors import AdapterNotReady
from loraserve.limits import LIMITS
from loraserve.registry.binding import Binding, Fallback, Shadow
from loraserve.registry.model_name import parse_model
from loraserve.types import FinishReason

pytestmark = pytest.mark.usefixtures("no_leaks")


async def ask(client: httpx2.AsyncClient, path: str = "completions", **body: Any) -> httpx2.Response:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return await client.post(f"/v1/{path}", json={"model": "sql", "max_tokens": 8, **prompt, **body})


@pytest.fixture
def timing_out(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose requests' time is over at the third token."""
    steps = engine._steps

    async def timed(request: Any) -> AsyncGenerator[Any, None]:
        num = 0
        async for output in steps(request):
            num += 1
            if num < 3 or request.timeout_s is None:
                yield output
                continue
            yield msgspec.structs.replace(output, finish_reason=FinishReason.LENGTH, stop_reason="timeout")
            return

    monkeypatch.setattr(engine, "_steps", timed)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_timeout_reaches_engine_and_marks_stop_reason(
    client: httpx2.AsyncClient, engine: Any, timing_out: None, path: str
) -> None:
    choice = (await ask(client, path, timeout=2.5, return_token_ids=True)).json()["choices"][0]
    assert [request.timeout_s for request in engine.seen] == [2.5]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("length", "timeout", 3)
    assert '"stop_reason":"timeout"' in (await ask(client, path, timeout=2, stream=True)).text
    await ask(client, path, timeout=None)
    assert engine.seen[-1].timeout_s is None


@pytest.mark.parametrize("timeout", [0, -1, LIMITS.max_request_timeout_s + 1, "two", True])
async def test_invalid_timeout_is_refused(client: httpx2.AsyncClient, engine: Any, timeout: Any) -> None:
    for path in ("completions", "chat/completions"):
        response = await ask(client, path, timeout=timeout)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")
    assert engine.seen == []


async def test_fallback_gets_remaining_time(
    client: httpx2.AsyncClient, engine: Any, services: Any, acme: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(seed=1)
    first = await services.registry.resolve(acme.caller.tenant, parse_model("sql@1", "base"))
    second = await services.registry.resolve(acme.caller.tenant, parse_model("sql@2", "base"))

    async def bound(*_: Any, **__: Any) -> Binding:
        return Binding(second, fallback=Fallback(first))

    monkeypatch.setattr(services.registry, "bind", bound)
    generate = engine.generate

    async def failing(request: Any) -> AsyncGenerator[Any, None]:
        if request.adapter.version == 2:
            await asyncio.sleep(0.05)
            raise AdapterNotReady("It is still being read.")
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", failing)
    assert (await ask(client, timeout=5)).status_code == 200
    assert (await ask(client, timeout=0.01)).status_code == 200
    assert 0.001 < engine.seen[0].timeout_s <= 4.96
    assert 0 < engine.seen[1].timeout_s <= 0.001, "it is the engine that says so"


async def test_timed_out_answer_is_not_compared_with_shadow(
    client: httpx2.AsyncClient,
    engine: Any,
    services: Any,
    acme: Any,
    timing_out: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = await services.registry.resolve(acme.caller.tenant, parse_model("sql@1", "base"))

    async def bound(*_: Any, **__: Any) -> Binding:
        return Binding(ref, shadow=Shadow(msgspec.structs.replace(ref, version=2), "adapter", "live", 1.0))

    monkeypatch.setattr(services.registry, "bind", bound)
    await ask(client, timeout=5)
    await services.shadows.close()
    assert [request.timeout_s for request in engine.seen] == [5, None]
    read = services.metrics.registry.get_sample_value
    assert read("loraserve_shadow_requests_total", {"outcome": "compared"}) == 0
    assert read("loraserve_shadow_requests_total", {"outcome": "abandoned"}) == 1
