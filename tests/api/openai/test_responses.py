"""/v1/responses: what reaches the prompt, the engine and the client, and what is stored."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hermes_model import CALL, TIME_CALL, base, model_dir, prompt_of
from sqlalchemy import select

from loraserve.api.services import Services
from loraserve.db.models import StoredResponseRow
from loraserve.errors import DatabaseUnavailable, EngineCrashed
from loraserve.limits import LIMITS

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"type": "function", "name": "get_time"}
THOUGHT = f"<think>\nRain < sun?\n</think>\n\nLook:\n{CALL}\n{TIME_CALL}"


async def ask(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/responses", json={"model": "sql", "input": "hello", **body})


async def answer_of(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await ask(client, **body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events, whose names and numbers are as they should be."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        assert payload["sequence_number"] == len(events)
        events.append(payload)
    return events


def shape(item: dict[str, Any]) -> Any:
    """An item without the names that are made anew each time."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


async def num_rows(services: Services) -> int:
    async with services.registry.operations._database.read() as session:
        return len((await session.scalars(select(StoredResponseRow.id))).all())


async def test_a_response_has_openais_shape(client: httpx2.AsyncClient) -> None:
    body = await answer_of(client, seed=2, max_output_tokens=10, metadata={"a": "b"}, instructions="be brief")
    assert (body["object"], body["model"], body["instructions"]) == ("response", "sql", "be brief")
    assert body["id"].startswith("resp_")
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = body["output"]
    assert message["id"].startswith("msg_")
    assert shape(message) == {
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "sql says 2", "annotations": [], "logprobs": []}],
    }
    usage = body["usage"]
    assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (10, 16)
    assert usage["total_tokens"] == usage["input_tokens"] + 10


async def test_a_complete_response_says_so(client: httpx2.AsyncClient) -> None:
    body = await answer_of(client)
    assert (body["status"], body["incomplete_details"], body["output"][0]["status"]) == ("completed", None, "completed")


async def test_input_items_reach_prompt_in_order(client: httpx2.AsyncClient, engine: Any) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Å"}'},
        {"type": "function_call", "call_id": "call_2", "name": "get_time", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "function_call_output", "call_id": "call_2", "output": "noon"},
    ]
    assert (await ask(client, input=items, tools=[WEATHER, TIME])).status_code == 200
    asked = prompt_of(engine)
    chat = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Å"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in (WEATHER, TIME)]
    body = {"model": "sql", "messages": chat, "tools": tools}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert asked == prompt_of(engine)


async def test_a_chats_fields_are_a_responses_too(client: httpx2.AsyncClient, engine: Any) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 5, "stop": ["x"], "priority": 2}
    await answer_of(client, **fields, max_output_tokens=7, timeout=9, ignore_eos=True)
    request = engine.seen[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 3, 0.1, 5)
    assert (params.max_tokens, request.stop, request.priority, request.timeout_s) == (7, ("x",), 2, 9)


