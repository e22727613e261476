"""Versions of an adapter compared by their requests, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from loraserve.api.metrics.version_traffic import EndedRequest, Role
from loraserve.registry.repository import AdapterRepository

PATH = "/adapters/sql/traffic"


@pytest.fixture
async def sql(acme: httpx2.AsyncClient, push: Any, services: Any) -> httpx2.AsyncClient:
    """acme, whose sql@1 answered two requests, one of them in vain, and sql@2 shadowed one."""
    for seed in range(2):
        assert (await push(acme, seed=seed)).status_code == 201
    tenant = next(iter((await services.authenticator.tenants.list()).items)).id
    traffic = services.metrics.activity.traffic
    async with services.registry._database.read() as session:
        repository = AdapterRepository(session, tenant)
        adapter = await repository.adapter("sql")
        refs = [
            (await repository.version_record(adapter, await repository.version(adapter, number))).ref
            for number in (1, 2)
        ]
    traffic.add(tenant, refs[0], Role.ANSWER, EndedRequest(False, 4, 1, 8, 0.1, 0.01))
    traffic.add(tenant, refs[0], Role.ANSWER, EndedRequest(True, 0, 0, 0, None, None))
    traffic.add(tenant, refs[1], Role.SHADOW, EndedRequest(False, 4, 0, 8, None, None))
    return acme


async def test_versions_are_listed_with_answer_counts(sql: httpx2.AsyncClient) -> None:
    response = await sql.get(PATH)
    assert response.status_code == 200
    body = response.json()
    since, at = (datetime.fromisoformat(body[name]) for name in ("since", "at"))
    assert timedelta(minutes=55) <= at - since <= timedelta(minutes=60)
    assert abs(at - datetime.now(UTC)) < timedelta(minutes=1)
    one, two = body["data"]
    assert (one["version"], one["role"], one["num_requests"], one["num_failed"]) == (1, "answer", 2, 1)
    assert (one["prompt_tokens"], one["cached_tokens"], one["completion_tokens"]) == (4, 1, 8)
    assert 0.1 <= one["first_token_s"]["p50"] == one["first_token_s"]["p99"] <= 0.125
    assert 0.01 <= one["per_token_s"]["p95"] <= 0.0125
    versions = (await sql.get("/adapters/sql/versions")).json()["data"]
    assert [row["digest"] for row in body["data"]] == [row["digest"] for row in reversed(versions)]
    assert (two["version"], two["role"], two["first_token_s"], two["per_token_s"]) == (2, "shadow", None, None)


@pytest.mark.parametrize("query", ["minutes=9", "minutes=61", "minutes=x", "hours=1"])
async def test_impossible_query_is_refused(sql: httpx2.AsyncClient, query: str) -> None:
    response = await sql.get(f"{PATH}?{query}")
    assert (response.status_code, response.headers["content-type"]) == (400, "application/problem+json")


async def test_other_tenant_sees_no_foreign_traffic(
    sql: httpx2.AsyncClient, globex: httpx2.AsyncClient, push: Any
) -> None:
    missing = await globex.get(PATH)
    assert (missing.status_code, missing.json()["code"]) == (404, "adapter_not_found")
    assert (await push(globex, seed=0)).status_code == 201
    assert (await globex.get(PATH)).json()["data"] == []
