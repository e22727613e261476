"""A version's files brought here: checked, and whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse

from loraserve import AsyncClient, Client, errors
from loraserve.sdk import Progress

CONFIG, WEIGHTS = b'{"peft_type": "LORA"}', bytes(range(256)) * 4096


def answer_with_file(server: Any, content: bytes, *, digest: str | None = None) -> None:
    etag = f'"{digest or hashlib.sha256(content).hexdigest()}"'
    server.answers.append(Response(content, headers={"etag": etag}))


def answer_with_half(server: Any, content: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield content[: len(content) // 2]
        raise ConnectionResetError("the test cuts the connection")

    headers = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "content-length": str(len(content))}
    server.answers.append(lambda: StreamingResponse(body(), headers=headers))


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


WHOLE = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}


def test_pull_brings_the_live_version_whole(server: Any, client: Client, tmp_path: Path) -> None:
    server.answer_with_alias(version=3)
    server.answer_with_version(version=3, size_bytes=len(CONFIG) + len(WEIGHTS))
    answer_with_file(server, WEIGHTS)
    answer_with_file(server, CONFIG)
    seen: list[Progress] = []
    version = client.adapters.pull("sql", tmp_path / "new", on_progress=seen.append)
    assert version.version == 3
    assert files_in(tmp_path / "new") == WHOLE
    assert server.asked[2].path == "/api/v1/adapters/sql/versions/3/files/adapter_model.safetensors"
    assert seen[-1].sent_bytes == seen[-1].total_bytes == len(CONFIG) + len(WEIGHTS)


async def test_async_pull_fetches_named_version(server: Any, async_client: AsyncClient, tmp_path: Path) -> None:
    server.answer_with_version(version=2)
    answer_with_file(server, WEIGHTS)
    answer_with_file(server, CONFIG)
    await async_client.adapters.pull("sql", tmp_path, version=2)
    assert files_in(tmp_path) == WHOLE


def test_broken_connection_is_begun_again(server: Any, client: Client, waits: list[float], tmp_path: Path) -> None:
    server.answer_with_version()
    answer_with_half(server, WEIGHTS)
    answer_with_file(server, WEIGHTS)
    answer_with_file(server, CONFIG)
    client.adapters.pull("sql", tmp_path, version=1)
    assert files_in(tmp_path) == WHOLE
    assert len(waits) == 1


def test_bytes_with_wrong_digest_are_never_written(server: Any, client: Client, tmp_path: Path) -> None:
    server.answer_with_version()
    for _ in range(3):
        answer_with_file(server, WEIGHTS, digest="0" * 64)
    with pytest.raises(errors.AdapterCorrupt, match="digest differs"):
        client.adapters.pull("sql", tmp_path, version=1)
    assert files_in(tmp_path) == {}


def test_existing_files_are_replaced_only_on_request(server: Any, client: Client, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"mine")
    server.answer_with_version()
    with pytest.raises(errors.AlreadyExists, match=r"holds adapter_config\.json already"):
        client.adapters.pull("sql", tmp_path, version=1)
    assert files_in(tmp_path) == {"adapter_config.json": b"mine"}
    server.answer_with_version()
    answer_with_file(server, WEIGHTS)
    answer_with_file(server, CONFIG)
    client.adapters.pull("sql", tmp_path, version=1, overwrite=True)
    assert files_in(tmp_path) == WHOLE


def test_refusal_leaves_no_files(server: Any, client: Client, tmp_path: Path) -> None:
    server.answer_with_version()
    answer_with_file(server, WEIGHTS)
    server.refuse(404, "version_not_found")
    with pytest.raises(errors.VersionNotFound):
        client.adapters.pull("sql", tmp_path, version=1)
    assert files_in(tmp_path) == {}


def test_chat_files_are_pulled_and_stale_namesakes_removed(server: Any, client: Client, tmp_path: Path) -> None:
    template = b"{{ messages }}\r\n"
    files = [{"name": name, "size_bytes": 1, "sha256": ""} for name in ("chat_template.jinja", "../evil")]
    server.answer_with_version(version=2, extra_files=files, tool_parser="hermes", chat_template_kwargs={"mood": 1})
    for content in (template, WEIGHTS, CONFIG):
        answer_with_file(server, content)
    (tmp_path / "generation_config.json").write_text("{}")
    client.adapters.pull("sql", tmp_path, version=2, overwrite=True)
    assert files_in(tmp_path) == WHOLE | {
        "chat_template.jinja": template,
        "tool_parser": b"hermes",
        "chat_template_kwargs.json": b'{"mood": 1}',
    }
    server.answer_with_version(version=2)
    with pytest.raises(errors.AlreadyExists, match=r"chat_template\.jinja"):
        client.adapters.pull("sql", tmp_path, version=2)
