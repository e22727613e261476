from __future__ import annotations

import re
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors
from loraserve.sdk import Progress


def parts_of(asked: Any) -> dict[str, bytes]:
    """The multipart body as another reader than our own writer sees it."""
    head = f"Content-Type: {asked.headers['content-type']}\r\n\r\n".encode()
    message: Message = BytesParser().parsebytes(head + asked.body)
    parts = {}
    for part in message.get_payload():
        name = re.search('name="([a-z]+)"', part["Content-Disposition"])
        assert name is not None
        parts[name[1]] = part.get_payload(decode=True)
    return parts


def test_push_sends_both_files_whole(server: Any, client: Client, peft_dir: Path) -> None:
    # MIME readers turn bare CRs into line ends, so the weights of this test have none.
    weights = bytes(byte for byte in range(256) if byte not in b"\r\n") * 3000
    (peft_dir / "adapter_model.safetensors").write_bytes(weights)
    server.answer_with_version()
    version = client.adapters.push(peft_dir, name="sql")
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.query) == ("POST", "/api/v1/adapters/sql/versions", {})
    assert int(asked.headers["content-length"]) == len(asked.body)
    assert parts_of(asked) == {"config": (peft_dir / "adapter_config.json").read_bytes(), "weights": weights}
    assert (version.version, version.model, version.created_at.year) == (1, "sql@1", 2026)  # type: ignore[union-attr]


async def test_async_push_sends_the_same_bytes(
    server: Any, client: Client, async_client: AsyncClient, peft_dir: Path
) -> None:
    server.answer_with_version()
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    await async_client.adapters.push(peft_dir, name="sql")
    sync_body, async_body = (re.sub(rb"--[0-9a-f]{32}", b"--BOUNDARY", asked.body) for asked in server.asked)
    assert sync_body == async_body


