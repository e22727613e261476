"""Streams whose first token takes long: comments keep the connection in use until it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from loraserve.errors import AdapterUnavailable
from loraserve.limits import Limits

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.parametrize("limits", [Limits(silent_stream_s=0.05)])]

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
}


@asynccontextmanager
async def asking(client: httpx2.AsyncClient, path: str) -> AsyncIterator[tuple[httpx2.Response, AsyncIterator[str]]]:
    body = {"model": "sql", "stream": True, "unknown_field": 1, **BODIES[path]}
    async with client.stream("POST", path, json=body) as response:
        yield response, response.aiter_lines()


async def skip_comments(lines: AsyncIterator[str], count: int) -> None:
    for _ in range(count):
        assert (await anext(lines)).startswith(":")
        assert await anext(lines) == ""


@pytest.mark.parametrize("path", BODIES)
async def test_silent_stream_begins_with_comments(path: str, client: httpx2.AsyncClient, engine: Any) -> None:
    engine.steps = asyncio.Semaphore(0)
    async with asking(client, path) as (response, lines):
        assert (response.status_code, response.headers["x-loraserve-ignored"]) == (200, "unknown_field")
        await skip_comments(lines, 3)
        for _ in range(256):
            engine.steps.release()
        text = [line async for line in lines]
    assert any("data: " in line for line in text)
    assert not any(line.startswith(":") for line in text)


@pytest.mark.parametrize("path", BODIES)
async def test_late_failure_ends_stream_with_error(path: str, client: httpx2.AsyncClient, engine: Any) -> None:
    engine.steps, engine.fail_after = asyncio.Semaphore(0), 0
    engine.failure = AdapterUnavailable("It can't be read.")
    async with asking(client, path) as (response, lines):
        await skip_comments(lines, 2)
        engine.steps.release()
        text = "\n".join([line async for line in lines])
    assert response.status_code == 200
    assert "It can't be read." in text


async def test_reader_of_silent_stream_may_leave(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.steps = asyncio.Semaphore(0)
    async with asking(client, "/v1/chat/completions") as (_, lines):
        await skip_comments(lines, 1)
        assert engine.live
    async with asyncio.timeout(30):
        while engine.live:
            await asyncio.sleep(0.01)
    assert engine.num_aborted == 1


async def test_quick_stream_has_no_comment(client: httpx2.AsyncClient) -> None:
    async with asking(client, "/v1/chat/completions") as (response, lines):
        assert not any([line.startswith(":") async for line in lines])
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert "server-timing" in response.headers
