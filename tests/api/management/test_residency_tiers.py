"""Tiers in one small answer: the engine is asked once for all, and tenants see their own."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from loraserve.api.residency_snapshot import ResidencySnapshots
from loraserve.api.services import Services
from loraserve.types import AdapterResidency, Digest, Tier


@pytest.fixture
def queries(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engine was asked for residency."""
    asked: list[object] = []
    residency = engine.residency

    async def counted(only: Any = None) -> Any:
        asked.append(only)
        return await residency(only)

    monkeypatch.setattr(engine, "residency", counted)
    return asked


async def test_concurrent_readers_share_single_engine_query(
    push: Any, acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any, queries: list[object]
) -> None:
    await push(acme)
    await acme.post("/adapters/sql/versions/1/warm")
    queries.clear()
    (digest,) = engine.resident
    for _ in range(3):
        assert (await admin.get("/residency/tiers")).json() == {"device": [digest], "loading": [], "host": []}
    assert len(queries) == 1


async def test_tenant_sees_only_adapters_loaded_by_own_use(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, engine: Any
) -> None:
    for tenant in (acme, globex):
        await push(tenant)
    await acme.post("/adapters/sql/versions/1/warm")
    (digest,) = engine.resident
    assert (await acme.get("/residency/tiers")).json()["device"] == [digest]
    assert (await globex.get("/residency/tiers")).json()["device"] == []


async def test_version_is_found_by_digest(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient, queries: list[object]
) -> None:
    digest = (await push(acme)).json()["digest"]
    await push(acme, "other", seed=5)
    await acme.post("/adapters/sql/versions/1/warm")
    queries.clear()
    for client in (acme, admin):
        (row,) = (await client.get("/residency", params={"digest": digest})).json()["data"]
        assert (row["name"], row["tier"]) == ("sql", "device")
    assert (await globex.get("/residency", params={"digest": digest})).json()["data"] == []
    assert queries == [[digest]] * 3


async def test_pages_of_a_list_ask_the_engine_once(push: Any, acme: httpx2.AsyncClient, queries: list[object]) -> None:
    for name in "abc":
        await push(acme, name)
    queries.clear()
    cursor, names = None, []
    while True:
        page = (await acme.get("/residency", params={"limit": 1} | ({"cursor": cursor} if cursor else {}))).json()
        names += [row["name"] for row in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert (names, len(queries)) == (["a", "b", "c"], 1)


async def test_stale_snapshot_is_queried_again(services: Services) -> None:
    now, asked = [0.0], []

    async def ask() -> list[AdapterResidency]:
        asked.append(now[0])
        return [AdapterResidency(Digest("d" * 64), Tier.HOST, 0, 1, 0, False, 0.0)]

    snapshots = ResidencySnapshots(ask, monotonic=lambda: now[0])
    for now[0] in (0.0, 1.0, 2.0, 2.5, 3.0):
        await snapshots.take(max_age_s=2.0)
    await snapshots.take(max_age_s=0)
    assert asked == [0.0, 2.5, 3.0]
