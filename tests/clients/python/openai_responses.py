"""OpenAI's own client for Python on /v1/responses."""

from __future__ import annotations

from typing import Any

import openai
from probe import (
    BASE_URL,
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    SCHEMA,
    TEXT_MODEL,
    feature,
    query_type,
    run,
)

client: Any = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
Query = query_type()
TOOL = {"type": "function", "name": "query", "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
FORCED: dict[str, Any] = {"model": JSON_MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS, "input": QUESTION}
FORCED |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@feature
def chat() -> str:
    return client.responses.create(model=TEXT_MODEL, input=QUESTION, temperature=0).output_text


@feature
def stream() -> list[str]:
    events = client.responses.create(model=TEXT_MODEL, input=QUESTION, temperature=0, stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


@feature
def call() -> dict[str, Any]:
    (made,) = (item for item in client.responses.create(**FORCED).output if item.type == "function_call")
    return {"name": made.name, "arguments": Query.model_validate_json(made.arguments).model_dump()}


@feature
def stream_call() -> dict[str, Any]:
    with client.responses.stream(**FORCED) as events:
        (made,) = (item for item in events.get_final_response().output if item.type == "function_call")
    return {"name": made.name, "arguments": Query.model_validate_json(made.arguments).model_dump()}


@feature
def result() -> str:
    first = client.responses.create(**FORCED)
    (made,) = (item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": made.call_id, "output": RESULT}
    items = [{"role": "user", "content": QUESTION}, *first.output, output]
    return client.responses.create(model=TEXT_MODEL, input=items, tools=[TOOL], temperature=0).output_text


@feature
def parse() -> dict[str, Any]:
    answer = client.responses.parse(model=JSON_MODEL, input=QUESTION, text_format=Query, temperature=0)
    return answer.output_parsed.model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    with client.responses.stream(model=JSON_MODEL, input=QUESTION, text_format=Query, temperature=0) as events:
        kinds = {event.type for event in events}
        assert "response.output_text.delta" in kinds, kinds
        return events.get_final_response().output_parsed.model_dump()


@feature
def unknown_model() -> str:
    try:
        client.responses.create(model="absent", input=QUESTION)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
