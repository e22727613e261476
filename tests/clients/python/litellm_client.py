"""litellm, by the provider ``openai/`` or (option ``vllm``) ``hosted_vllm/``."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are otherwise fetched at import

import litellm
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
    SCRIPT_OPTIONS,
    TEXT_MODEL,
    feature,
    query_type,
    run,
)

PROVIDER = "hosted_vllm" if "vllm" in SCRIPT_OPTIONS else "openai"
COMMON: dict[str, Any] = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0}
TEXT: dict[str, Any] = {"model": f"{PROVIDER}/{TEXT_MODEL}", "messages": MESSAGES, "temperature": 0, **COMMON}
JSON: dict[str, Any] = {**TEXT, "model": f"{PROVIDER}/{JSON_MODEL}", "max_tokens": MAX_TOKENS}
TOOL = {"type": "function", "function": {"name": "query", "description": DESCRIPTION, "parameters": SCHEMA}}
FORCED: dict[str, Any] = {**JSON, "tools": [TOOL], "tool_choice": "required"}
Query = query_type()


@feature
def chat() -> str:
    return litellm.completion(**TEXT, top_k=20).choices[0].message.content


@feature
def stream() -> list[str]:
    return [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**TEXT, stream=True)]


@feature
def call() -> dict[str, Any]:
    (made,) = litellm.completion(**FORCED, parallel_tool_calls=False).choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": Query.model_validate_json(made.function.arguments).model_dump()}


@feature
def stream_call() -> dict[str, Any]:
    chunks = list(litellm.completion(**FORCED, parallel_tool_calls=False, stream=True))
    (made,) = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": Query.model_validate_json(made.function.arguments).model_dump()}


@feature
def result() -> str:
    first = litellm.completion(**FORCED).choices[0].message
    tool = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "name": "query", "content": RESULT}
    second = litellm.completion(**{**TEXT, "messages": [*MESSAGES, first, tool]}, tools=[TOOL])
    return second.choices[0].message.content


@feature
def parse() -> dict[str, Any]:
    answer = litellm.completion(**JSON, response_format=Query)
    return Query.model_validate_json(answer.choices[0].message.content).model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    chunks = litellm.completion(**JSON, response_format=Query, stream=True)
    written = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return Query.model_validate_json(written).model_dump()


@feature
def embeddings() -> list[list[float]]:
    answer = litellm.embedding(model=f"{PROVIDER}/{TEXT_MODEL}", input=[QUESTION, "greet Anna"], **COMMON)
    return [item["embedding"] for item in answer.data]


@feature
def logprobs() -> list[Any]:
    answer = litellm.completion(**TEXT, logprobs=True, top_logprobs=2)
    return [[item.token, item.logprob] for item in answer.choices[0].logprobs.content]


@feature
def completion() -> str:
    model = f"{'hosted_vllm' if PROVIDER == 'hosted_vllm' else 'text-completion-openai'}/{TEXT_MODEL}"
    answer = litellm.text_completion(model=model, prompt=QUESTION, max_tokens=48, temperature=0, **COMMON)
    return answer.choices[0].text


@feature
def unknown_model() -> str:
    try:
        litellm.completion(**{**TEXT, "model": f"{PROVIDER}/absent"})
    except litellm.NotFoundError as error:
        return str(error)
    raise AssertionError("an absent model answered")


@feature
def context_window() -> str:
    try:
        litellm.completion(**{**TEXT, "messages": [{"role": "user", "content": "word " * 5000}]})
    except litellm.ContextWindowExceededError as error:
        return str(error)
    raise AssertionError("too long a prompt was answered")


run()
