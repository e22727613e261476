"""Anthropic's own client for Python on /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from probe import (
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
    RESULT,
    SCHEMA,
    TEXT_MODEL,
    URL,
    feature,
    query_type,
    run,
)

client: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
# version 2 has no temperature of its own any more
COMMON: dict[str, Any] = {"max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
TEXT: dict[str, Any] = {"model": TEXT_MODEL, "messages": MESSAGES, **COMMON}
JSON = {**TEXT, "model": JSON_MODEL}
TOOL = {"name": "query", "description": DESCRIPTION, "input_schema": SCHEMA}
FORCED = {**JSON, "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
Query = query_type()


@feature
def models() -> list[str]:
    return [model.id for model in client.models.list()]


@feature
def chat() -> str:
    return client.messages.create(**TEXT).content[0].text


@feature
def stream() -> list[str]:
    with client.messages.stream(**TEXT) as events:
        return list(events.text_stream)


@feature
def call() -> dict[str, Any]:
    (made,) = (block for block in client.messages.create(**FORCED).content if block.type == "tool_use")
    return {"name": made.name, "arguments": made.input}


@feature
def stream_call() -> dict[str, Any]:
    with client.messages.stream(**FORCED) as events:
        (made,) = (block for block in events.get_final_message().content if block.type == "tool_use")
    return {"name": made.name, "arguments": made.input}


@feature
def result() -> str:
    first = client.messages.create(**FORCED)
    (made,) = (block for block in first.content if block.type == "tool_use")
    output = {"type": "tool_result", "tool_use_id": made.id, "content": RESULT}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [output, {"type": "text", "text": MESSAGES[0]["content"]}]},
    ]
    return client.messages.create(**{**TEXT, "messages": messages}, tools=[TOOL]).content[0].text


@feature
def agent() -> dict[str, Any]:
    calls, results = [], []

    @anthropic.beta_tool(name="query", description=DESCRIPTION, input_schema=SCHEMA)
    def query(**arguments: Any) -> str:
        calls.append(arguments)
        return RESULT

    runner = client.beta.messages.tool_runner(**{**FORCED, "tools": [query]})
    for message in runner:
        text = "".join(block.text for block in message.content if block.type == "text")
        if answer := runner.generate_tool_call_response():
            results += [block["content"] for block in answer["content"]]
            # the first step has to call, and only that
            runner.set_messages_params(lambda params: {**params, "tool_choice": {"type": "auto"}})
    return {"calls": calls, "results": results, "text": text}


@feature
def parse() -> dict[str, Any]:
    return client.messages.parse(**JSON, output_format=Query).parsed_output.model_dump()


@feature
def count_tokens() -> int:
    return client.messages.count_tokens(model=TEXT_MODEL, messages=MESSAGES).input_tokens


@feature
def unknown_model() -> str:
    try:
        client.messages.create(**{**TEXT, "model": "absent"})
    except anthropic.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
