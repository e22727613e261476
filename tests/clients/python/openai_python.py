"""OpenAI's own client for Python, versions 2 and 3."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from probe import (
    BASE_URL,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    RESULT,
    TEXT_MODEL,
    feature,
    query_type,
    run,
)

client: Any = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
Query = query_type()
TOOL = openai.pydantic_function_tool(Query, name="query")
FORCED: dict[str, Any] = {"model": JSON_MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
FORCED |= {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@feature
def models() -> list[str]:
    return [model.id for model in client.models.list()]


@feature
def chat() -> str:
    answer = client.chat.completions.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0)
    return answer.choices[0].message.content


@feature
def stream() -> list[str]:
    chunks = client.chat.completions.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


@feature
def call() -> dict[str, Any]:
    (made,) = client.chat.completions.parse(**FORCED).choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.parsed_arguments.model_dump()}


@feature
def stream_call() -> dict[str, Any]:
    with client.chat.completions.stream(**FORCED) as chunks:
        (made,) = chunks.get_final_completion().choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.parsed_arguments.model_dump()}


@feature
def result() -> str:
    first = client.chat.completions.create(**FORCED).choices[0].message
    tool = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": RESULT}
    second = client.chat.completions.create(
        model=TEXT_MODEL, messages=[*MESSAGES, first, tool], tools=[TOOL], temperature=0, max_tokens=MAX_TOKENS
    )
    return second.choices[0].message.content


@feature
def parse() -> dict[str, Any]:
    answer = client.chat.completions.parse(model=JSON_MODEL, messages=MESSAGES, response_format=Query, temperature=0)
    return answer.choices[0].message.parsed.model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    with client.chat.completions.stream(
        model=JSON_MODEL, messages=MESSAGES, response_format=Query, temperature=0
    ) as chunks:
        kinds = {event.type for event in chunks}
        assert "content.delta" in kinds, kinds
        return chunks.get_final_completion().choices[0].message.parsed.model_dump()


@feature
def embeddings() -> list[list[float]]:
    answer = client.embeddings.create(model=TEXT_MODEL, input=[QUESTION, "greet Anna"])
    return [item.embedding for item in answer.data]


@feature
def logprobs() -> list[Any]:
    answer = client.chat.completions.create(
        model=TEXT_MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
    )
    return [[item.token, item.logprob] for item in answer.choices[0].logprobs.content]


@feature
def completion() -> str:
    return client.completions.create(model=TEXT_MODEL, prompt=QUESTION, max_tokens=48, temperature=0).choices[0].text


@feature
def batch() -> dict[str, Any]:
    body = {"model": TEXT_MODEL, "messages": MESSAGES, "temperature": 0}
    line = {"custom_id": "first", "method": "POST", "url": "/v1/chat/completions", "body": body}
    asked = client.files.create(file=("requests.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(input_file_id=asked.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while made.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline:
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    assert made.output_file_id, made
    lines = [json.loads(text) for text in client.files.content(made.output_file_id).text.splitlines()]
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    return {"status": made.status, "texts": texts}


@feature
def unknown_model() -> str:
    try:
        client.chat.completions.create(model="absent", messages=MESSAGES)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
