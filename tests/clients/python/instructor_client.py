"""instructor, around OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from probe import BASE_URL, JSON_MODEL, KEY, MAX_TOKENS, MESSAGES, TEXT_MODEL, feature, query_type, run

COMMON: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0}
Query = query_type()


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60), mode=mode)


@feature
def chat() -> str:
    plain = client(instructor.Mode.TOOLS)
    answer = plain.create(model=TEXT_MODEL, response_model=None, **COMMON)
    return answer.choices[0].message.content


@feature
def call() -> dict[str, Any]:
    value = client(instructor.Mode.TOOLS).create(model=JSON_MODEL, response_model=Query, **COMMON)
    return {"name": "query", "arguments": value.model_dump()}


@feature
def stream_call() -> dict[str, Any]:
    values = client(instructor.Mode.TOOLS).create_partial(model=JSON_MODEL, response_model=Query, **COMMON)
    return {"name": "query", "arguments": list(values)[-1].model_dump()}


@feature
def parse() -> dict[str, Any]:
    return client(instructor.Mode.JSON_SCHEMA).create(model=JSON_MODEL, response_model=Query, **COMMON).model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    values = client(instructor.Mode.JSON_SCHEMA).create_partial(model=JSON_MODEL, response_model=Query, **COMMON)
    return list(values)[-1].model_dump()


@feature
def unknown_model() -> str:
    try:
        client(instructor.Mode.TOOLS).create(model="absent", response_model=Query, **COMMON)
    except (openai.NotFoundError, InstructorRetryException) as error:
        return str(error)
    raise AssertionError("an absent model answered")


run()