def test_push_reports_from_nothing_to_all(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_version()
    seen: list[Progress] = []
    client.adapters.push(peft_dir, name="sql", on_progress=seen.append)
    sent = [progress.sent_bytes for progress in seen]
    assert sent == sorted(sent)
    assert sent[0] == 0
    assert sent[-1] == seen[-1].total_bytes == len(server.asked[0].body)
    assert len(seen) >= 4
    assert str(seen[-1]).endswith("(100 %)")


def test_push_is_sent_again_from_its_start(server: Any, client: Client, peft_dir: Path) -> None:
    server.refuse(503, "overloaded", retry_after_ms="1")
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    first, second = server.asked
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_dry_run_and_no_promote_are_said_in_the_query(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_version(version=None)
    version = client.adapters.push(peft_dir, name="sql", dry_run=True, promote=False)
    assert server.asked[0].query == {"dry_run": "true", "promote": "false"}
    assert version.model == "sql"


def test_dry_run_moves_no_alias_even_to_bytes_that_are_there(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_version(version=3)
    client.adapters.push(peft_dir, name="sql", dry_run=True, alias="canary")
    assert len(server.asked) == 1


def test_push_points_an_alias_at_the_new_version(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_version(version=4)
    server.answer_with_alias(name="canary", version=4)
    server.answer_with_version(version=4, aliases=["canary", "live"])
    assert client.adapters.push(peft_dir, name="sql", alias="canary").aliases == ["canary", "live"]
    assert (server.asked[1].method, server.asked[1].path) == ("PUT", "/api/v1/adapters/sql/aliases/canary")
    assert server.asked[1].json == {"version": 4}


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("adapter_config.json", None, "no adapter_config.json; it holds adapter_model.safetensors"),
        ("adapter_model.safetensors", None, "no adapter_model.safetensors"),
        ("adapter_model.safetensors", "adapter_model.bin", "pickled"),
    ],
)
def test_directory_that_is_no_adapter_is_refused_before_anything_is_sent(
    server: Any, client: Client, peft_dir: Path, remove: str, add: str | None, message: str
) -> None:
    (peft_dir / remove).unlink()
    if add is not None:
        (peft_dir / add).write_bytes(b"\x80")
    with pytest.raises(errors.AdapterFormatError, match=message):
        client.adapters.push(peft_dir, name="sql")
    assert server.asked == []


def test_absent_directory_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(errors.AdapterFormatError, match=r"doesn't exist.*save_pretrained"):
        client.adapters.push(tmp_path / "nowhere", name="sql")


def test_file_that_shrinks_on_the_way_is_no_silent_half(server: Any, client: Client, peft_dir: Path) -> None:
    def shrink(progress: Progress) -> None:
        (peft_dir / "adapter_model.safetensors").write_bytes(b"x")

    with pytest.raises(errors.AdapterFormatError, match="became shorter"):
        client.adapters.push(peft_dir, name="sql", on_progress=shrink)


def test_list_follows_the_cursor_and_asks_only_when_needed(server: Any, client: Client) -> None:
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


def test_alias_is_moved_only_from_the_state_that_was_seen(server: Any, client: Client) -> None:
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


def test_verify_returns_the_version_with_its_certificate(server: Any, client: Client) -> None:
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


def test_an_engine_that_is_away_is_asked_again_under_the_same_key(server: Any, client: Client) -> None:
    server.refuse(503, "engine_unavailable", retry_after_ms="1")
    server.answer_with_version()
    client.adapters.verify("sql", 1)
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_push_points_no_alias_at_a_version_in_quarantine(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_version(**FAILED)
    assert client.adapters.push(peft_dir, name="sql", alias="canary").is_quarantined
    assert len(server.asked) == 1


async def test_async_push_points_no_alias_at_a_version_in_quarantine(
    server: Any, async_client: AsyncClient, peft_dir: Path
) -> None:
    server.answer_with_version(**FAILED)
    assert (await async_client.adapters.push(peft_dir, name="sql", alias="canary")).is_quarantined
    assert len(server.asked) == 1


def test_the_use_of_a_version_in_quarantine_has_an_error_of_its_own(server: Any, client: Client) -> None:
    server.refuse(409, "adapter_quarantined", "0.31", retry_after_ms="1", x_should_retry="false")
    with pytest.raises(errors.AdapterQuarantined, match=r"0\.31"):
        client.completions.create(model="sql", prompt="x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("action", ["warm", "pin", "unpin"])
def test_weights_are_kept_or_dropped_by_version(server: Any, client: Client, action: str) -> None:
    server.answer({"name": "sql", "version": 3, "digest": "ab", "action": action, "is_done": False}, 202)
    assert getattr(client.adapters, action)("sql", 3).is_done is False
    assert (server.asked[0].method, server.asked[0].path) == ("POST", f"/api/v1/adapters/sql/versions/3/{action}")


def test_delete_takes_the_adapter_or_one_version(server: Any, client: Client) -> None:
    server.answer(status=204)
    server.answer(status=204)
    client.adapters.delete("sql")
    client.adapters.delete("sql", 3)
    assert [asked.path for asked in server.asked] == ["/api/v1/adapters/sql", "/api/v1/adapters/sql/versions/3"]


def test_new_key_is_shown_by_its_field_and_by_nothing_else(server: Any, client: Client) -> None:
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


def test_memory_is_read_with_one_row_at_most(server: Any, client: Client) -> None:
    server.answer({"data": [], "next_cursor": None, "memory": MEMORY})
    memory = client.memory()
    assert memory is not None
    assert memory.model_dump() == MEMORY
    assert (server.asked[0].path, server.asked[0].query) == ("/api/v1/residency", {"limit": "1"})


async def test_memory_that_a_tenant_is_not_told_is_none(server: Any, client: Client, async_client: AsyncClient) -> None:
    for body in ({"data": [], "next_cursor": None, "memory": None}, {"data": [], "next_cursor": None}):
        server.answer(body)
        assert client.memory() is None
    server.answer({"data": [], "next_cursor": None, "memory": None})
    assert await async_client.memory() is None