async def test_reasoning_text_and_calls_are_items(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    body = await answer_of(client, tools=[WEATHER, TIME])
    thought, message, weather, time = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Rain < sun?"}]
    assert message["content"][0]["text"] == "Look:"
    assert (weather["type"], weather["name"]) == ("function_call", "get_weather")
    assert (json.loads(weather["arguments"]), time["arguments"]) == ({"city": "Ångström"}, "{}")
    assert weather["call_id"] != time["call_id"]
    assert {item["status"] for item in body["output"]} == {"completed"}
    tokens = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len("Rain < sun?") <= tokens < len("<think>\nRain < sun?\n</think>\n\n")


async def test_a_stream_has_an_event_for_each_step(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    events = events_of(await ask(client, tools=[WEATHER, TIME], stream=True, seed=1))
    order = [name for name, before in zip(names_of(events), ["", *names_of(events)], strict=False) if name != before]
    assert order == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *(
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        )
        * 2,
        "response.completed",
    ]
    final = events[-1]["response"]
    whole = await answer_of(client, tools=[WEATHER, TIME], seed=1)
    assert [shape(item) for item in final["output"]] == [shape(item) for item in whole["output"]]
    assert final["usage"] == whole["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(final["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in mine) == text


def names_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def test_truncated_stream_is_incomplete(client: httpx2.AsyncClient) -> None:
    events = events_of(await ask(client, stream=True, max_output_tokens=4))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_an_answer_without_text_is_an_empty_message(client: httpx2.AsyncClient, engine: Any) -> None:
    body = await answer_of(client, stop=["sql"])
    assert [item["content"][0]["text"] for item in body["output"]] == [""]
    assert names_of(events_of(await ask(client, stop=["sql"], stream=True)))[2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_logprobs_match_output_text(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "<think>\nHm.\n</think>é!"
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    message = (await answer_of(client, **fields))["output"][1]
    logprobs = message["content"][0]["logprobs"]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode().endswith("é!")
    assert b"Hm" not in bytes(byte for entry in logprobs for byte in entry["bytes"])
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {1}
    events = events_of(await ask(client, **fields, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == logprobs


async def test_a_text_format_is_a_response_format(client: httpx2.AsyncClient, engine: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    engine.script = '{"n": 5}'
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = await answer_of(client, text={"format": wanted})
    assert body["text"] == {"format": wanted}
    inner = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hello"}], "response_format": inner}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert engine.seen[0].params.grammar == engine.seen[1].params.grammar != ""
    await answer_of(client, text={"format": {"type": "text"}})
    assert engine.seen[-1].params.grammar == ""


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "get_time"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
    ],
)
async def test_a_forced_call_has_a_grammar(client: httpx2.AsyncClient, engine: Any, choice: Any) -> None:
    engine.script = TIME_CALL
    body = await answer_of(client, tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert body["output"][0]["name"] == "get_time"
    assert body["tool_choice"] == choice
    assert "get_weather" not in engine.seen[-1].params.grammar + prompt_of(engine)
    await answer_of(client, tools=[WEATHER, TIME], tool_choice="required")
    assert "get_weather" in engine.seen[-1].params.grammar


async def test_fields_without_effect_are_named_in_header(client: httpx2.AsyncClient) -> None:
    answer = await ask(
        client,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        tools=[TIME],
        tool_choice="none",
        service_tier="flex",
        background=False,
        conversation=None,
    )
    assert answer.status_code == 200
    named = set(answer.headers["x-loraserve-ignored"].split(", "))
    expected = {"service_tier", "include.reasoning.encrypted_content", "reasoning.summary", "reasoning.effort", "tools"}
    assert named == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input.0"),
    ({"input": [{"role": "user", "content": "x"}] * 1025}, "input"),
    ({"input": [{"role": "nurse", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": []}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": ["a"]}]}]}, "input.0.content.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": {"a": 1}}]}, "input.0.type"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}]}, "input.0.name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c" * 300, "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input.0.output"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input.0.content"),
    ({"input": "x" * 9000}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"max_output_tokens": "five"}, "max_output_tokens"),
    ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
    ({"metadata": 5}, "metadata"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"text": 5}, "text"),
    ({"text": {"format": 5}}, "text.format.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "?", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"voice": "low"}}, "text"),
    ({"reasoning": 5}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"effort": "x" * 33}}, "reasoning.effort"),
    ({"reasoning": {"budget": 5}}, "reasoning"),
    ({"include": "x"}, "include"),
    ({"include": ["file_search_call.thoughts"]}, "include.0"),
    ({"include": ["x"] * 17}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"store": "yes"}, "store"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [{"type": "telepathy"}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom"}]}, "tools.0.name"),
    ({"tools": [{"type": "custom", "name": "f", "format": 5}]}, "tools.0.format"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools.0"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [TIME, TIME]}]}, "tools.0.tools.1.name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools.0.tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "f", "colour": "red"}]}, "tools.0"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools.0.parameters"),
    ({"tools": [TIME, TIME]}, "tools.1.name"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}},
        "tool_choice.tools.0.name",
    ),
    *(
        ({name: value}, name)
        for name, value in (
            ("background", True),
            ("conversation", "c"),
            ("prompt", {"id": "p"}),
            ("max_tool_calls", 5),
            ("context_management", [{"type": "compaction"}]),
            ("moderation", {"model": "m"}),
            ("messages", [{"role": "user", "content": "x"}]),
            ("n", 2),
            ("max_tokens", 5),
            ("max_completion_tokens", 5),
            ("response_format", {"type": "json_object"}),
            ("reasoning_effort", "low"),
            ("logprobs", True),
            ("prompt_logprobs", 1),
            ("return_token_ids", True),
            ("guided_json", {}),
            ("regex", "a"),
            ("verbosity", "low"),
        )
        if value != {}
    ),
]


