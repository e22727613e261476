"""A tenant's keys over HTTP, managed by one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

Connect = Callable[[str], httpx2.AsyncClient]
SCOPES = ["adapters:read", "inference", "keys:write"]


@pytest.fixture
async def maker(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, connect: Connect) -> httpx2.AsyncClient:
    made = await admin.post("/tenants/acme/keys", json={"name": "maker", "scopes": SCOPES})
    assert made.status_code == 201
    return connect(made.json()["key"])


async def test_tenant_makes_lists_rotates_and_revokes_keys(
    maker: httpx2.AsyncClient, admin: httpx2.AsyncClient, connect: Connect
) -> None:
    made = await maker.post("/keys", json={"name": "ci", "scopes": ["adapters:read"]})
    assert made.status_code == 201
    key = made.json()
    assert made.headers["location"] == f"/api/v1/keys/{key['id']}"
    assert made.headers["cache-control"] == "no-store"
    assert (await connect(key["key"]).get("/adapters")).status_code == 200
    listed = (await maker.get("/keys")).json()["data"]
    assert {"maker", "ci"} <= {one["name"] for one in listed}
    assert all("key" not in one for one in listed)
    new = await maker.post(f"/keys/{key['id']}/rotate", json={"overlap_s": 60})
    assert (new.status_code, new.json()["scopes"], new.json()["name"]) == (201, ["adapters:read"], "ci")
    for secret in (key["key"], new.json()["key"]):
        assert (await connect(secret).get("/adapters")).status_code == 200
    assert (await maker.delete(f"/keys/{new.json()['id']}")).status_code == 204
    assert (await connect(new.json()["key"]).get("/adapters")).status_code == 401
    entries = (await admin.get("/audit", headers={"x-tenant": "acme"})).json()["data"]
    actor = next(one["id"] for one in listed if one["name"] == "maker")
    done = {entry["action"] for entry in entries if entry["actor"] == actor}
    assert done == {"key.create", "key.rotate", "key.revoke"}


@pytest.mark.parametrize(
    "body",
    [
        {"scopes": ["adapters:write"]},
        {"scopes": ["inference", "adapters:write"]},
        {"scopes": ["metrics:read"]},
    ],
)
async def test_key_exceeding_maker_gets_403(maker: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    refused = await maker.post("/keys", json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert body["scopes"][-1] in refused.json()["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"scopes": ["admin"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"scopes": "inference"}, "scopes"),
        ({"name": "x" * 200}, "name"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"limits": {}}, None),
    ],
)
async def test_bad_own_key_gets_400_naming_field(
    maker: httpx2.AsyncClient, body: dict[str, Any], field: str | None
) -> None:
    response = await maker.post("/keys", json=body)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, field)


async def test_key_without_scope_manages_no_keys(acme: httpx2.AsyncClient) -> None:
    for answer in (
        await acme.get("/keys"),
        await acme.post("/keys", json={}),
        await acme.delete("/keys/01J00000000000000000000000"),
        await acme.post("/keys/01J00000000000000000000000/rotate", json={}),
    ):
        assert answer.status_code == 403
        assert "--scope inference --scope keys:write" in answer.text


async def test_repeated_creation_makes_single_key(maker: httpx2.AsyncClient) -> None:
    once = {"idempotency-key": "one"}
    first = await maker.post("/keys", json={"name": "once"}, headers=once)
    again = await maker.post("/keys", json={"name": "once"}, headers=once)
    assert (first.status_code, again.status_code) == (201, 409)
    assert first.json()["key"] not in again.text
    assert [one["name"] for one in (await maker.get("/keys")).json()["data"]].count("once") == 1


async def test_admin_manages_keys_of_named_tenant(maker: httpx2.AsyncClient, admin: httpx2.AsyncClient) -> None:
    made = await admin.post(
        "/keys", json={"name": "by admin", "scopes": ["adapters:write"]}, headers={"X-Tenant": "acme"}
    )
    assert made.status_code == 201
    assert "by admin" in {one["name"] for one in (await maker.get("/keys")).json()["data"]}
    rotated = await admin.post(f"/tenants/acme/keys/{made.json()['id']}/rotate", json={})
    assert rotated.status_code == 201
    # beyond the scopes of the tenant's own
    assert (await maker.delete(f"/keys/{rotated.json()['id']}")).status_code == 403
