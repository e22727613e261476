"""Ollama's own client for Python, on /api."""

from __future__ import annotations

import json
from typing import Any

import ollama
from probe import (
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    RESULT,
    SCHEMA,
    TEXT_MODEL,
    URL,
    feature,
    run,
)

client: Any = ollama.Client(URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": MAX_TOKENS}
TEXT: dict[str, Any] = {"model": TEXT_MODEL, "messages": MESSAGES, "options": OPTIONS}
JSON = {**TEXT, "model": JSON_MODEL, "format": SCHEMA}
TOOL = {"type": "function", "function": {"name": "query", "description": DESCRIPTION, "parameters": SCHEMA}}


@feature
def models() -> list[str]:
    names = [model.model for model in client.list().models]
    for name in names:
        assert client.show(name).capabilities
    assert client.ps().models
    return [name.removesuffix(":latest") for name in names]


@feature
def chat() -> str:
    answer = client.chat(**{**TEXT, "model": f"{TEXT_MODEL}:latest"})
    assert answer.done_reason == "stop"
    assert 0 < answer.eval_duration < answer.total_duration
    return answer.message.content


@feature
def stream() -> list[str]:
    return [part.message.content for part in client.chat(**TEXT, stream=True)]


@feature
def result() -> str:
    arguments = {"table": "tickets", "field": "age", "op": ">", "value": 81}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "query", "arguments": arguments}}]}
    answer = {"role": "tool", "content": RESULT, "tool_name": "query"}
    return client.chat(**{**TEXT, "messages": [*MESSAGES, call, answer]}, tools=[TOOL]).message.content


@feature
def parse() -> dict[str, Any]:
    return json.loads(client.chat(**JSON).message.content)


@feature
def stream_parse() -> dict[str, Any]:
    return json.loads("".join(part.message.content for part in client.chat(**JSON, stream=True)))


@feature
def embeddings() -> list[list[float]]:
    return client.embed(TEXT_MODEL, [QUESTION, "greet Anna"]).embeddings


@feature
def logprobs() -> list[Any]:
    answer = client.chat(**TEXT, logprobs=True, top_logprobs=2)
    return [[token.token, token.logprob] for token in answer.logprobs]


@feature
def completion() -> str:
    raw = client.generate(TEXT_MODEL, QUESTION, raw=True, options=OPTIONS).response
    told = client.generate(TEXT_MODEL, QUESTION, options=OPTIONS)
    assert told.response == raw
    return raw


@feature
def unknown_model() -> str:
    try:
        client.chat("absent", MESSAGES)
    except ollama.ResponseError as error:
        return f"{error.status_code}: {error.error}"
    raise AssertionError("an absent model answered")


run()
