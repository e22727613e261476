"""Streams whose tokens are written in the turn in which they come: the same bytes as any others."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import httpx2
import pytest

from loraserve.api.http.json_body import dump_text
from loraserve.api.http.sse import event, event_frame
from loraserve.api.inference.answering.direct_reader import DirectReader
from loraserve.api.inference.answering.generation import Generation
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import EngineUnavailable

COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"logprobs": 2},
    {"echo": True},
    {"stop": ["brown"]},
    {"n": 2, "seed": 5},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"return_token_ids": True},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": ["brown"]},
]


async def streamed(client: httpx2.AsyncClient, path: str, **fields: Any) -> list[Any]:
    """Return the events of a stream, without what differs between two."""
    lines = (await client.post(path, json={"model": "sql", "stream": True, "seed": 7, **fields})).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return [{name: value for name, value in each.items() if name not in ("id", "created")} for each in events]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "x", **fields}) for fields in COMPLETIONS]
    + [("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}) for fields in CHATS],
)
async def test_stream_events_are_identical_with_direct_delivery(
    client: httpx2.AsyncClient, engine: Any, path: str, fields: dict[str, Any], monkeypatch: Any
) -> None:
    given = await streamed(client, path, **fields)
    # several choices share a connection
    assert (engine.num_taken > 5) == ("n" not in fields)
    monkeypatch.setattr("loraserve.api.inference.answering.direct_reader.DirectReader.connect", lambda *_: None)
    others = await streamed(client, path, **fields)
    assert sorted(map(json.dumps, given)) == sorted(map(json.dumps, others))
    assert given == others or "n" in fields


async def test_error_midway_follows_text_written_directly(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 8, EngineUnavailable("It is gone.")
    answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "x", "stream": True})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert "It is gone." in json.loads(lines[-2][6:])["error"]["message"]
    assert lines[-1] == "data: [DONE]"


async def test_disconnect_ends_directly_written_stream(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script, engine.step_s = "word " * 40, 0.005
    async with client.stream("POST", "/v1/completions", json={"model": "sql", "prompt": "x", "stream": True}) as answer:
        await anext(answer.aiter_bytes())
    async with asyncio.timeout(5):
        while engine.live:
            await asyncio.sleep(0.01)
    assert engine.num_aborted == 1


@pytest.mark.parametrize("text", ["", " word", 'a "b"\n\u2028', "é\U0001f600", "\x00\x7f", "\ufffd"])
def test_event_frame_makes_same_bytes_as_event(text: str) -> None:
    def payload(text: str) -> dict[str, Any]:
        return {"model": 'a"b %s 100%', "choices": ({"text": text, "n": None},)}

    assert event_frame(payload) % dump_text(text) == event(payload(text))


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20}),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {"messages": MESSAGES}),
    ],
)
async def test_ended_stream_leaves_no_cycle_holding_adapter(
    client: httpx2.AsyncClient, engine: Any, path: str, fields: dict[str, Any]
) -> None:
    """An ephemeral adapter's memory is freed with the last request, not with a later collection."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            async with client.stream("POST", path, json={"model": "sql", "stream": True, **fields}) as answer:
                assert answer.status_code == 200
                async for _line in answer.aiter_lines():
                    pass
            await asyncio.sleep(0.05)
        engine.seen.clear()
        held = [one for one in gc.get_objects() if isinstance(one, Generation | GenerateRequest | DirectReader)]
        assert held == []
    finally:
        gc.enable()
