"""Tenants' limits, weights and prices, and grants."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors

GRANT = {"adapter": "sql", "tenant": "acme", "created_at": "2026-01-02T03:04:05Z"}


def test_update_sends_only_given_fields(server: Any, client: Client) -> None:
    server.answer_with_tenant()
    client.tenants.update("acme", limits={"max_adapters": None, "tokens_per_minute": 1000}, if_match='"x"')
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.headers["if-match"]) == ("PATCH", "/api/v1/tenants/acme", '"x"')
    assert asked.json == {"limits": {"max_adapters": None, "tokens_per_minute": 1000}}


async def test_async_update_sends_the_same(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_tenant()
    await async_client.tenants.update("acme", weight=2.5)
    assert server.asked[0].json == {"weight": 2.5}


def test_empty_price_table_takes_prices_away(server: Any, client: Client) -> None:
    server.answer_with_tenant()
    client.tenants.update("acme", prices={})
    assert server.asked[0].json == {"prices": None}


def test_new_tenant_accepts_weight_and_prices_at_creation(server: Any, client: Client) -> None:
    server.answer_with_tenant()
    prices = {"currency": "EUR", "prompt": "0.50", "completion": "1.50"}
    client.tenants.create("acme", weight=2, prices=prices)
    assert server.asked[0].json == {"name": "acme", "weight": 2, "prices": prices}


def test_grants_are_added_listed_and_removed(server: Any, client: Client) -> None:
    server.answer(GRANT)
    server.answer({"data": [GRANT], "next_cursor": None})
    server.answer(status=204)
    assert client.grants.add("sql", "acme").tenant == "acme"
    assert [grant.tenant for grant in client.grants.list("sql")] == ["acme"]
    client.grants.remove("sql", "acme")
    asked = [(one.method, one.path) for one in server.asked]
    path = "/api/v1/adapters/sql/grants"
    assert asked == [("PUT", f"{path}/acme"), ("GET", path), ("DELETE", f"{path}/acme")]


def test_missing_grant_has_own_error(server: Any, client: Client) -> None:
    server.refuse(404, "grant_not_found")
    with pytest.raises(errors.GrantNotFound):
        client.grants.get("sql", "acme")


@pytest.mark.parametrize(("tenant", "root"), [("acme", "/api/v1/tenants/acme/keys"), (None, "/api/v1/keys")])
def test_keys_are_asked_of_named_or_own_tenant(server: Any, client: Client, tenant: str | None, root: str) -> None:
    key = {
        "id": "01K",
        "name": "ci",
        "scopes": ["inference"],
        "prefix": "sk-lora-ab",
        "created_at": "2026-01-02T03:04:05Z",
    }
    for status, body in ((201, key | {"key": "sk-lora-x"}), (201, key | {"key": "sk-lora-y"}), (204, None)):
        server.answer(body, status)
    client.keys.create(tenant, name="ci")
    client.keys.rotate(tenant, "01K", overlap_s=5)
    client.keys.revoke(tenant, "01K")
    assert [(asked.method, asked.path) for asked in server.asked] == [
        ("POST", root),
        ("POST", f"{root}/01K/rotate"),
        ("DELETE", f"{root}/01K"),
    ]
    assert server.asked[1].json == {"overlap_s": 5}
