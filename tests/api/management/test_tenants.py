"""Tenants and keys over HTTP: for admins alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services

Connect = Callable[[str], httpx2.AsyncClient]


async def test_a_tenant_is_made_read_listed_and_deleted(admin: httpx2.AsyncClient) -> None:
    made = await admin.post("/tenants", json={"name": "acme", "limits": {"max_adapters": 3}})
    assert made.status_code == 201
    assert made.headers["location"] == "/api/v1/tenants/acme"
    limits = made.json()["limits"]
    assert limits.pop("max_adapters") == 3
    assert set(limits.values()) == {None}
    assert (await admin.get("/tenants/acme")).json() == made.json()
    assert [one["name"] for one in (await admin.get("/tenants")).json()["data"]] == ["acme", "default"]
    assert (await admin.post("/tenants", json={"name": "acme"})).status_code == 409
    assert (await admin.delete("/tenants/acme")).status_code == 204
    assert (await admin.get("/tenants/acme")).status_code == 404
    assert (await admin.delete("/tenants/default")).status_code == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "ACME"}, "name"),
        ({"name": 1}, "name"),
        ({}, "name"),
        ({"name": "a", "limits": {"max_adapters": -1}}, "limits.max_adapters"),
        ({"name": "a", "limits": {"max_adapters": "3"}}, "limits.max_adapters"),
        ({"name": "a", "limits": {"max_adpaters": 3}}, None),
        ({"name": "a", "limits": {"max_kv_share": 0}}, "limits.max_kv_share"),
        ({"name": "a", "limits": {"tokens_per_minute": 1.5}}, "limits.tokens_per_minute"),
        ({"name": "a", "weight": 0}, "weight"),
        ({"name": "a", "prices": {"currency": "EUR", "prompt": "1"}}, "prices.completion"),
        ({"name": "a", "prices": {"currency": "EUR", "prompt": 1.0, "completion": "1"}}, "prices.prompt"),
        ({"name": "a", "prices": {"currency": "euro", "prompt": "1", "completion": "1"}}, "prices.currency"),
    ],
)
async def test_bad_tenant_gets_400_naming_field(
    admin: httpx2.AsyncClient, body: dict[str, Any], field: str | None
) -> None:
    response = await admin.post("/tenants", json=body)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, field)


PRICES = {"currency": "EUR", "prompt": "0.50", "completion": "1.50", "adapters": {"sql": {"completion": "2"}}}


async def test_change_leaves_unnamed_fields_alone(admin: httpx2.AsyncClient) -> None:
    await admin.post("/tenants", json={"name": "acme", "limits": {"max_adapters": 3}, "weight": 2, "prices": PRICES})
    limits = {"requests_per_minute": 60, "max_kv_share": 0.5}
    changed = await admin.patch("/tenants/acme", json={"limits": limits})
    assert changed.status_code == 200
    body = changed.json()
    assert {name: value for name, value in body["limits"].items() if value is not None} == {"max_adapters": 3, **limits}
    assert body["weight"] == 2
    assert body["prices"] == {
        "currency": "EUR",
        "prompt": "0.50",
        "cached": "0.50",
        "completion": "1.50",
        "adapters": {"sql": {"prompt": "0.50", "cached": "0.50", "completion": "2"}},
    }
    assert (await admin.get("/tenants/acme")).json() == body


async def test_null_removes_limit_weight_and_prices(admin: httpx2.AsyncClient) -> None:
    await admin.post("/tenants", json={"name": "acme", "limits": {"max_adapters": 3}, "weight": 2, "prices": PRICES})
    one = await admin.patch("/tenants/acme", json={"limits": {"max_adapters": None}})
    assert set(one.json()["limits"].values()) == {None}
    await admin.patch("/tenants/acme", json={"limits": {"max_adapters": 3}})
    body = (await admin.patch("/tenants/acme", json={"weight": None, "prices": None, "limits": None})).json()
    assert (body["weight"], body["prices"], set(body["limits"].values())) == (1, None, {None})


async def test_change_based_on_stale_state_is_refused(admin: httpx2.AsyncClient) -> None:
    read = (await admin.post("/tenants", json={"name": "acme"})).headers["etag"]
    first = await admin.patch("/tenants/acme", json={"weight": 2}, headers={"If-Match": read})
    assert (first.status_code, first.headers["etag"] != read) == (200, True)
    second = await admin.patch("/tenants/acme", json={"weight": 3}, headers={"If-Match": read})
    assert (second.status_code, second.json()["code"]) == (412, "precondition_failed")
    assert (await admin.get("/tenants/acme")).json()["weight"] == 2


async def test_audit_entry_contains_changed_fields(admin: httpx2.AsyncClient) -> None:
    await admin.post("/tenants", json={"name": "acme"})
    await admin.patch("/tenants/acme", json={"weight": 2})
    await admin.patch("/tenants/acme", json={"weight": 2})
    rows = [row for row in (await admin.get("/audit")).json()["data"] if row["action"] == "tenant.update"]
    assert [(row["target"], row["detail"]) for row in rows] == [("acme", {"weight": 2})]


async def test_an_absent_tenant_isnt_changed(admin: httpx2.AsyncClient) -> None:
    assert (await admin.patch("/tenants/acme", json={"weight": 2})).status_code == 404


async def test_a_keys_secret_is_shown_once(admin: httpx2.AsyncClient, connect: Connect) -> None:
    await admin.post("/tenants", json={"name": "acme"})
    made = await admin.post("/tenants/acme/keys", json={"name": "ci", "scopes": ["adapters:read"]})
    assert made.status_code == 201
    key = made.json()
    assert (key["name"], key["scopes"]) == ("ci", ["adapters:read"])
    assert key["key"].startswith("sk-lora-")
    assert made.headers["cache-control"] == "no-store"
    assert (await connect(key["key"]).get("/adapters")).status_code == 200
    listed = (await admin.get("/tenants/acme/keys")).json()["data"]
    assert listed == [{name: value for name, value in key.items() if name != "key"}]


async def test_retried_key_request_makes_key_and_secret_once(admin: httpx2.AsyncClient) -> None:
    await admin.post("/tenants", json={"name": "acme"})
    headers = {"Idempotency-Key": "k"}
    first = await admin.post("/tenants/acme/keys", json={"name": "ci"}, headers=headers)
    again = await admin.post("/tenants/acme/keys", json={"name": "ci"}, headers=headers)
    assert again.status_code == 409
    assert first.json()["id"] in again.json()["detail"]
    assert first.json()["key"] not in again.text
    assert len((await admin.get("/tenants/acme/keys")).json()["data"]) == 1


async def test_a_retried_tenant_is_made_once(admin: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    first = await admin.post("/tenants", json={"name": "acme"}, headers=headers)
    again = await admin.post("/tenants", json={"name": "acme"}, headers=headers)
    assert (again.status_code, again.content) == (201, first.content)
    assert (await admin.post("/tenants", json={"name": "b"}, headers=headers)).status_code == 422


async def test_a_revoked_key_works_no_more_at_once(admin: httpx2.AsyncClient, connect: Connect) -> None:
    await admin.post("/tenants", json={"name": "acme"})
    key = (await admin.post("/tenants/acme/keys", json={})).json()
    client = connect(key["key"])
    assert (await client.get("/adapters")).status_code == 200
    assert (await admin.delete(f"/tenants/acme/keys/{key['id']}")).status_code == 204
    assert (await client.get("/adapters")).status_code == 401
    assert (await admin.delete(f"/tenants/acme/keys/{key['id']}")).status_code == 204


async def test_keys_of_deleted_tenant_stop_working_at_once(acme: httpx2.AsyncClient, admin: httpx2.AsyncClient) -> None:
    assert (await acme.get("/adapters")).status_code == 200
    await admin.delete("/tenants/acme")
    assert (await acme.get("/adapters")).status_code == 401


async def test_key_is_not_found_under_different_tenant(
    acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient
) -> None:
    key = (await admin.get("/tenants/acme/keys")).json()["data"][0]
    headers = {"x-request-id": "the-same"}
    foreign = await admin.delete(f"/tenants/globex/keys/{key['id']}", headers=headers)
    absent = await admin.delete("/tenants/globex/keys/01J00000000000000000000000", headers=headers)
    assert foreign.status_code == 404
    assert foreign.content == absent.content
    assert (await acme.get("/adapters")).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"scopes": ["admin"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["metrics:read", "inference"]}, "scopes"),
        ({"name": ""}, "name"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "2099-01-01T00:00:00"}, "expires_at"),
        ({"expires_at": "soon"}, "expires_at"),
        # the year 10000 in UTC
        ({"expires_at": "9999-12-31T23:59:59-14:00"}, "expires_at"),
    ],
)
async def test_bad_key_gets_400_naming_field(admin: httpx2.AsyncClient, body: dict[str, Any], field: str) -> None:
    response = await admin.post("/tenants/default/keys", json=body)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, field)


@pytest.mark.parametrize("path", ["/tenants", "/tenants/acme", "/tenants/globex", "/tenants/acme/keys"])
async def test_a_tenants_key_is_no_admin(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, path: str) -> None:
    assert (await acme.get(path)).status_code == 403


async def test_tenant_key_cannot_name_different_tenant(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    headers = {"x-request-id": "the-same"}
    foreign = await acme.get("/adapters", headers={"X-Tenant": "globex", **headers})
    absent = await acme.get("/adapters", headers={"X-Tenant": "nobody", **headers})
    assert (foreign.status_code, foreign.content) == (404, absent.content)
    assert (await acme.get("/adapters", headers={"X-Tenant": "acme"})).status_code == 200


async def test_unavailable_database_gets_503_with_retry_after(
    admin: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise ConnectionRefusedError

    monkeypatch.setattr(services.authenticator.tenants._database, "_writers", refuse)
    response = await admin.post("/tenants", json={"name": "acme"})
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["retry-after"]
