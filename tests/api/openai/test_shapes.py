"""Answers with reasoning and calls: exactly the fields of `loraserve.contract`."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hermes_model import CALL, TIME_CALL, base, model_dir
from shapes import faults_of

from loraserve.contract.chat import ChatCompletion, ChatCompletionChunk, Message
from loraserve.contract.ollama.answers import OllamaChat, OllamaGeneration
from loraserve.contract.response import ModelResponse
from loraserve.contract.result import Result

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

THOUGHT = f"<think>\nRain < sun?\n</think>\n\nLook:\n{CALL}\n{TIME_CALL}"
HELLO = [{"role": "user", "content": "What's the weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": CITY}
CHAT = {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}
MESSAGE = {"messages": HELLO, "max_tokens": 900, "tools": [{"name": "get_weather", "input_schema": CITY}]}
RESPONSE = {"input": "What's the weather?", "tools": [{"type": "function", **FUNCTION}]}


@pytest.mark.parametrize(
    ("path", "shape", "body"),
    [
        ("/v1/chat/completions", ChatCompletion, CHAT),
        ("/v1/chat/completions", ChatCompletion, CHAT | {"logprobs": True, "return_token_ids": True}),
        ("/v1/messages", Message, MESSAGE),
        ("/v1/responses", ModelResponse, RESPONSE | {"tool_choice": {"type": "function", "name": "get_weather"}}),
        ("/v1/responses", ModelResponse, RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ("/v1/responses", ModelResponse, RESPONSE | {"max_output_tokens": 3, "instructions": "x", "user": "y"}),
        ("/api/chat", OllamaChat, CHAT | {"stream": False, "logprobs": True, "top_logprobs": 1}),
        ("/api/chat", OllamaChat, {"messages": []}),
        ("/api/generate", OllamaGeneration, {"prompt": "x", "stream": False}),
        ("/api/generate", OllamaGeneration, {}),
    ],
)
async def test_answer_with_calls_has_exactly_contract_fields(
    client: httpx2.AsyncClient, engine: Any, path: str, shape: type[Result], body: dict[str, Any]
) -> None:
    engine.script = THOUGHT
    answer = await client.post(path, json={"model": "sql"} | body)
    assert answer.status_code == 200, answer.text
    assert faults_of(shape, answer.json()) == []
    shape.model_validate_json(answer.content, extra="forbid")


async def test_streamed_calls_have_only_contract_fields(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    answer = await client.post("/v1/chat/completions", json={"model": "sql", "stream": True, **CHAT})
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame][:-1]
    for frame in frames:
        ChatCompletionChunk.model_validate_json(frame, extra="forbid")
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    assert any(delta.get("tool_calls") for delta in deltas)


def test_unknown_and_missing_fields_are_faults() -> None:
    chat = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "f",
        "choices": [],
        **{"prompt_token_ids": None, "prompt_logprobs": None},
    }
    (missing,) = faults_of(ChatCompletion, chat)
    assert "'usage' is a required property" in missing
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1, "prompt_tokens_details": {"colour": 1}}
    found = " ".join(faults_of(ChatCompletion, chat | {"usage": usage}))
    assert "'colour' was unexpected" in found
    assert "'cached_tokens' is a required property" in found
