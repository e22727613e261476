"""The load generator, against answers that arrive in pieces of any size."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import pytest

from benchmarks import load

TEXT = {"choices": [{"text": "a"}], "usage": None}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def answer(*events: Any, status: str = "200 OK") -> bytes:
    """Return an answer in chunks of HTTP that end in the middle of events."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    parts = [body[i : i + 23] for i in range(0, len(body), 23)]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


async def run(content: bytes, size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("Content-Length"))
        bodies.append(json.loads(await reader.readexactly(int(length))))
        for i in range(0, len(content), size):
            writer.write(content[i : i + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = argparse.Namespace(
        url=f"http://127.0.0.1:{port}",
        models="lora-{:04d}",
        adapters=2,
        concurrency=2,
        requests=5,
        prompt_tokens=4,
        output_tokens=3,
        vocab=300,
        text_tokens=None,
        seed=1,
        body={"lora": "{}"},
    )
    async with server:
        return await load.load(options), bodies


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tokens_are_counted_however_the_bytes_arrive(size: int) -> None:
    figures, bodies = asyncio.run(run(answer(TEXT, TEXT, TEXT, USAGE), size))
    assert figures["output_tokens"] == 15
    assert figures["ttft_p50_ms"] > 0
    assert sorted((body["model"], body["lora"]) for body in bodies) == [("lora-0000", 0)] * 3 + [("lora-0001", 1)] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (answer({"detail": "no such model"}, status="404 Not Found"), "no such model"),
        (answer(TEXT, {"error": {"message": "it is gone"}}), "it is gone"),
        (answer(TEXT, USAGE)[:-40], "the connection ended"),
        (answer(TEXT, {"choices": [], "usage": {"completion_tokens": 1}}), "fewer tokens"),
        (b"not HTTP at all\r\n\r\n", "can't be read"),
    ],
)
def test_incomplete_answer_ends_load_with_reason(content: bytes, words: str) -> None:
    with pytest.raises((RuntimeError, ExceptionGroup)) as raised:
        asyncio.run(run(content, 50))
    found = raised.value.exceptions if isinstance(raised.value, ExceptionGroup) else (raised.value,)
    assert any(words in str(error) for error in found)
