"""Aliases over HTTP: splits, shadows, conditions, rollback, and what they answer."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

Push = Any
SHARES = [{"version": 1, "weight": 10.0}, {"version": 2, "weight": 90.0}]
SPLIT = {"split": [{"version": 2, "weight": 90}, {"version": 1, "weight": 10}]}


@pytest.fixture
async def sql(acme: httpx2.AsyncClient, push: Push) -> httpx2.AsyncClient:
    """acme, which has two versions of sql."""
    for seed in range(2):
        assert (await push(acme, seed=seed)).status_code == 201
    return acme


async def test_alias_reports_version_split_and_shadow(sql: httpx2.AsyncClient) -> None:
    put = await sql.put("/adapters/sql/aliases/live", json=SPLIT | {"shadow": {"version": 1, "share": 0.25}})
    assert put.status_code == 200
    body = put.json()
    assert isinstance(body.pop("updated_at"), str)
    revision = body.pop("revision")
    assert put.headers["etag"] == f'"r{revision}"'
    assert body == {
        "adapter": "sql",
        "name": "live",
        "version": 2,
        "split": SHARES,
        "shadow": {"version": 1, "share": 0.25},
    }
    assert (await sql.get("/adapters/sql/aliases/live")).json() == put.json()
    assert (await sql.get("/adapters/sql/aliases")).json() == {"data": [put.json()], "next_cursor": None}
    plain = (await sql.put("/adapters/sql/aliases/live", json={"version": 2})).json()
    assert (plain["version"], plain["split"], plain["shadow"]) == (2, None, None)


async def test_adapter_reports_aliases_with_split_traffic(sql: httpx2.AsyncClient) -> None:
    await sql.put("/adapters/sql/aliases/live", json=SPLIT)
    await sql.put("/adapters/sql/aliases/old", json={"version": 1})
    told = (await sql.get("/adapters/sql")).json()
    assert told["aliases"] == {"live": 2, "old": 1}
    assert told["splits"] == {"live": SHARES}
    assert (await sql.get("/adapters?include=notes")).json()["data"] == [told]
    await sql.put("/adapters/sql/aliases/live", json={"version": 2})
    assert (await sql.get("/adapters/sql")).json()["splits"] == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "version"),
        (SPLIT | {"version": 1}, "split"),
        ({"split": [{"version": 1, "weight": 1}]}, "split"),
        ({"split": [{"version": 1, "weight": 1}, {"version": 2, "weight": 0}]}, "split.1.weight"),
        ({"split": [{"version": 1, "weight": 1}, {"version": 2, "weight": True}]}, "split.1.weight"),
        ({"split": [{"version": 1, "weight": 1}] * 17}, "split"),
        ({"version": 1, "shadow": {"version": 2, "share": 0}}, "shadow.share"),
        ({"version": 1, "shadow": {"version": 2, "share": 1.5}}, "shadow.share"),
        ({"version": 1, "shadow": {"version": 2}}, "shadow.share"),
        ({"version": "1"}, "version"),
    ],
)
async def test_malformed_alias_target_is_refused_by_field(
    sql: httpx2.AsyncClient, body: dict[str, Any], param: str
) -> None:
    refused = await sql.put("/adapters/sql/aliases/live", json=body)
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == param


async def test_rollback_obeys_if_match_and_is_idempotent(sql: httpx2.AsyncClient) -> None:
    live = await sql.get("/adapters/sql/aliases/live")
    stale = await sql.post("/adapters/sql/aliases/live/rollback", headers={"If-Match": '"r1"'})
    assert stale.status_code == 412
    headers = {"If-Match": live.headers["etag"], "Idempotency-Key": "once"}
    done = await sql.post("/adapters/sql/aliases/live/rollback", headers=headers)
    assert (done.status_code, done.json()["version"]) == (200, 1)
    again = await sql.post("/adapters/sql/aliases/live/rollback", headers=headers)
    assert (again.json(), again.headers["idempotent-replayed"]) == (done.json(), "true")
    assert (await sql.get("/adapters/sql/aliases/live")).headers["etag"] == done.headers["etag"]


async def test_an_alias_without_a_past_is_a_conflict(sql: httpx2.AsyncClient) -> None:
    await sql.put("/adapters/sql/aliases/canary", json={"version": 1})
    refused = await sql.post("/adapters/sql/aliases/canary/rollback")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")


async def test_foreign_aliases_read_as_absent(sql: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    async def answers(name: str) -> list[tuple[int, str]]:
        path = f"/adapters/{name}/aliases"
        calls = [
            await globex.get(path),
            await globex.get(f"{path}/live"),
            await globex.put(f"{path}/live", json=SPLIT),
            await globex.post(f"{path}/live/rollback"),
            await globex.delete(f"{path}/live"),
        ]
        texts = [(one.status_code, one.json() | {"instance": "", "request_id": ""}) for one in calls]
        return [(status, str(text).replace(name, "NAME")) for status, text in texts]

    found = await answers("sql")
    assert found == await answers("lqs")
    assert {status for status, _ in found} == {404}
    assert (await sql.get("/adapters/sql/aliases/live")).json()["version"] == 2
