"""One line a request in the access log: names, numbers and codes, and nothing that a client wrote
as text.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest
import structlog

from loraserve.api.app import create_app
from loraserve.api.logs import configure_logging
from loraserve.api.services import Services
from loraserve.settings import Settings

from .conftest import FakeEngine, Tenant

SECRET = "the secret prompt"
BODY = {"model": "sql", "prompt": SECRET, "max_tokens": 8}


Lines = Callable[[int], Awaitable[list[dict[str, Any]]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """So many requests' lines, as the server's own logging writes them."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    written = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", written)
        configure_logging("info")

    async def read(num: int) -> list[dict[str, Any]]:
        # a request's line comes after its answer
        for _ in range(200):
            every = [json.loads(line) for line in written.getvalue().splitlines()]
            found = [line for line in every if line["logger"] == "loraserve.access"]
            if len(found) >= num > 0:
                break
            await asyncio.sleep(0.01 if num else 0.0)
        assert len(found) == num
        return found

    yield read
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def test_log_line_has_model_tenant_tokens_and_times(client: httpx2.AsyncClient, lines: Lines) -> None:
    response = await client.post("/v1/completions", json=BODY)
    [line] = await lines(1)
    assert line["request_id"] == response.headers["x-request-id"]
    assert 0 < line.pop("ttft_ms") <= line.pop("duration_ms")
    for name in ("request_id", "key_id", "timestamp"):
        assert line.pop(name)
    usage = response.json()["usage"]
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "loraserve.access",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "tenant": "acme",
        "model": "sql",
        "version": 1,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": 8,
        "finish_reason": "length",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/responses", {"model": "sql", "input": SECRET, "store": False}),
        ("/v1/messages", {"model": "sql", "max_tokens": 8, "messages": [{"role": "user", "content": SECRET}]}),
        ("/generate", {"inputs": SECRET, "parameters": {"adapter_id": "sql", "max_new_tokens": 8}}),
        ("/api/chat", {"model": "sql", "messages": [{"role": "user", "content": SECRET}], "stream": False}),
        ("/api/generate", {"model": "sql", "prompt": SECRET, "raw": True, "stream": False}),
        ("/v1/embeddings", {"model": "sql", "input": SECRET}),
        ("/v1/score", {"model": "sql", "text_1": SECRET, "text_2": "b"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_way_to_ask_has_the_same_line(
    client: httpx2.AsyncClient,
    lines: Lines,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    if stream and path in ("/v1/embeddings", "/v1/score"):
        return
    response = await client.post(path, json=body | ({"stream": True} if stream else {}))
    assert response.status_code == 200, response.text
    [line] = await lines(1)
    assert (line["model"], line["version"], line["tenant"], line["status"]) == ("sql", 1, "acme", 200)
    assert line["prompt_tokens"] > 0
    assert line["ttft_ms"] > 0
    assert line["finish_reason"] in ("stop", "length", "stop,length")
    assert SECRET not in json.dumps(line)
    assert "quick brown" not in json.dumps(line)


async def test_base_and_adapter_sum_are_logged_by_name(client: httpx2.AsyncClient, publish: Any, lines: Lines) -> None:
    await publish("pirate", 1)
    for model in ("org/base:1", "sql+0.5*pirate"):
        assert (await client.post("/v1/completions", json=BODY | {"model": model})).status_code == 200
    base, added = await lines(2)
    assert (base["model"], "version" in base) == ("org/base:1", False)
    assert sorted(added["model"].split("+")) == ["0.5*pirate@1", "sql@1"]
    assert "version" not in added


async def test_several_choices_are_logged_in_single_line(client: httpx2.AsyncClient, lines: Lines) -> None:
    await client.post("/v1/completions", json=BODY | {"n": 3})
    [line] = await lines(1)
    assert (line["completion_tokens"], line["finish_reason"]) == (24, "length")


async def test_name_with_line_breaks_stays_on_single_line(client: httpx2.AsyncClient, lines: Lines) -> None:
    hostile = 'x"\n{"event": "request", "status": 200, "logger": "loraserve.access"}\r\n\x1b[31m\u2028' + "y" * 500
    response = await client.post("/v1/completions", json=BODY | {"model": hostile})
    assert response.status_code in (400, 404)
    await client.post("/v1/completions%0A%1B%5B31m", json=BODY)
    named, missed = await lines(2)
    assert named["model"].startswith("x%22%0A%7B%22event%22")
    assert len(named["model"]) < 700
    assert named["code"] in ("model_not_found", "invalid_request", "invalid_value")
    assert missed["path"] == "/v1/completions%0A%1B%5B31m"
    for text in (named["model"], missed["path"]):
        assert text.isprintable()
        assert text.isascii()


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "absent"}, 404, "model_not_found"),
        ({"temperature": "hot"}, 400, "invalid_value"),
        ({"prompt": "x" * 400}, 400, "context_length_exceeded"),
    ],
)
async def test_refusal_is_logged_with_code_and_requested_model(
    client: httpx2.AsyncClient,
    lines: Lines,
    change: dict[str, Any],
    status: int,
    code: str,
) -> None:
    await client.post("/v1/completions", json=BODY | change)
    [line] = await lines(1)
    assert (line["status"], line["code"], line["model"]) == (status, code, change.get("model", "sql"))
    assert "prompt_tokens" not in line
    assert "finish_reason" not in line


async def test_wrong_key_never_appears_in_log_line(client: httpx2.AsyncClient, acme: Tenant, lines: Lines) -> None:
    await client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer sk-lora-wrong"})
    [line] = await lines(1)
    assert (line["status"], line["code"], line["tenant"], line["key_id"]) == (401, "invalid_api_key", None, None)
    assert "sk-lora" not in json.dumps(line)
    await client.post("/v1/completions", json=BODY)
    assert acme.key not in json.dumps(await lines(2))


async def test_answer_failing_midway_logs_error_and_tokens(
    client: httpx2.AsyncClient, engine: FakeEngine, lines: Lines
) -> None:
    engine.fail_after = 3
    await client.post("/v1/completions", json=BODY | {"stream": True})
    [line] = await lines(1)
    assert (line["status"], line["code"], line["finish_reason"]) == (200, "overloaded", "overloaded")
    assert line["completion_tokens"] == 3


async def test_aborted_request_is_logged_with_generated_tokens(
    client: httpx2.AsyncClient, engine: FakeEngine, lines: Lines
) -> None:
    engine.step_s = 0.02
    async with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 50, "stream": True}) as answer:
        async for _ in answer.aiter_lines():
            break
    [line] = await lines(1)
    assert line["finish_reason"] == "abort"
    assert line["completion_tokens"] >= 1


async def test_without_an_access_log_there_is_no_line(services: Services, lines: Lines, acme: Tenant) -> None:
    services.settings = Settings(model=services.settings.model, data_dir=services.settings.data_dir, access_log=False)
    transport = httpx2.ASGITransport(create_app(services))
    async with httpx2.AsyncClient(transport=transport, base_url="http://loraserve", headers=acme.headers) as client:
        assert (await client.get("/v1/models")).status_code == 200
    assert await lines(0) == []
