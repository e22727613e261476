"""How an alias's shadow did, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from loraserve.registry.binding import Shadow
from loraserve.registry.catalog.shadow_hours import Tally
from loraserve.registry.repository import AdapterRepository

PATH = "/adapters/sql/aliases/live/shadow"


@pytest.fixture
async def sql(acme: httpx2.AsyncClient, push: Any, services: Any) -> httpx2.AsyncClient:
    """acme, whose sql@2 shadows sql@1 as the answer of ``live``,
    and answered one of two requests.
    """
    for seed in range(2):
        assert (await push(acme, seed=seed, params={"promote": "false"} if seed else None)).status_code == 201
    body = {"version": 1, "shadow": {"version": 2, "share": 0.5}}
    assert (await acme.put("/adapters/sql/aliases/live", json=body)).status_code == 200
    tenant = next(iter((await services.authenticator.tenants.list()).items)).id
    async with services.registry._database.read() as session:
        repository = AdapterRepository(session, tenant)
        adapter = await repository.adapter("sql")
        ref = (await repository.version_record(adapter, await repository.version(adapter, 2))).ref
    shadow = Shadow(ref, adapter.id, "live", 0.5)
    hours = services.registry.shadow_hours
    hours.record(shadow, 1, Tally(num_requests=1, num_tokens=9, num_agreed_tokens=7, live_ms=30, shadow_ms=40))
    hours.record(shadow, 1, Tally(num_requests=1, num_failed=1))
    await hours.close()
    return acme


async def test_hours_are_listed_with_comparison_counts(sql: httpx2.AsyncClient) -> None:
    response = await sql.get(PATH)
    assert response.status_code == 200
    (row,) = response.json()["data"]
    hour = datetime.fromisoformat(row.pop("hour"))
    assert hour.utcoffset() is not None
    assert hour == datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    assert row == {
        "version": 1,
        "shadow_version": 2,
        "num_requests": 2,
        "num_failed": 1,
        "num_equal": 0,
        "num_tokens": 9,
        "num_agreed_tokens": 7,
        "live_ms": 30,
        "shadow_ms": 40,
    }
    assert response.json()["next_cursor"] is None


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "cursor=x", "cursor=MSAy"])
async def test_impossible_page_is_refused(sql: httpx2.AsyncClient, query: str) -> None:
    response = await sql.get(f"{PATH}?{query}")
    assert (response.status_code, response.headers["content-type"]) == (400, "application/problem+json")


async def test_foreign_shadow_reads_byte_for_byte_as_absent(
    sql: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    answers = set()
    for name in ("sql", "abc"):
        response = await globex.get(f"/adapters/{name}/aliases/live/shadow")
        body = response.json()
        body.pop("request_id")
        assert (response.status_code, body["code"]) == (404, "adapter_not_found")
        answers.add(str(body).replace(name, "NAME"))
    assert len(answers) == 1
    missing = await sql.get("/adapters/sql/aliases/canary/shadow")
    assert (missing.status_code, missing.json()["code"]) == (404, "alias_not_found")
