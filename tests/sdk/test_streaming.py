from __future__ import annotations

import json
from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors


def event(text: str, **fields: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None}
    chunk = {"id": "cmpl-1", "created": 1, "model": "sql", "choices": [choice], **fields}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def texts(client: Client) -> list[str]:
    with client.completions.create(model="sql", prompt="x", stream=True) as stream:
        return [chunk.choices[0].text for chunk in stream if chunk.choices]


def test_chunks_come_in_order_and_name_answering_version(server: Any, client: Client) -> None:
    server.answer_with_stream(event("a"), event("b"), DONE)
    stream = client.completions.create(model="sql", prompt="x", stream=True)
    assert (stream.answer.request_id, stream.answer.adapter) == ("req-9", "sql@1")
    assert [chunk.choices[0].text for chunk in stream] == ["a", "b"]
    assert server.asked[0].json["stream"] is True


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_packets_may_break_anywhere(server: Any, client: Client, size: int) -> None:
    body = event("né") + b": ping\r\n\r\n" + event("e 👩‍👧").replace(b"\n", b"\r\n") + DONE
    server.answer_with_stream(*(body[start : start + size] for start in range(0, len(body), size)))
    assert texts(client) == ["né", "e 👩‍👧"]


def test_usage_comes_in_a_chunk_without_choices(server: Any, client: Client) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    server.answer_with_stream(event("a", usage=None), event("", choices=[], usage=usage), DONE)
    *_, last = client.completions.create(model="sql", prompt="x", stream=True)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 3


def test_error_after_first_byte_is_raised_next(server: Any, client: Client) -> None:
    error = {"error": {"message": "The engine died twice.", "type": "server_error", "code": "engine_crashed"}}
    server.answer_with_stream(event("a"), f"data: {json.dumps(error)}\n\n".encode(), DONE)
    stream = client.completions.create(model="sql", prompt="x", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(errors.EngineCrashed, match="died twice") as caught:
        next(stream)
    assert caught.value.request_id == "req-9"
    assert len(server.asked) == 1


def test_text_about_errors_is_plain_text(server: Any, client: Client) -> None:
    server.answer_with_stream(event('{"error": 1}', error=None), DONE)
    assert texts(client) == ['{"error": 1}']


@pytest.mark.parametrize("breaks", [True, False])
def test_truncated_stream_is_error_and_not_retried(server: Any, client: Client, breaks: bool) -> None:
    server.answer_with_stream(event("a"), breaks=breaks)
    stream = client.completions.create(model="sql", prompt="x", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(errors.ConnectionFailed):
        next(stream)
    assert len(server.asked) == 1


def test_refusal_before_the_first_byte_is_retried(server: Any, client: Client, waits: list[float]) -> None:
    server.refuse(503, "overloaded", retry_after_ms="5")
    server.answer_with_stream(event("a"), DONE)
    assert texts(client) == ["a"]
    assert waits == [0.005]


def test_refusal_of_stream_raises_error(server: Any, client: Client) -> None:
    server.refuse(404, "model_not_found", "There is no model sql.")
    with pytest.raises(errors.ModelNotFound, match="no model sql"):
        client.completions.create(model="sql", prompt="x", stream=True)


def test_answer_without_stream_is_reported(server: Any, client: Client) -> None:
    server.answer_with_stream(b"<html>", content_type="text/html")
    with pytest.raises(errors.UnexpectedAnswer, match="text/html"):
        texts(client)


def test_leaving_the_block_hangs_up(server: Any, client: Client) -> None:
    server.answer_with_stream(*(event(str(number)) for number in range(100)), DONE)
    with client.completions.create(model="sql", prompt="x", stream=True) as stream:
        next(stream)
    assert stream._response.is_closed


async def test_async_stream_reads_the_same(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_stream(*(event("é")[start : start + 3] for start in range(0, 200, 3)), event("b"), DONE)
    async with await async_client.completions.create(model="sql", prompt="x", stream=True) as stream:
        assert [chunk.choices[0].text async for chunk in stream] == ["é", "b"]
    assert stream._response.is_closed


async def test_async_stream_raises_error_sent_in_band(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_stream(event("a"), b'data: {"error": {"message": "gone", "code": "overloaded"}}\n\n', DONE)
    stream = await async_client.completions.create(model="sql", prompt="x", stream=True)
    assert (await anext(stream)).choices[0].text == "a"
    with pytest.raises(errors.Overloaded, match="gone"):
        await anext(stream)


async def test_truncated_async_stream_is_error(server: Any, async_client: AsyncClient) -> None:
    server.answer_with_stream(event("a"), breaks=True)
    stream = await async_client.completions.create(model="sql", prompt="x", stream=True)
    with pytest.raises(errors.ConnectionFailed):
        _ = [chunk async for chunk in stream]
    assert len(server.asked) == 1


def test_chat_chunks_have_deltas(server: Any, client: Client) -> None:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    chunk = {"id": "c", "created": 1, "model": "sql", "choices": [choice]}
    server.answer_with_stream(f"data: {json.dumps(chunk)}\n\n".encode(), DONE)
    chunks = list(client.chat.completions.create(model="sql", messages=[], stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
