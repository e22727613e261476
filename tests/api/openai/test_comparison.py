"""Requests that are answered side by side in one stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.errors import AdapterNumerics
from loraserve.limits import LIMITS

from .test_disconnect import connect, request_bytes, until

PATH = "/api/v1/compare"
BODY = {"prompt": "x", "max_tokens": 6, "temperature": 0}


def compared(*models: str, **how: Any) -> dict[str, Any]:
    return {"endpoint": "/v1/completions", "requests": [{"model": model, **BODY, **how} for model in models]}


def events_of(text: str) -> list[dict[str, Any]]:
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    found = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [event["type"] for event in found] == [name.removeprefix("event: ") for name, _ in frames]
    return found


def of_index(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [event for event in events if event.get("index") == index]


async def test_each_compared_answer_matches_separate_request(client: httpx2.AsyncClient, engine: Any) -> None:
    base = engine.base.id
    answer = await client.post(PATH, json=compared("sql", base, "nothing"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert events[-1] == {"type": "end"}
    for index, model in enumerate(("sql", base)):
        own = of_index(events, index)
        alone = (await client.post("/v1/completions", json={"model": model, **BODY, "seed": 1})).json()
        text = "".join(
            choice["text"] for event in own if event["type"] == "chunk" for choice in event["chunk"]["choices"]
        )
        assert text.split(" says ")[0] == alone["choices"][0]["text"].split(" says ")[0]
        assert (own[0]["type"], own[0]["status"], own[-1]["type"]) == ("start", 200, "done")
        assert own[0]["headers"]["server-timing"].startswith("queue;dur=")
        usage = [event["chunk"]["usage"] for event in own if event["type"] == "chunk" and event["chunk"].get("usage")]
        assert usage[-1]["completion_tokens"] == 6
    assert of_index(events, 0)[0]["headers"]["x-loraserve-adapter"] == "sql@1"
    absent = of_index(events, 2)
    assert [event["type"] for event in absent] == ["start", "error", "done"]
    assert (absent[1]["status"], absent[1]["error"]["code"]) == (404, "model_not_found")


async def test_all_are_in_the_engine_at_once(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.step_s = 0.02
    asking = asyncio.create_task(client.post(PATH, json=compared(*["sql"] * LIMITS.max_compared_requests)))
    await until(lambda: len(engine.live) == LIMITS.max_compared_requests)
    assert (await asking).status_code == 200


async def test_compared_answers_are_billed_like_separate_requests(
    client: httpx2.AsyncClient, services: Services
) -> None:
    meter = services.usage
    assert meter is not None
    await client.post(PATH, json=compared("sql", "sql", "nothing"))
    await until(lambda: meter.recorded.completion_tokens == 12)
    await client.post("/v1/completions", json={"model": "sql", **BODY})
    await until(lambda: meter.recorded.completion_tokens == 18)
    assert meter.recorded.prompt_tokens % 3 == 0
    assert meter.recorded.undelivered_tokens == 0


async def test_a_chat_is_compared_too(client: httpx2.AsyncClient) -> None:
    body = {"model": "sql", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = await client.post(PATH, json={"endpoint": "/v1/chat/completions", "requests": [body]})
    chunks = [event["chunk"] for event in events_of(answer.text) if event["type"] == "chunk"]
    assert "".join(choice["delta"].get("content") or "" for one in chunks for choice in one["choices"])


async def test_error_midway_ends_only_failing_answer(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 2, AdapterNumerics("Not finite.")
    events = events_of((await client.post(PATH, json=compared("sql"))).text)
    assert [event["type"] for event in of_index(events, 0)] == ["start", "chunk", "chunk", "error", "done"]
    assert of_index(events, 0)[-2]["error"]["code"] == "adapter_numerics"


async def test_disconnect_ends_all_compared_answers(
    client: httpx2.AsyncClient, url: str, acme: Any, engine: Any
) -> None:
    engine.step_s, engine.script = 0.01, "word " * 40
    _, writer = await connect(url)
    writer.write(request_bytes(url, acme.key, compared("sql", "sql", "sql", max_tokens=200), PATH))
    await until(lambda: len(engine.live) == 3)
    await asyncio.sleep(0.05)
    writer.close()
    await until(lambda: not engine.live)
    assert engine.num_aborted == 3


async def test_foreign_adapter_reads_like_absent_adapter(
    client: httpx2.AsyncClient, url: str, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    other = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=other.headers | {"x-request-id": "one"}) as stranger:
        theirs = (await stranger.post(PATH, json=compared("sql"))).text
        absent = (await stranger.post(PATH, json=compared("xyz"))).text
    assert theirs.replace("sql", "xyz") == absent
    assert "model_not_found" in theirs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "endpoint"),
        (compared("sql") | {"endpoint": "/api/v1/tenants"}, "endpoint"),
        (compared("sql") | {"endpoint": 7}, "endpoint"),
        (compared("sql") | {"requests": []}, "requests"),
        (compared("sql") | {"requests": "sql"}, "requests"),
        (compared("sql") | {"requests": ["sql"]}, "requests.0"),
        (compared(*["sql"] * (LIMITS.max_compared_requests + 1)), "requests"),
        (compared("sql", stream=True), "requests.0.stream"),
        (compared("sql", stream_options={}), "requests.0.stream_options"),
    ],
)
async def test_a_wrong_field_is_named(client: httpx2.AsyncClient, engine: Any, body: Any, param: str) -> None:
    answer = await client.post(PATH, json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, param)
    assert not engine.seen


async def test_an_unknown_field_is_refused(client: httpx2.AsyncClient) -> None:
    answer = await client.post(PATH, json=compared("sql") | {"models": ["sql"]})
    assert answer.status_code == 400
    assert "Known fields: endpoint, requests" in answer.json()["detail"]


async def test_invalid_model_request_is_reported_at_own_index(client: httpx2.AsyncClient) -> None:
    events = events_of((await client.post(PATH, json=compared("sql", temperature=-1))).text)
    assert (events[1]["type"], events[1]["status"], events[1]["error"]["param"]) == ("error", 400, "temperature")
