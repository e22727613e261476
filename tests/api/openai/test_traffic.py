"""From what an owner says of an adapter to who answers its requests: splits, shadows, fallbacks,
all of it real but the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from loraserve.errors import AdapterNotReady
from loraserve.registry.model_name import parse_model

pytestmark = pytest.mark.usefixtures("no_leaks")


async def ask(client: httpx2.AsyncClient, model: str = "sql", **body: Any) -> str:
    response = await client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    assert "x-loraserve-ignored" not in response.headers
    return response.headers["x-loraserve-adapter"]


async def put_alias(client: httpx2.AsyncClient, **body: Any) -> None:
    response = await client.put("/api/v1/adapters/sql/aliases/live", json=body)
    assert response.status_code == 200, response.text


@pytest.fixture
async def two(client: httpx2.AsyncClient, publish: Callable[..., Any]) -> httpx2.AsyncClient:
    """acme's client; ``sql`` has two versions."""
    await publish(seed=1)
    return client


async def test_user_stays_on_same_version_of_split(two: httpx2.AsyncClient) -> None:
    await put_alias(two, split=[{"version": 1, "weight": 50}, {"version": 2, "weight": 50}])
    chosen = {user: await ask(two, user=user) for user in map(str, range(12))}
    assert set(chosen.values()) == {"sql@1", "sql@2"}
    assert {user: await ask(two, user=user) for user in chosen} == chosen
    anyone = {await ask(two) for _ in range(20)}
    assert anyone == {"sql@1", "sql@2"}


async def test_running_request_keeps_version_when_alias_moves(two: httpx2.AsyncClient, engine: Any) -> None:
    engine.step_s = 0.02
    await put_alias(two, version=1)
    asking = asyncio.create_task(ask(two, max_tokens=10))
    while not engine.live:
        await asyncio.sleep(0.002)
    await put_alias(two, version=2)
    assert await ask(two) == "sql@2"
    assert await asking == "sql@1"


async def test_alias_shadow_gets_copies_and_reports_comparison(
    two: httpx2.AsyncClient, engine: Any, services: Any
) -> None:
    await put_alias(two, version=1, shadow={"version": 2, "share": 1})
    assert [await ask(two), await ask(two, "sql@1")] == ["sql@1", "sql@1"]
    while services.shadows.num_live:
        await asyncio.sleep(0.002)
    await services.registry.shadow_hours.flush()
    assert [request.adapter.version for request in engine.seen] == [1, 2, 1], "by the alias alone"
    (row,) = (await two.get("/api/v1/adapters/sql/aliases/live/shadow")).json()["data"]
    assert (row["version"], row["shadow_version"], row["num_requests"], row["num_tokens"]) == (1, 2, 1, 4)


async def test_fallback_of_adapter_answers_for_quarantined_version(
    two: httpx2.AsyncClient, services: Any, acme: Any
) -> None:
    response = await two.patch("/api/v1/adapters/sql", json={"fallback": 1})
    assert response.status_code == 200, response.text
    assert await ask(two) == "sql@2"
    bad = await services.registry.resolve(acme.caller.tenant, parse_model("sql@2", "base"))
    await services.registry.corruption.quarantine(bad.digest, bad.weights_blob)
    assert await ask(two) == "sql@1; fallback-from=sql@2; reason=adapter_quarantined"
    await two.patch("/api/v1/adapters/sql", json={"fallback": "base"})
    assert await ask(two) == "org/base:1; fallback-from=sql@2; reason=adapter_quarantined"
    await two.patch("/api/v1/adapters/sql", json={"fallback": None})
    refused = await two.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_quarantined")


async def test_load_missing_deadline_falls_back(
    two: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.patch("/api/v1/adapters/sql", json={"fallback": 1})
    generate = engine.generate

    async def slow_to_load(request: Any) -> Any:
        if request.adapter.version == 2:
            raise AdapterNotReady("It is still being read.")
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", slow_to_load)
    assert await ask(two) == "sql@1; fallback-from=sql@2; reason=adapter_not_ready"
