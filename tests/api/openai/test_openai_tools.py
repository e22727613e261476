"""The official client calls tools of a real server on the bundled pack, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.frames import Compare
from loraserve.demo.pack import adapter_dirs

pytestmark = pytest.mark.clients

FRAME = Compare("list", "tickets", "age", "over", 81)
MESSAGES: Any = [{"role": "user", "content": FRAME.prompt}]


class Query(BaseModel):
    """Rows of a table whose number lies on one side of another."""

    table: Literal["tickets", "users", "orders"]
    field: Literal["age", "size"]
    op: Literal[">", "<", "="]
    value: int = Field(ge=1, le=99)


QUERY: Any = openai.pydantic_function_tool(Query, name="query")
LOOSE: Any = {"type": "function", "function": {k: v for k, v in QUERY["function"].items() if k != "strict"}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "The time."}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("tools") / "data").start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    key = server.make_tenant("acme")
    directories: dict[str, Path] = adapter_dirs()
    with Client(server.url, api_key=key) as client:
        client.adapters.push(directories["json"], name="json")
    return key


@pytest.fixture
def client(server: ServerProcess, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    options = {"model": "json", "messages": MESSAGES, "temperature": 0, "max_tokens": 120, **fields}
    return client.chat.completions.create(**options)


@pytest.mark.parametrize("tool", [QUERY, LOOSE], ids=["strict", "loose"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "query"}}])
def test_forced_call_has_arguments_matching_schema(client: openai.OpenAI, tool: Any, choice: Any) -> None:
    answer = ask(client, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert call.function.name == "query"
    Query.model_validate_json(call.function.arguments)


def test_streamed_call_equals_complete_call(client: openai.OpenAI) -> None:
    options = {"tools": [QUERY], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(ask(client, **options, stream=True, stream_options={"include_usage": True}))
    pieces = [piece for chunk in chunks if chunk.choices for piece in chunk.choices[0].delta.tool_calls or ()]
    assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", "query")
    assert pieces[0].id
    assert {piece.id for piece in pieces[1:]} == {None}
    whole = ask(client, **options).choices[0].message.tool_calls[0].function.arguments
    assert "".join(piece.function.arguments for piece in pieces) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0


def test_client_helpers_parse_tool_call(client: openai.OpenAI) -> None:
    options: Any = {"model": "json", "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    options |= {"tools": [QUERY], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert parsed is not None
    assert isinstance(parsed[0].function.parsed_arguments, Query)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert final is not None
    assert final[0].function.parsed_arguments == parsed[0].function.parsed_arguments


def test_each_choice_makes_separate_call(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[CLOCK], tool_choice="required", n=2, temperature=1, seed=1, parallel_tool_calls=False)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert [call.function.name for call in calls] == ["clock", "clock"]
    assert calls[0].id != calls[1].id
    assert [json.loads(call.function.arguments) for call in calls] == [{}, {}]


def test_an_agents_second_step_has_the_result(client: openai.OpenAI) -> None:
    first = ask(client, tools=[QUERY], tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [
        *MESSAGES,
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"rows": 3}'},
    ]
    second = ask(client, messages=messages, tools=[QUERY]).choices[0]
    assert second.finish_reason == "stop"
    assert second.message.content == FRAME.render("json")


def test_model_free_to_choose_answers_in_text(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[LOOSE]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.tool_calls is None
    assert answer.message.content == FRAME.render("json")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [QUERY, QUERY]}, "tools.1.function.name"),
        (
            {"tools": [QUERY], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools.0.function.parameters.not",
        ),
    ],
)
def test_client_errors_name_wrong_parameter(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param
