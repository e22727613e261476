"""A PEFT directory on its way to the server, in pieces."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors
from loraserve.sdk import Progress
from loraserve.sdk.files import uploads

SIZE = 1024 * 1024
"""Of the weights."""


@pytest.fixture
def three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are sent in pieces of 400,000 bytes, the last one smaller."""
    monkeypatch.setattr(uploads, "PIECE_BYTES", 400_000)


def weights_of(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


def ranges(server: Any) -> list[str]:
    return [asked.headers["content-range"] for asked in server.asked if asked.method == "PATCH"]


def test_push_announces_sends_and_publishes(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push()
    version = client.adapters.push(peft_dir, name="sql")
    digest = hashlib.sha256(weights_of(peft_dir)).hexdigest()
    announced, sent, published = server.asked
    assert (announced.method, announced.path) == ("POST", "/api/v1/uploads")
    assert announced.json == {"sha256": digest, "size": SIZE}
    assert (sent.method, sent.path) == ("PATCH", "/api/v1/uploads/01UP")
    assert (sent.headers["content-range"], sent.headers["content-length"]) == (f"bytes 0-{SIZE - 1}/{SIZE}", str(SIZE))
    assert sent.body == weights_of(peft_dir)
    assert (published.path, published.query) == ("/api/v1/adapters/sql/versions", {})
    assert published.json == {"config": {"peft_type": "LORA", "r": 8}, "blob": digest}
    assert (version.version, version.model, version.created_at.year) == (1, "sql@1", 2026)


def test_config_is_sent_to_the_last_digit(server: Any, client: Client, peft_dir: Path) -> None:
    (peft_dir / "adapter_config.json").write_text('{"lora_alpha": 16.000000000000000001, "r": 1e1}')
    server.answer_with_push()
    client.adapters.push(peft_dir, name="sql")
    assert b'"config":{"lora_alpha": 16.000000000000000001, "r": 1e1}' in server.asked[2].body


@pytest.mark.parametrize("content", [b"[1]", b"{", b'{"a": "\xff"}', b"[" * 200_000])
def test_config_without_json_object_is_refused_before_sending(
    server: Any, client: Client, peft_dir: Path, content: bytes
) -> None:
    (peft_dir / "adapter_config.json").write_bytes(content)
    with pytest.raises(errors.AdapterFormatError, match="isn't a JSON object"):
        client.adapters.push(peft_dir, name="sql")
    assert server.asked == []


@pytest.mark.usefixtures("three_pieces")
def test_pieces_follow_each_other_and_are_reported(server: Any, client: Client, peft_dir: Path) -> None:
    for received in (0, 400_000, 800_000, SIZE):
        server.answer_with_upload(received)
    server.answer_with_version()
    seen: list[Progress] = []
    client.adapters.push(peft_dir, name="sql", on_progress=seen.append)
    assert ranges(server) == [
        f"bytes 0-399999/{SIZE}",
        f"bytes 400000-799999/{SIZE}",
        f"bytes 800000-{SIZE - 1}/{SIZE}",
    ]
    assert b"".join(asked.body for asked in server.asked[1:4]) == weights_of(peft_dir)
    sent = [progress.sent_bytes for progress in seen]
    assert sent == sorted(sent)
    assert (sent[0], sent[-1], seen[-1].total_bytes) == (0, SIZE, SIZE)
    assert str(seen[-1]).endswith("(100 %)")


@pytest.mark.usefixtures("three_pieces")
async def test_async_push_sends_the_same_pieces(server: Any, async_client: AsyncClient, peft_dir: Path) -> None:
    for received in (0, 400_000, 800_000, SIZE):
        server.answer_with_upload(received)
    server.answer_with_version()
    await async_client.adapters.push(peft_dir, name="sql")
    assert b"".join(asked.body for asked in server.asked[1:4]) == weights_of(peft_dir)


def test_blobs_present_on_server_are_not_resent(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(SIZE)
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    assert ranges(server) == []


@pytest.mark.usefixtures("three_pieces")
def test_broken_connection_resumes_from_received_bytes(
    server: Any, client: Client, peft_dir: Path, waits: list[float]
) -> None:
    server.answer_with_upload(0)
    server.break_connection()
    server.answer_with_upload(100_000)
    server.answer_with_upload(500_000)
    server.answer_with_upload(900_000)
    server.answer_with_upload(SIZE)
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    assert ranges(server)[1] == f"bytes 100000-499999/{SIZE}"
    assert server.asked[2].method == "GET"
    assert len(waits) == 1


def test_frequent_breaks_do_not_end_progressing_upload(
    server: Any, client: Client, peft_dir: Path, waits: list[float]
) -> None:
    server.answer_with_upload(0)
    for received in (100_000, 200_000, 300_000, 400_000):
        server.break_connection()
        server.answer_with_upload(received)
    server.answer_with_upload(SIZE)
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    assert len(waits) == 4


@pytest.mark.usefixtures("three_pieces")
def test_attempts_without_progress_end(server: Any, client: Client, peft_dir: Path, waits: list[float]) -> None:
    server.answer_with_upload(0)
    for _ in range(2):
        server.break_connection()
        server.answer_with_upload(0)
    server.break_connection()
    with pytest.raises(errors.ConnectionFailed):
        client.adapters.push(peft_dir, name="sql")
    assert len(waits) == 2


def test_piece_with_wrong_offset_queries_server(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(0)
    server.refuse(409, "upload_offset_mismatch")
    server.answer_with_upload(524_288)
    server.answer_with_upload(SIZE)
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    assert ranges(server)[1] == f"bytes 524288-{SIZE - 1}/{SIZE}"


def test_expired_upload_starts_over(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(0)
    server.refuse(404, "upload_not_found")
    server.answer_with_push()
    client.adapters.push(peft_dir, name="sql")
    assert [asked.method for asked in server.asked] == ["POST", "PATCH", "POST", "PATCH", "POST"]


def test_damaged_bytes_are_resent_within_bound(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(0)
    for _ in range(2):
        server.refuse(409, "upload_digest_mismatch")
        server.answer_with_upload(0)
    server.refuse(409, "upload_digest_mismatch")
    with pytest.raises(errors.UploadDigestMismatch):
        client.adapters.push(peft_dir, name="sql")
    assert len(ranges(server)) == 3


def test_file_changed_during_push_is_reported(server: Any, client: Client, peft_dir: Path) -> None:
    def change(progress: Progress) -> None:
        (peft_dir / "adapter_model.safetensors").write_bytes(b"y" * SIZE)

    server.answer_with_upload(0)
    server.refuse(409, "upload_digest_mismatch")
    with pytest.raises(errors.AdapterFormatError, match="changed while it was being sent"):
        client.adapters.push(peft_dir, name="sql", on_progress=change)


def test_file_shrinking_during_push_is_refused(server: Any, client: Client, peft_dir: Path) -> None:
    def shrink(progress: Progress) -> None:
        (peft_dir / "adapter_model.safetensors").write_bytes(b"x")

    server.answer_with_upload(0)
    with pytest.raises(errors.AdapterFormatError, match="became shorter"):
        client.adapters.push(peft_dir, name="sql", on_progress=shrink)


def test_bytes_lost_before_publication_are_resent(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(SIZE)
    server.refuse(404, "upload_not_found")
    server.answer_with_push()
    assert client.adapters.push(peft_dir, name="sql").version == 1
    assert len(ranges(server)) == 1


def test_publishing_is_tried_again_under_the_same_key(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_upload(SIZE)
    server.refuse(503, "overloaded", retry_after_ms="1")
    server.answer_with_version()
    client.adapters.push(peft_dir, name="sql")
    first, second = server.asked[1:]
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_push_reports_warnings_of_version(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push(version=4)
    server.answer_with_version(version=4, notes="new data", tags={"team": "search"})
    version = client.adapters.push(peft_dir, name="sql", notes="new data", tags={"team": "search"})
    assert (server.asked[3].method, server.asked[3].path) == ("PATCH", "/api/v1/adapters/sql/versions/4")
    assert server.asked[3].json == {"notes": "new data", "tags": {"team": "search"}}
    assert version.tags == {"team": "search"}


def test_push_points_an_alias_at_the_new_version(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push(version=4)
    server.answer_with_alias(name="canary", version=4)
    server.answer_with_version(version=4, aliases=["canary", "live"])
    assert client.adapters.push(peft_dir, name="sql", alias="canary").aliases == ["canary", "live"]
    assert (server.asked[3].method, server.asked[3].path) == ("PUT", "/api/v1/adapters/sql/aliases/canary")
    assert server.asked[3].json == {"version": 4}


def test_push_options_are_sent_in_query(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push(version=None)
    version = client.adapters.push(peft_dir, name="sql", dry_run=True, promote=False)
    assert server.asked[2].query == {"dry_run": "true", "promote": "false"}
    assert version.model == "sql"


def test_dry_run_moves_no_alias_to_stored_bytes(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push(version=3)
    client.adapters.push(peft_dir, name="sql", dry_run=True, alias="canary")
    assert len(server.asked) == 3


def test_push_points_no_alias_at_quarantined_version(server: Any, client: Client, peft_dir: Path) -> None:
    server.answer_with_push(state="quarantined")
    assert client.adapters.push(peft_dir, name="sql", alias="canary").is_quarantined
    assert len(server.asked) == 3


async def test_async_push_points_no_alias_at_quarantined_version(
    server: Any, async_client: AsyncClient, peft_dir: Path
) -> None:
    server.answer_with_push(state="quarantined")
    assert (await async_client.adapters.push(peft_dir, name="sql", alias="canary")).is_quarantined
    assert len(server.asked) == 3


def test_absent_directory_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(errors.AdapterFormatError, match=r"doesn't exist.*save_pretrained"):
        client.adapters.push(tmp_path / "nowhere", name="sql")


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("adapter_config.json", None, "no adapter_config.json; it holds adapter_model.safetensors"),
        ("adapter_model.safetensors", None, "no adapter_model.safetensors"),
        ("adapter_model.safetensors", "adapter_model.pt", "no adapter_model.safetensors"),
        ("adapter_model.safetensors", "model.safetensors", "it holds a whole model: serve it as a base"),
        ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "it holds diffusers' LoRA"),
    ],
)
def test_directory_without_adapter_is_refused_before_sending(
    server: Any, client: Client, peft_dir: Path, remove: str, add: str | None, message: str
) -> None:
    (peft_dir / remove).unlink()
    if add is not None:
        (peft_dir / add).write_bytes(b"\x80")
    with pytest.raises(errors.AdapterFormatError, match=message):
        client.adapters.push(peft_dir, name="sql")
    assert server.asked == []


def test_push_sends_older_weights_unchanged(server: Any, client: Client, peft_dir: Path) -> None:
    weights = (peft_dir / "adapter_model.safetensors").rename(peft_dir / "adapter_model.bin").read_bytes()
    server.answer_with_push()
    client.adapters.push(peft_dir, name="sql")
    assert server.asked[1].body == weights


@pytest.mark.parametrize("is_named", [False, True])
def test_gguf_file_is_sent_without_config(server: Any, client: Client, tmp_path: Path, is_named: bool) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(SIZE - 4))
    server.answer_with_push()
    client.adapters.push(tmp_path / "x.gguf" if is_named else tmp_path, name="sql")
    assert server.asked[1].body == (tmp_path / "x.gguf").read_bytes()
    assert server.asked[2].json.keys() == {"blob"}


def test_several_gguf_files_are_refused_before_sending(server: Any, client: Client, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(errors.AdapterFormatError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        client.adapters.push(tmp_path, name="sql")
    assert server.asked == []


def write_shards(directory: Path, names: tuple[str, ...]) -> str:
    index = json.dumps({"weight_map": {f"tensor.{i}": name for i, name in enumerate(names)}})
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.safetensors.index.json").write_text(index)
    return index


def test_push_joins_shards_and_sends_index(server: Any, client: Client, peft_dir: Path) -> None:
    index = write_shards(peft_dir, ("b.safetensors", "a.safetensors"))
    (peft_dir / "a.safetensors").write_bytes(b"A" * (SIZE - 100))
    (peft_dir / "b.safetensors").write_bytes(b"B" * 100)
    server.answer_with_push()
    client.adapters.push(peft_dir, name="sql")
    assert server.asked[1].body == b"A" * (SIZE - 100) + b"B" * 100
    assert server.asked[2].json["index"] == index


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.safetensors", "b.safetensors"), "no b.safetensors, which adapter_model.safetensors.index.json names"),
        (("a.safetensors", "../b.safetensors"), "names the file '../b.safetensors'"),
        (("/etc/passwd",), "names the file '/etc/passwd'"),
        ((), "weight_map"),
    ],
)
def test_shards_are_refused_by_name_before_sending(
    server: Any, client: Client, peft_dir: Path, names: tuple[str, ...], message: str
) -> None:
    write_shards(peft_dir, names)
    (peft_dir / "a.safetensors").write_bytes(b"A")
    (peft_dir.parent / "b.safetensors").write_bytes(b"B")
    with pytest.raises(errors.AdapterFormatError, match=re.escape(message)):
        client.adapters.push(peft_dir, name="sql")
    assert server.asked == []


def test_files_for_chats_are_sent_with_the_config(server: Any, client: Client, peft_dir: Path) -> None:
    template = "{{ messages }}\r\n\u00e9\u4e2d"
    (peft_dir / "chat_template.jinja").write_bytes(template.encode())
    (peft_dir / "generation_config.json").write_text('{"top_p": 0.50}\n')
    (peft_dir / "tool_parser").write_text("hermes\n")
    server.answer_with_push()
    client.adapters.push(peft_dir, name="sql", reasoning_parser="qwen3", chat_template_kwargs={"mood": "glad"})
    sent = server.asked[2].json
    assert {name: value for name, value in sent.items() if name not in ("config", "blob")} == {
        "chat_template": template,
        "generation_config": '{"top_p": 0.50}\n',
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
        "chat_template_kwargs": '{"mood": "glad"}',
    }


def test_template_without_text_is_refused_before_sending(server: Any, client: Client, peft_dir: Path) -> None:
    (peft_dir / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(errors.AdapterFormatError, match=r"chat_template.jinja isn't UTF-8: byte 1"):
        client.adapters.push(peft_dir, name="sql")
    assert not server.asked
