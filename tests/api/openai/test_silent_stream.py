"""Answers whose first token takes long: what keeps the connection in use until they come."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from loraserve.api.inference.answering.generation import Generation
from loraserve.api.services import Services
from loraserve.engine_client.client import GenerateRequest
from loraserve.errors import AdapterUnavailable
from loraserve.limits import Limits
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def limits() -> Limits:
    return Limits(silent_stream_s=0.05)


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


@pytest.mark.parametrize("limits", [Limits(silent_stream_s=60.0)])
async def test_quick_stream_has_no_comment(client: httpx2.AsyncClient) -> None:
    async with asking(client, "/v1/chat/completions") as (response, lines):
        assert not any([line.startswith(":") async for line in lines])
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert "server-timing" in response.headers


def generations() -> list[object]:
    """Generations and their requests that are in memory."""
    return [one for one in gc.get_objects() if isinstance(one, Generation | GenerateRequest)]


@asynccontextmanager
async def asking_whole(
    client: httpx2.AsyncClient, services: Services, path: str, keep_alive_s: float = 0.05
) -> AsyncIterator[tuple[httpx2.Response, AsyncIterator[bytes]]]:
    services.settings = services.settings.model_copy(update={"whole_answer_keep_alive_s": keep_alive_s})
    choices = {"n": 2} if "completions" in path else {}
    body = {"model": "sql", "unknown_field": 1, **BODIES[path], **choices}
    async with client.stream("POST", path, json=body) as response:
        yield response, response.aiter_raw()


@pytest.mark.parametrize("path", BODIES)
async def test_late_whole_answer_follows_spaces(
    path: str, client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    engine.steps = asyncio.Semaphore(0)
    async with asking_whole(client, services, path) as (response, pieces):
        assert (response.status_code, response.headers["x-loraserve-ignored"]) == (200, "unknown_field")
        assert response.headers["content-type"] == "application/json"
        assert [await anext(pieces) for _ in range(3)] == [b" "] * 3
        for _ in range(512):
            engine.steps.release()
        answer = json.loads(b"".join([piece async for piece in pieces]))
    usage = answer["usage"]
    num_tokens = usage.get("completion_tokens") or usage["output_tokens"]
    (billed,) = await UsageReports(services.usage).all(UsageQuery(group_by=()))
    assert billed.amounts.completion_tokens == num_tokens > 0


@pytest.mark.parametrize("path", BODIES)
async def test_late_failure_becomes_whole_body(
    path: str, client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    engine.steps, engine.fail_after = asyncio.Semaphore(0), 0
    engine.failure = AdapterUnavailable("It can't be read.")
    async with asking_whole(client, services, path) as (response, pieces):
        assert await anext(pieces) == b" "
        engine.steps.release()
        answer = json.loads(b"".join([piece async for piece in pieces]))
    assert response.status_code == 200
    assert "It can't be read." in answer["error"]["message"]


async def test_reader_of_late_whole_answer_may_leave(
    client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    engine.steps = asyncio.Semaphore(0)
    async with asking_whole(client, services, "/v1/chat/completions") as (_, pieces):
        assert await anext(pieces) == b" "
        assert engine.live
    async with asyncio.timeout(30):
        while engine.live:
            await asyncio.sleep(0.01)
    assert engine.num_aborted == 2


async def test_late_whole_answer_names_adapter(client: httpx2.AsyncClient, engine: Any, services: Services) -> None:
    """The first token comes in time, and the last doesn't."""
    engine.steps = asyncio.Semaphore(4)
    async with asking_whole(client, services, "/v1/chat/completions", 0.5) as (response, pieces):
        assert await anext(pieces) == b" "
    assert response.headers["x-loraserve-adapter"] == "sql@1"


@pytest.mark.parametrize("is_failing", [False, True])
async def test_ended_late_answer_leaves_no_cycle(
    is_failing: bool, client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    """An ephemeral adapter's memory is freed with the last request, not with a later collection."""
    gc.collect()
    gc.disable()
    # an earlier test's failure holds what it had
    earlier = set(map(id, generations()))
    try:
        engine.steps = asyncio.Semaphore(0)
        engine.fail_after = 0 if is_failing else None
        engine.failure = AdapterUnavailable("It can't be read.")
        async with asking_whole(client, services, "/v1/chat/completions") as (_, pieces):
            assert await anext(pieces) == b" "
            if is_failing:
                engine.steps.release()
                engine.steps.release()
                assert b"It can't be read." in b"".join([piece async for piece in pieces])
        async with asyncio.timeout(30):
            while engine.live:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.seen.clear()
        # an error that was raised has its frames
        engine.failure = AdapterUnavailable("another one")
        assert [one for one in generations() if id(one) not in earlier] == []
    finally:
        gc.enable()


async def test_quick_whole_answer_has_status_and_headers(client: httpx2.AsyncClient, services: Services) -> None:
    async with asking_whole(client, services, "/v1/chat/completions", 60.0) as (response, pieces):
        assert (await anext(pieces))[:1] == b"{"
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert int(response.headers["content-length"]) > 0
