"""Who leaves is forgotten: streams, waiting requests, stalled readers, half-sent requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from core_clock import scheduled_s

from loraserve.api.http import connection, guard
from loraserve.limits import Limits


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        await asyncio.sleep(0.002)


def request_bytes(url: str, key: str, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(url).port)


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"n": 4, "stream": True}, {"n": 4}])
async def test_disconnecting_client_frees_requests(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any, body: dict[str, Any]
) -> None:
    engine.step_s, engine.script = 0.01, "word " * 40
    _, writer = await connect(url)
    writer.write(request_bytes(url, acme.key, {"model": "sql", "prompt": "x", "max_tokens": 200, **body}))
    await until(lambda: len(engine.live) == body.get("n", 1))
    await asyncio.sleep(0.05)
    left = scheduled_s()
    writer.close()
    await until(lambda: not engine.live)
    assert scheduled_s() - left < 0.5
    assert engine.num_aborted == body.get("n", 1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_disconnect_frees_chat_in_alternative_api_form(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any, path: str, fields: dict[str, Any], is_stream: bool
) -> None:
    engine.step_s, engine.script = 0.01, "word " * 40
    _, writer = await connect(url)
    writer.write(request_bytes(url, acme.key, {"model": "sql", "stream": is_stream, **fields}, path))
    await until(lambda: len(engine.live) == 1)
    await asyncio.sleep(0.05)
    writer.close()
    await until(lambda: not engine.live)
    assert engine.num_aborted == 1


async def test_disconnect_before_first_token_frees_slot(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any
) -> None:
    engine.step_s = 60
    for is_stream in (False, True):
        _, writer = await connect(url)
        writer.write(request_bytes(url, acme.key, {"model": "sql", "prompt": "x", "stream": is_stream}))
        await until(lambda: len(engine.live) == 1)
        writer.close()
        await until(lambda: not engine.live)


async def test_disconnect_does_not_disturb_other_requests(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any
) -> None:
    engine.step_s = 0.005
    others = [
        asyncio.create_task(
            client.post("/v1/completions", json={"model": "sql", "prompt": "x", "max_tokens": 40, "seed": 1})
        )
        for _ in range(5)
    ]
    _, writer = await connect(url)
    writer.write(request_bytes(url, acme.key, {"model": "sql", "prompt": "x", "max_tokens": 40, "stream": True}))
    await until(lambda: len(engine.live) == 6)
    writer.close()
    texts = {(await other).json()["choices"][0]["text"] for other in others}
    assert texts == {"sql says 1: the quick brown fox jumps ov"}


async def test_stalled_reader_is_dropped(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.3))
    engine.script = "word " * 45
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", urlsplit(url).port))
    # nobody ever reads from it
    body = {"model": "sql", "prompt": "x" * 20, "n": 16, "stream": True, "max_tokens": 200, "logprobs": 20}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    sock.sendall(request_bytes(url, acme.key, body))
    await until(lambda: len(engine.live) > 0)
    await until(lambda: not engine.live, timeout_s=10)
    assert engine.num_aborted > 0
    sock.close()


@pytest.mark.parametrize("limits", [Limits(stalled_reader_s=0.2)])
async def test_stalled_body_is_answered_and_closed(url: str, acme: Any, limits: Limits) -> None:
    reader, writer = await connect(url)
    data = request_bytes(url, acme.key, {"model": "sql", "prompt": "x"})
    writer.write(data[:-5])
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer
    writer.close()


@pytest.mark.parametrize("limits", [Limits(stalled_reader_s=0.5)])
async def test_trickling_body_holds_no_slot(url: str, acme: Any, limits: Limits) -> None:
    loop = asyncio.get_running_loop()
    data = request_bytes(url, acme.key, {"model": "sql", "prompt": "x" * 60})
    # a plain socket: asyncio's streams forget what has arrived when a write fails
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, data[:-60])
        answer = asyncio.create_task(loop.sock_recv(client, 4096))
        with contextlib.suppress(ConnectionError):
            for position in range(len(data) - 60, len(data)):
                # never silent for long enough, and never done
                await asyncio.sleep(0.1)
                if answer.done():
                    break
                await loop.sock_sendall(client, data[position : position + 1])
        assert (await asyncio.wait_for(answer, 60)).startswith(b"HTTP/1.1 408")


# 4 KiB in ten seconds are more than the least pace, 50 seconds more than the time without any
@pytest.mark.parametrize("limits", [Limits(stalled_reader_s=30, min_body_bytes_per_s=350)])
async def test_slow_body_above_least_pace_is_read(
    client: httpx2.AsyncClient, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    clock = time.monotonic
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock() + ahead_s))

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal ahead_s
        yield b'{"model": "sql", "prompt": "x", "user": "'
        for _ in range(5):
            # the server waits for the next piece by then
            await asyncio.sleep(0.1)
            ahead_s += 10
            yield b"x" * 4096
        yield b'"}'

    response = await client.post("/v1/completions", content=pieces())
    assert response.status_code == 200


async def test_stalled_head_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.2))
    for start in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: "):
        reader, writer = await connect(url)
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_head_without_end_is_cut(url: str) -> None:
    reader, writer = await connect(url)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nA: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            writer.write(b"a" * 10_000)
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(0.001)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    writer.close()


@pytest.mark.parametrize(
    "headers", [{f"x-{i}": "1" for i in range(101)}, {"x-long": "y" * (17 << 10)}], ids=["too many", "too long"]
)
async def test_oversized_headers_are_refused(client: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.get("/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


async def test_oversized_declared_length_is_refused_before_reading_body(url: str, acme: Any) -> None:
    reader, writer = await connect(url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {acme.key}\r\n"
        "Content-Length: 99999999\r\n\r\n"
    )
    writer.write(head.encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_body_without_a_length_is_bounded_too(client: httpx2.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(300):
            yield b"x" * 10_000

    response = await client.post("/v1/completions", content=endless())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("limits", [Limits(max_live_requests=4)])
async def test_requests_beyond_capacity_are_refused_at_once(
    client: httpx2.AsyncClient, engine: Any, limits: Limits
) -> None:
    engine.step_s = 60
    body = {"model": "sql", "prompt": "x"}
    running = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
    await until(lambda: len(engine.live) == 2)
    refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (await client.get("/livez")).status_code == 200
    for task in running:
        task.cancel()
    await until(lambda: not engine.live)
    engine.step_s = 0
    assert (await client.post("/v1/completions", json=body)).status_code == 200