async def test_bad_fields_are_named(client: httpx2.AsyncClient, subtests: pytest.Subtests, engine: Any) -> None:
    for fields, param in BAD:
        with subtests.test(param, fields=str(fields)[:80]):
            answer = await ask(client, **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), answer.text
            assert param in error["message"] or param == "input"
            assert "messages" not in error["message"] or "messages" in fields
    assert engine.seen == []


async def test_overlong_input_error_uses_wording_clients_expect(client: httpx2.AsyncClient) -> None:
    error = (await ask(client, input="x" * 9000)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens.")
    assert error["message"].endswith("reduce the length of the input.")


async def test_error_in_stream_is_reported_by_two_events(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 3, EngineCrashed("The engine died twice under this request.")
    events = events_of(await ask(client, stream=True))
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "engine_crashed")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert (await ask(client)).status_code == 500


async def test_error_before_first_byte_has_error_status(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after = 0
    answer = await ask(client, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert answer.headers["retry-after-ms"]


async def test_response_continues_previous_responses(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    first = await answer_of(client, input="Which?", instructions="be brief", tools=[WEATHER, TIME])
    engine.script = "Rain."
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    second = await answer_of(client, input=outputs, previous_response_id=first["id"])
    continued = prompt_of(engine)
    # instructions of before don't hold any more
    assert "be brief" not in continued
    items = [{"role": "user", "content": "Which?"}, *first["output"], *outputs]
    await answer_of(client, input=items)
    assert prompt_of(engine) == continued
    third = await answer_of(client, input="And?", previous_response_id=second["id"], instructions="be long")
    assert third["previous_response_id"] == second["id"]
    prompt = prompt_of(engine)
    assert [prompt.index(text) for text in ("be long", "Which?", "Look:", "ok", "Rain.", "And?")] == sorted(
        prompt.index(text) for text in ("be long", "Which?", "Look:", "ok", "Rain.", "And?")
    )


async def test_streamed_response_is_stored_before_completion_event(client: httpx2.AsyncClient) -> None:
    final = events_of(await ask(client, stream=True))[-1]["response"]
    assert final["store"] is True
    assert (await client.get(f"/v1/responses/{final['id']}")).json() == final


async def test_stored_response_has_time_of_answer(client: httpx2.AsyncClient, services: Services) -> None:
    # a second goes by between any two looks at the clock
    services.clock = itertools.count(1_000_000).__next__
    answer = await answer_of(client)
    assert (await client.get(f"/v1/responses/{answer['id']}")).json() == answer


async def test_response_with_store_false_is_not_stored(client: httpx2.AsyncClient, services: Services) -> None:
    body = await answer_of(client, store=False)
    final = events_of(await ask(client, store=False, stream=True))[-1]["response"]
    assert (body["store"], final["store"]) == (False, False)
    assert await num_rows(services) == 0
    answer = await ask(client, previous_response_id=body["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_found", "previous_response_id")


async def test_answer_without_database_reports_store_false(
    client: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await answer_of(client)

    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        raise DatabaseUnavailable("The registry's database can't be reached now.")
        yield

    database = services.registry.operations._database
    monkeypatch.setattr(database, "write", away)
    for body in (await answer_of(client), events_of(await ask(client, stream=True))[-1]["response"]):
        assert (body["status"], body["store"]) == ("completed", False)
    assert services.metrics.registry.get_sample_value("loraserve_stored_responses_total", {"outcome": "lost"}) == 2
    monkeypatch.setattr(database, "read_columns", away)
    answer = await ask(client, previous_response_id=known["id"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")


async def test_foreign_response_reads_like_absent_response(
    client: httpx2.AsyncClient,
    url: str,
    make_tenant: Callable[[str], Awaitable[Any]],
    publish: Callable[..., Any],
) -> None:
    theirs = (await answer_of(client, input="a secret"))["id"]
    absent = "resp_" + "0" * 26
    globex = await make_tenant("globex")
    await publish("sql", tenant=globex)
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers | {"x-request-id": "one"}) as other:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            answers = [await other.request(method, f"/v1/responses/{id_}{path}") for id_ in (theirs, absent)]
            assert {answer.status_code for answer in answers} == {404}
            assert answers[0].content == answers[1].content
        asked = [await ask(other, previous_response_id=id_) for id_ in (theirs, absent)]
        assert {answer.status_code for answer in asked} == {404}
        assert asked[0].content == asked[1].content
    assert (await client.get(f"/v1/responses/{theirs}")).status_code == 200


async def test_input_items_are_paged(client: httpx2.AsyncClient) -> None:
    items = [{"role": "user", "content": text} for text in "abcde"]
    response = await answer_of(client, input=items)
    path = f"/v1/responses/{response['id']}/input_items"
    whole = (await client.get(path)).json()
    assert [item["content"][0]["text"] for item in whole["data"]] == list("edcba")
    assert (whole["has_more"], whole["first_id"]) == (False, whole["data"][0]["id"])
    page = (await client.get(path, params={"limit": 2, "order": "asc", "after": whole["data"][4]["id"]})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["b", "c"]
    assert (page["has_more"], page["last_id"]) == (True, page["data"][1]["id"])
    for params in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}, {"after": "x" * 300}):
        answer = await client.get(path, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(params)))


async def test_a_stored_response_isnt_streamed_again(client: httpx2.AsyncClient) -> None:
    response = await answer_of(client)
    answer = await client.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_log_probabilities_arent_stored(client: httpx2.AsyncClient) -> None:
    response = await answer_of(client, include=["message.output_text.logprobs"])
    assert response["output"][0]["content"][0]["logprobs"]
    stored = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert stored["output"][0]["content"][0]["logprobs"] == []


async def test_a_response_is_billed_as_a_chat(client: httpx2.AsyncClient, services: Services) -> None:
    assert services.usage is not None
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
    amounts = []
    for send in (
        client.post("/v1/chat/completions", json=chat),
        ask(client, max_output_tokens=7),
        ask(client, max_output_tokens=7, stream=True),
    ):
        before = services.usage.recorded
        assert (await send).status_code == 200
        after = services.usage.recorded
        amounts.append((after.prompt_tokens - before.prompt_tokens, after.completion_tokens - before.completion_tokens))
    assert amounts[0] == amounts[1] == amounts[2]
    assert amounts[0][1] == 7


async def test_a_long_conversation_is_bounded(
    client: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert services.responses is not None
    monkeypatch.setattr(services.responses, "_limits", replace(LIMITS, max_conversation_responses=2))
    ids = [(await answer_of(client, max_output_tokens=1))["id"]]
    for _ in range(2):
        ids.append((await answer_of(client, max_output_tokens=1, previous_response_id=ids[-1]))["id"])
    answer = await ask(client, previous_response_id=ids[-1])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_long_integers_of_schemas_are_echoed(client: httpx2.AsyncClient, is_stream: bool) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30, "minimum": -(2**63) - 1}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    body = {"model": "sql", "input": "x", "tools": [tool], "tool_choice": "none", "stream": is_stream}
    answer = await client.post("/v1/responses", json=body | {"max_output_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert '"maximum":1000000000000000000000000000000,"minimum":-9223372036854775809' in answer.text
