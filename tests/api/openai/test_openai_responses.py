"""The official client's responses, of a real server on the bundled pack: whole, parsed, streamed,
with tools, and continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field, TypeAdapter
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.frames import Compare
from loraserve.demo.pack import adapter_dirs

pytestmark = pytest.mark.clients

FRAME = Compare("list", "tickets", "age", "over", 81)


class Query(BaseModel):
    """Rows of a table whose number lies on one side of another."""

    table: Literal["tickets", "users", "orders"]
    field: Literal["age", "size"]
    op: Literal[">", "<", "="]
    value: int = Field(ge=1, le=99)


TOOL: Any = {
    "type": "function",
    "name": "query",
    "parameters": {**Query.model_json_schema(), "additionalProperties": False},
    "strict": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("responses") / "data").start()
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
    options = {"model": "json", "input": FRAME.prompt, "temperature": 0, "max_output_tokens": 120, **fields}
    return client.responses.create(**options)


def is_valid(value: BaseModel) -> None:
    """Check the value against the client's own types, which it doesn't do itself."""
    TypeAdapter(type(value)).validate_python(value.to_dict())  # type: ignore[attr-defined]


def test_response_conforms_to_openai_types(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"a": "b"}, user="ann", instructions="")
    is_valid(answer)
    assert (answer.status, answer.output_text) == ("completed", FRAME.render("json"))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.metadata, answer.user, answer.store) == ({"a": "b"}, "ann", True)


def test_a_stream_ends_with_the_whole_response(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True, include=["message.output_text.logprobs"], top_logprobs=2))
    for event in events:
        is_valid(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert "".join(event.delta for event in deltas) == final.output_text == FRAME.render("json")
    logprobs = final.output[0].content[0].logprobs
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in logprobs]
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}


def test_client_helpers_parse_output_with_schema(client: openai.OpenAI) -> None:
    options: Any = {"model": "json", "input": FRAME.prompt, "temperature": 0, "text_format": Query}
    parsed = client.responses.parse(**options)
    assert isinstance(parsed.output_parsed, Query)
    with client.responses.stream(**options) as stream:
        for event in stream:
            assert event.type
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_an_agents_second_step_continues_the_first(client: openai.OpenAI) -> None:
    options: Any = {"tools": [TOOL], "parallel_tool_calls": False}
    first = ask(client, tool_choice="required", **options)
    is_valid(first)
    (call,) = first.output
    Query.model_validate_json(call.arguments)
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": '{"rows": 3}'}]
    second = ask(client, input=output, previous_response_id=first.id, **options)
    assert second.output_text == FRAME.render("json")
    assert second.previous_response_id == first.id
    # the same, with all of the items sent again
    items = [{"role": "user", "content": FRAME.prompt}, call.to_dict(), *output]
    again = ask(client, input=items, store=False, **options)
    assert again.usage.input_tokens == second.usage.input_tokens
    assert (again.output_text, again.store) == (second.output_text, False)


def test_streamed_call_equals_complete_call(client: openai.OpenAI) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "query"}}
    events = list(ask(client, stream=True, parallel_tool_calls=False, **options))
    for event in events:
        is_valid(event)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    (call,) = events[-1].response.output
    assert "".join(pieces) == done.arguments == call.arguments
    assert (done.name, call.status) == ("query", "completed")


def test_a_stored_response_is_read_listed_and_deleted(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": text} for text in ("a", "b", FRAME.prompt)]
    answer = ask(client, input=items)
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    listed = list(client.responses.input_items.list(answer.id, limit=1, order="asc"))
    assert [item.content[0].text for item in listed] == ["a", "b", FRAME.prompt]  # type: ignore[union-attr]
    client.responses.delete(answer.id)
    for missing in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: client.responses.input_items.list(answer.id),
        lambda: ask(client, previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            missing()
        assert caught.value.code == "response_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "telepathy"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"),
    ],
)
def test_client_errors_name_wrong_parameter(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param
