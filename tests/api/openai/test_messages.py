"""/v1/messages: what reaches the prompt and the engine, blocks, events, errors and keys."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from hermes_model import CALL, TIME_CALL, base, model_dir, prompt_of

from loraserve.api.services import Services
from loraserve.errors import EngineCrashed

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
THOUGHT = f"<think>\nRain < sun?\n</think>\n\nLook:\n{CALL}\n{TIME_CALL}"
HELLO = [{"role": "user", "content": "hello"}]


async def ask(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/messages", json={"model": "sql", "messages": HELLO, "max_tokens": 900, **body})


async def answer_of(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await ask(client, **body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_message_has_anthropics_shape(client: httpx2.AsyncClient) -> None:
    answer = await ask(client, seed=2, max_tokens=10)
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "sql",
        "content": [{"type": "text", "text": "sql says 2"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert (usage["output_tokens"], usage["cache_read_input_tokens"]) == (10, 16)
    assert usage["cache_creation_input_tokens"] == 0
    count = (await client.post("/v1/messages/count_tokens", json={"model": "sql", "messages": HELLO})).json()
    assert count == {"input_tokens": usage["input_tokens"] + 16}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_blocks_reach_the_prompt_as_a_chats_messages(client: httpx2.AsyncClient, engine: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Å"}},
                {"type": "tool_use", "id": "call_2", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "now"},
    ]
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    answer = await ask(client, messages=messages, system=system, tools=[WEATHER, TIME])
    assert answer.headers["x-loraserve-ignored"] == "cache_control"
    asked = prompt_of(engine)
    calls = [("call_1", "get_weather", '{"city":"Å"}'), ("call_2", "get_time", "{}")]
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": text}}
                for id_, name, text in calls
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: no clock"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "now"},
    ]
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in (WEATHER, TIME)
    ]
    tools[0]["function"] = {"name": "get_weather", "description": WEATHER["description"]} | tools[0]["function"]  # type: ignore[operator]
    body = {"model": "sql", "messages": chat, "tools": tools}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert asked == prompt_of(engine)


async def test_the_assistants_last_message_is_continued(client: httpx2.AsyncClient, engine: Any) -> None:
    await answer_of(client, messages=[*HELLO, {"role": "assistant", "content": "Dear"}])
    assert prompt_of(engine).endswith("Dear")


async def test_sampling_fields_reach_the_engine(client: httpx2.AsyncClient, engine: Any) -> None:
    await answer_of(client, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x", "y"], max_tokens=7, priority=2)
    request = engine.seen[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 3, 7)
    assert (request.stop, request.priority) == (("x", "y"), 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reason_is_reported(client: httpx2.AsyncClient, engine: Any, stream: bool) -> None:
    async def end(**fields: Any) -> tuple[str, str | None]:
        answer = await ask(client, stream=stream, **fields)
        last = events_of(answer)[-2]["delta"] if stream else answer.json()
        return last["stop_reason"], last["stop_sequence"]

    assert await end() == ("end_turn", None)
    assert await end(max_tokens=3) == ("max_tokens", None)
    assert await end(stop_sequences=["quick", "slow"]) == ("stop_sequence", "quick")
    engine.script = CALL
    assert await end(tools=[WEATHER]) == ("tool_use", None)


async def test_thinking_text_and_calls_are_blocks(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    body = await answer_of(client, tools=[WEATHER, TIME])
    thought, text, weather, time = body["content"]
    assert thought == {"type": "thinking", "thinking": "Rain < sun?", "signature": ""}
    assert text == {"type": "text", "text": "Look:"}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Ångström"})
    assert time["input"] == {}
    assert weather["id"] != time["id"]


async def test_truncated_tool_call_keeps_text(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    body = await answer_of(client, tools=[WEATHER], max_tokens=50)
    assert body["stop_reason"] == "max_tokens"
    (text,) = body["content"][0]["input"].values()
    assert body["content"][0]["input"] == {"INVALID_JSON": text}
    assert text.startswith("{")


async def test_a_stream_has_an_event_for_each_step(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    events = events_of(await ask(client, tools=[WEATHER, TIME], stream=True))
    names = [event["type"] for event in events]
    order = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    whole = await answer_of(client, tools=[WEATHER, TIME])
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert events[-2]["usage"] == whole["usage"]
    for index, expected in enumerate(whole["content"]):
        mine = [event for event in events if event.get("index") == index]
        built = mine[0]["content_block"]
        pieces = [event["delta"] for event in mine[1:-1]]
        match built["type"]:
            case "tool_use":
                built["input"] = json.loads("".join(piece["partial_json"] for piece in pieces))
                built.pop("id")
                expected = {name: value for name, value in expected.items() if name != "id"}
            case kind:
                built[kind] += "".join(piece[kind] for piece in pieces)
        assert built == expected
        assert {piece["type"] for piece in pieces} <= {"thinking_delta", "text_delta", "input_json_delta"}


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_time"}, {"type": "any"}])
async def test_a_forced_call_has_a_grammar(client: httpx2.AsyncClient, engine: Any, choice: Any) -> None:
    engine.script = TIME_CALL
    body = await answer_of(client, tools=[WEATHER, TIME], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert body["content"][0]["name"] == "get_time"
    assert ("get_weather" in engine.seen[-1].params.grammar) == (choice["type"] == "any")


async def test_tools_are_hidden_if_tool_choice_is_disabled(client: httpx2.AsyncClient, engine: Any) -> None:
    answer = await ask(client, tools=[TIME], tool_choice={"type": "none"})
    assert answer.headers["x-loraserve-ignored"] == "tools"
    assert "get_time" not in prompt_of(engine)


async def test_an_output_format_has_a_grammar(client: httpx2.AsyncClient, engine: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    await answer_of(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"n"' in engine.seen[-1].params.grammar


async def test_thinking_turns_the_templates_switch(client: httpx2.AsyncClient, engine: Any) -> None:
    answer = await ask(client, thinking={"type": "disabled"})
    without = prompt_of(engine)
    assert "x-loraserve-ignored" not in answer.headers
    answer = await ask(client, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert answer.headers["x-loraserve-ignored"] == "thinking.display"
    assert prompt_of(engine) != without
    assert engine.seen[-1].params.thinking.num_tokens == 1024
    await ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, thinking_token_budget=8)
    assert engine.seen[-1].params.thinking.num_tokens == 8
    await ask(client)
    assert prompt_of(engine) != without


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": HELLO * 1025}, "messages"),
    ({"messages": [5]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c"}]}]}, "messages.0.content.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
        "messages.0.content.0.tool_use_id",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
        "messages.1.content.0.input",
    ),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            ]
        },
        "messages.1",
    ),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": 5}]},
            ]
        },
        "messages.2.content.0.is_error",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages.1.content.0"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": "five"}, "top_k"),
    ({"metadata": 5}, "metadata"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"metadata": {"user_id": "x" * 257}}, "metadata.user_id"),
    ({"thinking": 5}, "thinking.type"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": 5}, "output_config"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema.not",
    ),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [{"type": "telepathy", "name": "f"}]}, "tools.0.type"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "?", "input_schema": {}}]},
        "tools.1.name",
    ),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "?", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
    ({"tools": [TIME | {"defer_loading": True}]}, "tools.0"),
    ({"tools": [TIME, TIME]}, "tools.1.name"),
    (
        {"tools": [{"name": "f", "strict": True, "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}},
        "tools.0.input_schema.not",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    (
        {"tools": [TIME], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 5}},
        "tool_choice.disable_parallel_tool_use",
    ),
    *(
        ({name: value}, name)
        for name, value in (
            ("container", "c"),
            ("thread", {"type": "create"}),
            ("stop", ["x"]),
            ("user", "ann"),
            ("n", 2),
            ("response_format", {"type": "json_object"}),
            ("reasoning_effort", "low"),
            ("logprobs", True),
            ("guided_regex", "a"),
        )
    ),
]


async def test_long_answer_is_capped_to_room(client: httpx2.AsyncClient, engine: Any) -> None:
    answer = await ask(client, max_tokens=64_000)
    assert (answer.status_code, answer.headers["x-loraserve-ignored"]) == (200, "max_tokens")
    request = engine.seen[-1]
    assert request.params.max_tokens == engine.base.max_model_len - len(request.prompt_token_ids)
    whole = await ask(client, max_tokens=request.params.max_tokens)
    assert (whole.status_code, "x-loraserve-ignored" in whole.headers) == (200, False)
    assert engine.seen[-1].params.max_tokens == request.params.max_tokens
    too_long = await ask(client, messages=[{"role": "user", "content": "x" * 9000}], max_tokens=64_000)
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "messages")


async def test_claude_codes_own_parts_are_left_out(client: httpx2.AsyncClient, engine: Any) -> None:
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f3a9;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "thinking": {"type": "disabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [{"type": "url", "name": "x", "url": "https://example.com"}],
        "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "bash_20250124", "name": "bash"},
            TIME,
        ],
    }
    answer = await ask(client, **body)
    assert answer.status_code == 200, answer.text
    ignored = set(answer.headers["x-loraserve-ignored"].split(", "))
    assert {
        "context_management",
        "mcp_servers",
        "system.x-anthropic-billing-header",
        "tools.web_search_20250305",
        "tools.bash_20250124",
        "cache_control",
    } <= ignored
    first = engine.seen[-1].prompt_token_ids
    # the next request's block differs: the prompt doesn't
    body["system"][0]["text"] += " more"  # type: ignore[index, operator]
    await ask(client, **body)
    assert engine.seen[-1].prompt_token_ids == first
    prompt = engine.tokenizer.decode(first, skip_special_tokens=False)
    assert "You are an agent." in prompt
    assert "billing" not in prompt
    assert "web_search" not in prompt


async def test_thread_is_refused_with_code_clients_handle(client: httpx2.AsyncClient) -> None:
    error = (await ask(client, thread={"type": "continue", "previous_message_id": "msg_1"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in (await ask(client, container="c")).json()["error"]


async def test_bad_fields_are_named_in_anthropics_envelope(
    client: httpx2.AsyncClient, subtests: pytest.Subtests, engine: Any
) -> None:
    for fields, param in BAD:
        with subtests.test(param, fields=str(fields)[:80]):
            answer = await ask(client, **fields)
            body = answer.json()
            assert (answer.status_code, body["type"]) == (400, "error"), answer.text
            assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param), answer.text
            assert param.removesuffix(".0") in body["error"]["message"]
            assert body["request_id"] == answer.headers["request-id"]
            # a schema is compiled for an answer alone
            if "max_tokens" not in fields and not param.endswith(".not"):
                body = {"model": "sql", "messages": HELLO, **fields}
                assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 400
    assert engine.seen == []


async def test_every_refusal_has_anthropics_envelope(
    client: httpx2.AsyncClient, url: str, services: Services, engine: Any, subtests: pytest.Subtests
) -> None:
    async def refused(send: Awaitable[httpx2.Response]) -> tuple[int, str]:
        answer = await send
        body = answer.json()
        assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
        return answer.status_code, body["error"]["type"]

    async with httpx2.AsyncClient(base_url=url) as stranger:
        assert await refused(ask(stranger)) == (401, "authentication_error")
    assert await refused(client.get("/v1/messages")) == (405, "invalid_request_error")
    assert await refused(client.post("/v1/messages/batches", json={})) == (404, "not_found_error")
    assert await refused(client.post("/t/globex/v1/messages", json={})) == (404, "not_found_error")
    assert await refused(client.post("/v1/messages", content=b"{")) == (400, "invalid_request_error")
    assert await refused(client.post("/v1/messages", content=b"x" * (3 << 20))) == (413, "request_too_large")
    assert await refused(ask(client, model="none")) == (404, "not_found_error")
    assert await refused(ask(client, priority=-1)) == (403, "permission_error")
    engine.fail_after = 0
    answer = await ask(client, stream=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["retry-after"]
    assert answer.headers["retry-after-ms"]


async def test_error_in_stream_is_last_event(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 3, EngineCrashed("The engine died twice under this request.")
    events = events_of(await ask(client, stream=True))
    assert events[-1]["type"] == "error"
    error = events[-1]["error"]
    assert (error["type"], error["code"]) == ("api_error", "engine_crashed")
    assert "message_stop" not in [event["type"] for event in events]


async def test_a_message_is_billed_as_a_chat(client: httpx2.AsyncClient, services: Services) -> None:
    assert services.usage is not None
    chat = {"model": "sql", "messages": HELLO, "max_tokens": 7}
    amounts = set()
    for send in (
        client.post("/v1/chat/completions", json=chat),
        ask(client, max_tokens=7),
        ask(client, max_tokens=7, stream=True),
    ):
        before = services.usage.recorded
        assert (await send).status_code == 200
        after = services.usage.recorded
        amounts.add((after.prompt_tokens - before.prompt_tokens, after.completion_tokens - before.completion_tokens))
    assert len(amounts) == 1
    assert amounts.pop()[1] == 7


async def test_the_key_may_come_as_x_api_key(
    url: str,
    client: httpx2.AsyncClient,
    make_tenant: Callable[[str], Awaitable[Any]],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = client.headers["authorization"].removeprefix("Bearer ")
    other = (await make_tenant("globex")).key
    bad = "sk-lora-" + "q" * 40
    async with httpx2.AsyncClient(base_url=url) as plain:

        async def status(*headers: tuple[str, str | bytes]) -> int:
            body = {"model": "sql", "messages": HELLO, "max_tokens": 1}
            raw = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in headers]
            return (await plain.post("/v1/messages", json=body, headers=raw)).status_code

        assert await status(("x-api-key", key), ("anthropic-version", "2023-06-01")) == 200
        assert (await plain.get("/v1/models", headers={"x-api-key": key})).status_code == 200
        for wrong in (bad, "", "é".encode(), "x" * 600):
            assert await status(("x-api-key", wrong)) == 401
        # a gateway's own key beside it
        assert await status(("authorization", f"Bearer {key}"), ("x-api-key", bad)) == 200
        assert await status(("authorization", f"Bearer {bad}"), ("x-api-key", key)) == 401
        assert await status(("x-api-key", key), ("x-api-key", other)) == 400
    said = capfd.readouterr()
    for secret in (key, other, bad):
        assert secret not in said.out + said.err + caplog.text
