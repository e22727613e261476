"""Anthropic's client, if it is installed, against a real server on the bundled pack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.frames import Compare
from loraserve.demo.pack import adapter_dirs

anthropic: Any = pytest.importorskip("anthropic")

pytestmark = pytest.mark.clients

FRAME = Compare("list", "tickets", "age", "over", 81)
TOOL: Any = {
    "name": "query",
    "description": "Rows of a table.",
    "input_schema": {
        "type": "object",
        "properties": {"table": {"enum": ["tickets", "users", "orders"]}, "value": {"type": "integer"}},
        "required": ["table", "value"],
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("messages") / "data").start()
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
def client(server: ServerProcess, key: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def options(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": FRAME.prompt}]
    body = {"extra_body": {"temperature": 0}, **fields}
    return {"model": "json", "messages": messages, "max_tokens": 120, **body}


def is_valid(value: Any) -> None:
    """Check the value against the client's own types, which it doesn't do itself."""
    TypeAdapter(type(value)).validate_python(value.to_dict())


def test_message_conforms_to_anthropic_types(client: Any) -> None:
    message = client.messages.create(**options(metadata={"user_id": "ann"}))
    is_valid(message)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.content[0].text == FRAME.render("json")
    assert message._request_id.startswith("req_")
    usage = message.usage
    counted = client.messages.count_tokens(model="json", messages=options()["messages"])
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stream_is_the_whole_message(client: Any) -> None:
    with client.messages.stream(**options()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    is_valid(final)
    assert text == final.content[0].text == FRAME.render("json")
    assert (final.stop_reason, final.usage.output_tokens > 0) == ("end_turn", True)
    for event in client.messages.create(**options(stream=True)):
        is_valid(event)


def test_tools_are_called_and_tool_results_read(client: Any) -> None:
    asked = options(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    message = client.messages.create(**asked)
    is_valid(message)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "query")
    assert set(call.input) == {"table", "value"}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.content[0].input) == ("tool_use", call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"rows": 3})}
    messages = [
        *asked["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**options(messages=messages, tools=[TOOL]))
    assert answer.content[0].text == FRAME.render("json")


def test_client_distinguishes_error_types(client: Any, server: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**options(model="none"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**options(tools=[TOOL, TOOL]))
    assert bad.value.body["error"]["param"] == "tools.1.name"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="sk-lora-no", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**options())
