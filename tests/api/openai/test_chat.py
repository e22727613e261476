from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services

pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = [{"role": "user", "content": "hello"}]


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def chat(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": "sql", "messages": HELLO, **body})


async def test_a_chat_has_openai_shape(client: httpx2.AsyncClient) -> None:
    body = (await chat(client, seed=2, max_completion_tokens=10)).json()
    assert (body["object"], body["model"]) == ("chat.completion", "sql")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "sql says 2", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    # vLLM's, which its clients read whether or not they were requested
    assert body["prompt_logprobs"] is body["prompt_token_ids"] is None
    assert body["usage"]["completion_tokens"] == 10


async def test_chat_names_base_and_arithmetic(client: httpx2.AsyncClient, services: Services) -> None:
    fingerprint = f"fp_{services.engine.base.digest[:8]}_fp32"
    assert (await chat(client)).json()["system_fingerprint"] == fingerprint
    for fields in ({}, {"logprobs": True}, {"stream_options": {"include_usage": True}}):
        chunks = events_of(await chat(client, max_tokens=3, stream=True, **fields))
        assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


async def test_the_prompt_is_the_templates(client: httpx2.AsyncClient, engine: Any) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c", "name": "ann"},
    ]
    assert (await chat(client, messages=messages)).status_code == 200
    prompt = engine.tokenizer.decode(engine.seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|system|>be brief\n<|user|>a\nb\n<|assistant|>\n<|user|>c\n<|assistant|>"


async def test_custom_role_reaches_template(client: httpx2.AsyncClient, engine: Any) -> None:
    user = {"role": "user", "content": "a"}
    answer = await chat(client, messages=[user, {"role": "critic-2", "content": [{"type": "text", "text": "no"}]}])
    assert answer.status_code == 200
    prompt = engine.tokenizer.decode(engine.seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|user|>a\n<|critic-2|>no\n<|assistant|>"
    for role in ("a b", "<|user|>", "x" * 65, "", "function", "User"):
        assert (await chat(client, messages=[user, {"role": role, "content": "no"}])).status_code == 400


async def test_a_chat_may_fill_the_context(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client)
    request = engine.seen[0]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)


async def test_max_tokens_is_the_old_name(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client, max_tokens=3)
    await chat(client, max_tokens=3, max_completion_tokens=5)
    assert [request.params.max_tokens for request in engine.seen] == [3, 5]


async def test_stream_opens_with_role_and_ends_with_reason(client: httpx2.AsyncClient) -> None:
    options = {"include_usage": True}
    *chunks, last = events_of(await chat(client, seed=2, stream=True, max_tokens=8, stream_options=options))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "sql says"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8


async def test_choices_of_a_stream_each_open_and_end(client: httpx2.AsyncClient) -> None:
    chunks = events_of(await chat(client, n=3, stream=True, max_tokens=4))
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == "length"


async def test_logprobs_are_objects_with_bytes(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "é"
    logprobs = (await chat(client, logprobs=True, top_logprobs=1, max_tokens=2)).json()["choices"][0]["logprobs"]
    assert [entry["bytes"] for entry in logprobs["content"]] == [[0xC3], [0xA9]]
    assert [len(entry["top_logprobs"]) for entry in logprobs["content"]] == [1, 1]
    assert set(logprobs["content"][0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    chunks = events_of(await chat(client, logprobs=True, top_logprobs=1, max_tokens=2, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == logprobs["content"]


async def test_token_ids_are_returned_when_asked(client: httpx2.AsyncClient, engine: Any) -> None:
    body = (await chat(client, return_token_ids=True, max_tokens=3)).json()
    assert body["choices"][0]["token_ids"] == engine.tokenizer.encode("sql")
    assert body["prompt_token_ids"] == list(engine.seen[0].prompt_token_ids)


async def test_the_templates_refusal_is_a_bad_request(client: httpx2.AsyncClient) -> None:
    response = await chat(client, messages=[{"role": "assistant", "content": "x"}])
    assert response.status_code == 400
    assert "can't begin" in response.json()["error"]["message"]


async def test_the_empty_tool_fields_of_clients_are_fine(client: httpx2.AsyncClient) -> None:
    response = await chat(
        client, tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True
    )
    assert response.status_code == 200
    assert "x-loraserve-ignored" not in response.headers


@pytest.mark.parametrize("stream", [None, False])
async def test_stream_options_without_a_stream_are_refused(client: httpx2.AsyncClient, stream: bool | None) -> None:
    options = {"stream": stream, "stream_options": {"include_usage": True}}
    completion = await client.post("/v1/completions", json={"model": "sql", "prompt": "x", **options})
    for response in (await chat(client, **options), completion):
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["message"]) == ("stream_options", "stream_options needs stream: true.")
    assert (await chat(client, stream=stream, stream_options=None)).status_code == 200


async def test_uncallable_tools_are_ignored_and_reported(client: httpx2.AsyncClient, engine: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain, answered = await chat(client), await chat(client, tools=tools, tool_choice="none")
    assert answered.status_code == 200
    assert answered.headers["x-loraserve-ignored"] == "tools"
    assert engine.seen[0].prompt_token_ids == engine.seen[1].prompt_token_ids
    nothing = await chat(client, tools=[], tool_choice="none")
    assert "x-loraserve-ignored" not in plain.headers
    assert "x-loraserve-ignored" not in nothing.headers


async def test_reasoning_effort_unread_by_template_is_reported_ignored(
    client: httpx2.AsyncClient,
) -> None:
    response = await chat(client, reasoning_effort="high")
    assert response.status_code == 200
    assert response.headers["x-loraserve-ignored"] == "reasoning_effort"
