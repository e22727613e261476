"""InferenceClient of huggingface_hub: chats, and TGI's `text_generation`, at a URL of one's own."""

from __future__ import annotations

import json
from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from probe import (
    BASE_URL,
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

chats = InferenceClient(base_url=BASE_URL, api_key=KEY, timeout=60).chat.completions
TOOLS: Any = [{"type": "function", "function": {"name": "query", "description": DESCRIPTION, "parameters": SCHEMA}}]
FORCED: dict[str, Any] = {"model": JSON_MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "tools": TOOLS}
FORCED |= {"messages": MESSAGES, "tool_choice": "required"}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "query", "schema": SCHEMA, "strict": True}}


@feature
def chat() -> str:
    return chats.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0).choices[0].message.content


@feature
def stream() -> list[str]:
    chunks = chats.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


@feature
def call() -> dict[str, Any]:
    function = chats.create(**FORCED).choices[0].message.tool_calls[0].function
    return {"name": function.name, "arguments": json.loads(function.arguments)}


@feature
def result() -> str:
    made = chats.create(**FORCED).choices[0].message.tool_calls[0]
    calls = [{"id": made.id, "type": "function", "function": dict(made.function)}]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": made.id, "content": RESULT},
    ]
    second = chats.create(model=TEXT_MODEL, messages=turns, tools=TOOLS, temperature=0, max_tokens=MAX_TOKENS)
    return second.choices[0].message.content


@feature
def parse() -> dict[str, Any]:
    answer = chats.create(
        model=JSON_MODEL, messages=MESSAGES, temperature=0, max_tokens=MAX_TOKENS, response_format=FORMAT
    )
    return json.loads(answer.choices[0].message.content)


@feature
def logprobs() -> list[Any]:
    answer = chats.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2)
    return [[item.token, item.logprob] for item in answer.choices[0].logprobs.content]


@feature
def completion() -> str:
    client = InferenceClient(model=URL, token=KEY, timeout=60)
    return client.text_generation(QUESTION, max_new_tokens=48, adapter_id=TEXT_MODEL)


@feature
def unknown_model() -> str:
    try:
        chats.create(model="absent", messages=MESSAGES)
    except HfHubHTTPError as error:
        return f"{error} {error.response.text}"
    raise AssertionError("an absent model answered")


run()
