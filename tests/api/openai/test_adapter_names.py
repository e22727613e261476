"""Names with capitals, slashes and colons, in all that keeps a name: batches, stored responses,
prices, aliases, shadows and kept answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI

from loraserve.api.batch_lines import BatchLines
from loraserve.api.services import Services
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.tenancy.prices import Price, PriceTable

pytestmark = pytest.mark.usefixtures("no_leaks")

NAMES = ("Qwen/My-LoRA", "x:v2")


@pytest.fixture(params=NAMES)
async def name(request: pytest.FixtureRequest, publish: Callable[..., Any], client: httpx2.AsyncClient) -> str:
    """The name of an adapter with two versions, whose `live` is the second."""
    named: str = request.param
    for seed in (1, 2):
        await publish(named, seed)
    return named


def spellings(name: str) -> list[str]:
    return [name, name.lower(), name.upper(), f"{name.upper()}@1", f"{name}@live"]


async def test_batch_takes_names_in_any_case(
    client: httpx2.AsyncClient, services: Services, app: FastAPI, name: str, engine: Any
) -> None:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": "x", "max_tokens": 2},
        }
        for number, model in enumerate(spellings(name))
    ]
    services.batch_runner.start(BatchLines(services, app))
    try:
        upload = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode(), "application/jsonl")}
        file = (await client.post("/v1/files", files=upload, data={"purpose": "batch"})).raise_for_status().json()
        new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=new)).raise_for_status().json()
        async with asyncio.timeout(60):
            while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
                await asyncio.sleep(0.02)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).raise_for_status().json()
    finally:
        await services.batch_runner.close()
    assert batch["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    assert {asked.adapter.name for asked in engine.seen} == {name}
    assert sorted(asked.adapter.version for asked in engine.seen) == [1, 2, 2, 2, 2]
    text = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answered = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, text.splitlines())}
    assert [answered[str(number)] for number in range(len(lines))] == spellings(name)


async def test_stored_response_goes_on_under_name(client: httpx2.AsyncClient, name: str, engine: Any) -> None:
    previous = None
    for model in spellings(name):
        asked = {"model": model, "input": "hello", "max_output_tokens": 4, "previous_response_id": previous}
        answer = await client.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
        stored = (await client.get(f"/v1/responses/{previous}")).raise_for_status().json()
        assert stored["model"] == model
    prompts = [len(asked.prompt_token_ids) for asked in engine.seen]
    assert prompts == sorted(set(prompts))
    assert {asked.adapter.name for asked in engine.seen} == {name}


async def test_price_and_usage_have_published_name(
    client: httpx2.AsyncClient, services: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    price = Price(prompt=Decimal(10), cached=Decimal(10), completion=Decimal(10))
    table = PriceTable("EUR", Price(prompt=Decimal(1), cached=Decimal(1), completion=Decimal(1)), {name.lower(): price})
    authenticate = services.authenticator.authenticate

    async def with_prices(secret: str, **holder: Any) -> Any:
        caller = await authenticate(secret, **holder)
        return replace(caller, policy=replace(caller.policy, prices=table))

    monkeypatch.setattr(services.authenticator, "authenticate", with_prices)
    for model in spellings(name):
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        usage = (await client.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
        assert Decimal(usage["cost"]) == 10 * Decimal(usage["total_tokens"]) / 1_000_000
    (row,) = await UsageReports(services.usage).all(UsageQuery(group_by=("adapter",)))
    assert (row.group["adapter"], row.amounts.num_requests) == (name, len(spellings(name)))


async def test_alias_and_shadow_take_encoded_name(
    client: httpx2.AsyncClient, services: Any, name: str, engine: Any
) -> None:
    path = f"/api/v1/adapters/{quote(name.upper(), safe='')}/aliases"
    body = {"version": 1, "shadow": {"version": 2, "share": 1.0}}
    made = await client.put(f"{path}/canary", json=body)
    assert made.status_code in (200, 201), made.text
    await client.post("/v1/completions", json={"model": f"{name.lower()}@canary", "prompt": "x", "max_tokens": 2})
    async with asyncio.timeout(60):
        while len(engine.seen) < 2 or engine.live:
            await asyncio.sleep(0.01)
    assert [(asked.adapter.name, asked.adapter.version) for asked in engine.seen] == [(name, 1), (name, 2)]
    rows: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not rows:
            await services.registry.shadow_hours.flush()
            rows = (await client.get(f"{path}/canary/shadow")).raise_for_status().json()["data"]
            await asyncio.sleep(0.02)
    assert [(row["version"], row["shadow_version"], row["num_requests"]) for row in rows] == [(1, 2, 1)]


async def test_kept_answer_is_found_and_dropped_by_name(
    client: httpx2.AsyncClient, services: Any, name: str, engine: Any
) -> None:
    await services.authenticator.tenants.update("acme", TenantChange({"max_cached_bytes": 1 << 20}), actor="test")

    async def outcome(model: str) -> str:
        body = {"model": model, "prompt": "x", "max_tokens": 2, "temperature": 0, "cache": {"ttl": 60}}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-loraserve-cache"])

    assert [await outcome(model) for model in spellings(name)] == ["miss", "hit", "hit", "miss", "hit"]
    path = f"/api/v1/adapters/{quote(name.upper(), safe='')}"
    assert (await client.delete(f"{path}/versions/1")).status_code in (200, 204)
    # those of both versions, kept under the published name
    assert services.result_cache.num_dropped == 2
    assert await outcome(name) == "miss"
