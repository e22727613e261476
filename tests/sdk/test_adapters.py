from __future__ import annotations

from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors


def test_list_follows_cursor_and_fetches_only_when_needed(server: Any, client: Client) -> None:
    server.answer_with_adapters("a", "b", next_cursor="after b/=")
    rows = client.adapters.list()
    assert [next(rows).name, next(rows).name] == ["a", "b"]
    assert len(server.asked) == 1
    server.answer_with_adapters("c")
    assert [row.name for row in rows] == ["c"]
    assert server.asked[1].query["cursor"] == "after b/="


async def test_async_list_follows_the_cursor(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_adapters("a", next_cursor="x")
    server.answer_with_adapters("b")
    assert [row.name async for row in async_client.adapters.list()] == ["a", "b"]


def test_alias_moves_only_from_observed_state(server: Any, client: Client) -> None:
    server.answer_with_alias(version=2, etag='"7"')
    server.refuse(412, "precondition_failed", "It moved.")
    moved = client.adapters.set_alias("sql", "live", 2, if_match='"6"')
    assert server.asked[0].headers["if-match"] == '"6"'
    assert moved.etag == '"7"'
    with pytest.raises(errors.PreconditionFailed):
        client.adapters.set_alias("sql", "live", 3, if_match='"6"')


CERTIFICATE = {
    "verdict": "failed",
    "max_difference": 0.31,
    "mean_difference": 0.01,
    "base_difference": None,
    "tolerance": 0.002,
    "max_effect": 3.0,
    "top1_agreement": 0.5,
    "precision_loss": 0.0,
    "num_probe_tokens": 64,
    "seconds": 0.2,
    "reason": "Far off.",
}
FAILED = {
    "state": "quarantined",
    "checks": [
        {"name": "format", "status": "passed", "detail": "LORA"},
        {"name": "parity", "status": "failed", "detail": "Far off", "certificate": CERTIFICATE},
    ],
}


def test_verify_returns_version_with_certificate(server: Any, client: Client) -> None:
    server.answer_with_version(**FAILED)
    version = client.adapters.verify("sql", 1)
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/api/v1/adapters/sql/versions/1/verify")
    assert asked.headers["idempotency-key"]
    assert (version.is_quarantined, version.verdict, version.detail_of("format")) == (True, "failed", "LORA")
    assert version.certificate is not None
    assert (version.certificate.max_difference, version.certificate.base_difference) == (0.31, None)


async def test_async_verify_asks_the_same(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_version()
    version = await async_client.adapters.verify("sql", 3)
    assert server.asked[0].path == "/api/v1/adapters/sql/versions/3/verify"
    assert (version.is_quarantined, version.verdict, version.certificate) == (False, None, None)


def test_unavailable_engine_is_retried_under_same_key(server: Any, client: Client) -> None:
    server.refuse(503, "engine_unavailable", retry_after_ms="1")
    server.answer_with_version()
    client.adapters.verify("sql", 1)
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_use_of_quarantined_version_has_own_error(server: Any, client: Client) -> None:
    server.refuse(409, "adapter_quarantined", "0.31", retry_after_ms="1", x_should_retry="false")
    with pytest.raises(errors.AdapterQuarantined, match=r"0\.31"):
        client.completions.create(model="sql", prompt="x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("action", ["warm", "pin", "unpin"])
def test_weights_are_kept_or_dropped_by_version(server: Any, client: Client, action: str) -> None:
    server.answer({"name": "sql", "version": 3, "digest": "ab", "action": action, "is_done": False}, 202)
    assert getattr(client.adapters, action)("sql", 3).is_done is False
    assert (server.asked[0].method, server.asked[0].path) == ("POST", f"/api/v1/adapters/sql/versions/3/{action}")


def test_delete_removes_adapter_or_single_version(server: Any, client: Client) -> None:
    server.answer(status=204)
    server.answer(status=204)
    client.adapters.delete("sql")
    client.adapters.delete("sql", 3)
    assert [asked.path for asked in server.asked] == ["/api/v1/adapters/sql", "/api/v1/adapters/sql/versions/3"]


def test_new_key_is_shown_only_by_own_field(server: Any, client: Client) -> None:
    made = {
        "id": "1",
        "name": "ci",
        "scopes": ["inference"],
        "prefix": "sk-lora-s",
        "created_at": "2026-01-02T03:04:05Z",
    }
    server.answer(made | {"key": "sk-lora-secret"}, 201)
    key = client.keys.create("acme", name="ci", scopes=["inference"])
    assert key.key == "sk-lora-secret"
    assert "sk-lora-secret" not in repr(key)
    assert server.asked[0].path == "/api/v1/tenants/acme/keys"


MEMORY = {
    "budget_bytes": 100,
    "kv_used_bytes": 40,
    "kv_idle_bytes": 30,
    "adapters_used_bytes": 15,
    "adapters_idle_bytes": 10,
    "free_bytes": 5,
    "num_device_adapters": 3,
    "host_budget_bytes": 128,
    "host_adapter_bytes": 64,
    "num_host_adapters": 2,
}


def test_memory_is_read_with_at_most_single_row(server: Any, client: Client) -> None:
    server.answer({"data": [], "next_cursor": None, "memory": MEMORY})
    memory = client.memory()
    assert memory is not None
    assert memory.model_dump() == MEMORY
    assert (server.asked[0].path, server.asked[0].query) == ("/api/v1/residency", {"limit": "1"})


async def test_memory_hidden_from_tenant_is_absent(server: Any, client: Client, async_client: AsyncClient) -> None:
    for body in ({"data": [], "next_cursor": None, "memory": None}, {"data": [], "next_cursor": None}):
        server.answer(body)
        assert client.memory() is None
    server.answer({"data": [], "next_cursor": None, "memory": None})
    assert await async_client.memory() is None
