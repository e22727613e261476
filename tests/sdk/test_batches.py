"""Files and batches, as the server says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors

FILE = {"id": "file-1", "filename": "in.jsonl", "bytes": 3, "purpose": "batch", "created_at": 1, "expires_at": None}
BATCH = {
    "id": "batch_1",
    "status": "validating",
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "created_at": 1,
    "request_counts": {"total": 0, "completed": 0, "failed": 0},
}


def test_a_file_is_sent_as_a_form(server: Any, client: Client, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(b"{}\n")
    for file, name in ((tmp_path / "mine.jsonl", b"mine.jsonl"), (b"{}\n", b"input.jsonl")):
        server.answer(FILE)
        assert client.files.create(file).id == "file-1"
        asked = server.asked[-1]
        assert asked.headers["content-type"].startswith("multipart/form-data; boundary=")
        assert b'name="purpose"\r\n\r\nbatch\r\n' in asked.body
        assert b'name="file"; filename="' + name + b'"\r\n\r\n{}\n\r\n--' in asked.body


def test_a_batch_is_made_waited_for_and_read(server: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.sdk._sync.batches._LOOK_S", 0.01)
    server.answer(BATCH)
    batch = client.batches.create(input_file_id="file-1", endpoint="/v1/completions", metadata={"a": "b"})
    assert not batch.has_ended
    server.answer(BATCH)
    server.answer(BATCH | {"status": "completed", "output_file_id": "file-2"})
    assert client.batches.wait(batch.id).output_file_id == "file-2"
    server.answer(BATCH)
    with pytest.raises(errors.ClientTimeout):
        client.batches.wait(batch.id, timeout=0)


async def test_lists_follow_the_last_id(server: Any, async_client: AsyncClient) -> None:
    server.answer({"data": [FILE], "last_id": "file-1", "has_more": True})
    server.answer({"data": [FILE | {"id": "file-0"}], "last_id": "file-0", "has_more": False})
    assert [file.id async for file in async_client.files.list(purpose="batch")] == ["file-1", "file-0"]
    assert server.asked[1].query["after"] == "file-1"
    server.answer({"data": [BATCH], "last_id": "batch_1", "has_more": False})
    assert [batch.id async for batch in async_client.batches.list()] == ["batch_1"]


def test_creating_calls_are_not_repeated_on_broken_connection() -> None:
    from loraserve.sdk.call import Call, read_nothing

    assert Call("POST", "/v1/completions", read_nothing).is_repeatable
    assert Call("POST", "/v1/batches/batch_1/cancel", read_nothing).is_repeatable
    assert not Call("POST", "/v1/batches", read_nothing).is_repeatable
    assert not Call("POST", "/v1/files", read_nothing).is_repeatable
