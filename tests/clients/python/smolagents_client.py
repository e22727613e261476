"""smolagents: its model of OpenAI's API, as its agents use it."""

from __future__ import annotations

import json
from typing import Any

import openai
from probe import BASE_URL, DESCRIPTION, JSON_MODEL, KEY, MAX_TOKENS, MESSAGES, SCHEMA, TEXT_MODEL, feature, run
from smolagents import OpenAIModel, Tool
from smolagents.models import ChatMessage, MessageRole

TURNS = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": MESSAGES[0]["content"]}])]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "query", "schema": SCHEMA, "strict": True}}


class Query(Tool):
    """The tool of all clients."""

    name = "query"
    description = DESCRIPTION
    inputs: Any = {name: {**field, "description": name} for name, field in SCHEMA["properties"].items()}  # noqa: RUF012
    output_type = "string"

    def forward(self, table: str, field: str, op: str, value: int) -> str:
        raise AssertionError("only the agent's loop calls it")


def model(name: str) -> OpenAIModel:
    return OpenAIModel(
        name,
        api_base=BASE_URL,
        api_key=KEY,
        client_kwargs={"max_retries": 0, "timeout": 60},
        temperature=0,
        max_tokens=MAX_TOKENS,
    )


@feature
def chat() -> str:
    return model(TEXT_MODEL).generate(TURNS).content


@feature
def stream() -> list[str]:
    return [piece.content or "" for piece in model(TEXT_MODEL).generate_stream(TURNS)]


@feature
def call() -> dict[str, Any]:
    (made,) = model(JSON_MODEL).generate(TURNS, tools_to_call_from=[Query()]).tool_calls
    arguments = made.function.arguments
    return {"name": made.function.name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


@feature
def parse() -> dict[str, Any]:
    return json.loads(model(JSON_MODEL).generate(TURNS, response_format=FORMAT).content)


@feature
def unknown_model() -> str:
    try:
        model("absent").generate(TURNS)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
