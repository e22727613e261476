"""Tools and reasoning in chats: what reaches the prompt, the engine and the client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest
from hermes_model import CALL, TIME_CALL, base, model_dir, prompt_of

from loraserve.api.services import Services
from loraserve.limits import LIMITS
from loraserve.text.chat_format import ChatFormat
from loraserve.text.chat_template import CompiledTemplate

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = [{"role": "user", "content": "What's the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


async def chat(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": "sql", "messages": HELLO, **body})


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def deltas_of(response: httpx2.Response, index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for event in events_of(response) for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def message_of(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that deltas make, as a client puts it together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for delta in deltas:
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                message["calls"].append([call["id"], call["function"]["name"], call["function"]["arguments"]])
            else:
                assert set(call) == {"index", "function"}
                message["calls"][call["index"]][2] += call["function"]["arguments"]
    return message


async def test_a_call_is_an_entry_of_the_message(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"Let me look.\n{CALL}\n{TIME_CALL}"
    body = (await chat(client, tools=[WEATHER, TIME])).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["role"], message["content"], message["refusal"]) == ("assistant", "Let me look.", None)
    assert choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", first["id"])
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Ångström"}'}
    assert second["function"] == {"name": "get_time", "arguments": "{}"}
    assert body["usage"]["completion_tokens"] > 20


async def test_a_call_alone_has_null_content(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    message = (await chat(client, tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_answer_without_call_is_unchanged_by_tools(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "No <tool is> needed. "
    for extra in ({}, {"tools": [WEATHER]}):
        choice = (await chat(client, **extra)).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "No <tool is> needed. ", "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_calls_are_streamed_as_openai_does(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"Hm.\n{CALL}{TIME_CALL}"
    response = await chat(client, tools=[WEATHER, TIME], stream=True, stream_options={"include_usage": True})
    *events, last = events_of(response)
    deltas = deltas_of(response)
    assert deltas[0] == {"role": "assistant", "content": ""}
    first = next(delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    message = message_of(deltas)
    assert message["content"] == "Hm."
    assert [call[1:] for call in message["calls"]] == [["get_weather", '{"city": "Ångström"}'], ["get_time", "{}"]]
    assert len([delta for delta in deltas if "tool_calls" in delta]) > 10, "arguments come piece by piece"
    assert deltas[-1] == {}
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert last["usage"]["completion_tokens"] > 20


async def test_each_choice_has_separate_calls(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    whole = (await chat(client, tools=[WEATHER], n=3)).json()["choices"]
    response = await chat(client, tools=[WEATHER], n=3, stream=True)
    streamed = [message_of(deltas_of(response, index)) for index in range(3)]
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole] + [one["calls"][0][0] for one in streamed]
    assert len(set(ids)) == 6
    assert {one["calls"][0][2] for one in streamed} == {'{"city": "Ångström"}'}


async def test_single_call_remains_if_parallel_calls_are_off(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"{CALL}\n{TIME_CALL}"
    options = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    (call,) = (await chat(client, **options)).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert len(message_of(deltas_of(await chat(client, **options, stream=True)))["calls"]) == 1


async def test_truncated_call_finishes_with_length(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    choice = (await chat(client, tools=[WEATHER], max_tokens=50)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


async def test_logprobs_and_token_ids_are_of_all_tokens(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"Hm.\n{CALL}"
    options: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    whole = (await chat(client, **options)).json()["choices"][0]
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"]) > 20
    choices = [choice for event in events_of(await chat(client, **options, stream=True)) for choice in event["choices"]]
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [id_ for choice in choices for id_ in choice.get("token_ids", ())] == whole["token_ids"]


async def test_stop_string_ends_text_before_tool_parsing(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    message = (await chat(client, tools=[WEATHER], stop=["stroem", "ström"])).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Ång'


async def test_special_tokens_without_tool_meaning_stay_hidden(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"Hm.<|im_start|></tool_call>\n{CALL}<|im_end|>"
    message = (await chat(client, tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["content"] == "Hm."
    assert len(message["tool_calls"]) == 1
    shown = (await chat(client, tools=[WEATHER], skip_special_tokens=False)).json()["choices"][0]["message"]
    assert shown["content"] == "Hm.<|im_start|></tool_call>\n<|im_end|>".replace("\n", "")


async def test_tools_and_calls_reach_the_prompt(client: httpx2.AsyncClient, engine: Any) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Which city?",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Å"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]
    assert (await chat(client, messages=messages, tools=[WEATHER, TIME])).status_code == 200
    prompt = prompt_of(engine)
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt
    assert '"get_time", "parameters": {"type": "object", "properties": {}}' in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Å"}}' in prompt
    assert '{"name": "get_time", "arguments": {}}' in prompt
    assert "<think>\nWhich city?\n</think>" in prompt
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in prompt


async def test_a_tools_strictness_is_not_the_templates_business(client: httpx2.AsyncClient, engine: Any) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": False}}  # type: ignore[dict-item]
    await chat(client, tools=[WEATHER])
    before = prompt_of(engine)
    await chat(client, tools=[strict])
    assert prompt_of(engine) == before


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
    ],
)
async def test_a_forced_call_has_a_grammar(client: httpx2.AsyncClient, engine: Any, choice: Any) -> None:
    engine.script = TIME_CALL
    response = await chat(client, tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"
    grammar = engine.seen[-1].params.grammar
    assert "get_time" in grammar
    assert ("get_weather" in grammar) == (choice == "required")
    assert ("get_weather" in prompt_of(engine)) == (choice == "required")


async def test_optional_tools_have_no_grammar(client: httpx2.AsyncClient, engine: Any) -> None:
    for choice in ("auto", None, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}):
        assert (await chat(client, tools=[WEATHER, TIME], tool_choice=choice)).status_code == 200
        assert engine.seen[-1].params.grammar == ""


async def test_strict_tool_has_grammar_after_marker(client: httpx2.AsyncClient, engine: Any) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert (await chat(client, tools=[strict, TIME])).status_code == 200
    assert "get_weather" in engine.seen[-1].params.grammar


async def test_response_format_applies_to_answers_without_calls(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = '{"n": 5}'
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    choice = (await chat(client, tools=[WEATHER], response_format=wanted)).json()["choices"][0]
    assert choice["message"]["content"] == '{"n": 5}'
    grammars = json.loads(engine.seen[-1].params.grammar)["grammars"]
    assert [grammar.get("name") for grammar in grammars] == [None, "answer", "arguments_0", "options"]
    assert "| @answer" in grammars[0]["lark_grammar"]
    engine.script = CALL
    await chat(client, tools=[WEATHER], response_format=wanted, tool_choice="required")
    assert "@answer" not in engine.seen[-1].params.grammar


async def test_uncallable_tools_are_ignored_and_reported(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    plain, answered = await chat(client), await chat(client, tools=[WEATHER], tool_choice="none")
    assert answered.status_code == 200
    assert answered.headers["x-loraserve-ignored"] == "tools"
    assert engine.seen[0].prompt_token_ids == engine.seen[1].prompt_token_ids
    assert "tool_calls" not in answered.json()["choices"][0]["message"]
    assert "x-loraserve-ignored" not in plain.headers
    nothing = await chat(client, tools=[], tool_choice="none", parallel_tool_calls=True)
    assert "x-loraserve-ignored" not in nothing.headers


async def test_reasoning_is_separate_from_answer(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = f"<think>\nRain < sun?\n</think>\n\nLook:\n{CALL}"
    choice = (await chat(client, tools=[WEATHER])).json()["choices"][0]
    message = choice["message"]
    assert message["content"] == "Look:"
    assert message["reasoning_content"] == message["reasoning"] == "Rain < sun?"
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    streamed = message_of(deltas_of(await chat(client, tools=[WEATHER], stream=True)))
    assert (streamed["content"], streamed["reasoning_content"]) == ("Look:", "Rain < sun?")
    without_tools = (await chat(client)).json()["choices"][0]["message"]
    assert without_tools["reasoning_content"] == "Rain < sun?"
    assert without_tools["content"].startswith("Look:")


async def test_prompt_closing_reasoning_yields_no_reasoning(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "<think>literally"
    message = (await chat(client, chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "literally", "refusal": None}


async def test_truncated_prompt_still_closes_reasoning(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "<think>literally"
    how: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "truncate_prompt_tokens": 20}
    message = (await chat(client, **how)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "literally", "refusal": None}


async def test_truncated_reasoning_has_no_content(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "<think>\nRain < sun?"
    choice = (await chat(client, max_tokens=6)).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Rain"
    assert choice["finish_reason"] == "length"


async def test_tokenize_counts_a_prompt_with_tools(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client, tools=[WEATHER])
    body = (await client.post("/tokenize", json={"messages": HELLO, "tools": [WEATHER]})).json()
    assert body["tokens"] == list(engine.seen[-1].prompt_token_ids)


async def test_calls_are_counted(client: httpx2.AsyncClient, engine: Any, services: Services) -> None:
    engine.script = f"{CALL}\n{TIME_CALL}"
    await chat(client, tools=[WEATHER, TIME])
    await chat(client, tools=[WEATHER, TIME], stream=True)
    assert services.metrics.registry.get_sample_value("loraserve_tool_calls_total") == 4


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def called(**call: Any) -> list[dict[str, Any]]:
    one = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return [*HELLO, {"role": "assistant", "tool_calls": [one]}]


DEEP: Any = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}

BAD = [
    ({"tools": "all"}, "tools", "invalid_value"),
    ({"tools": {}}, "tools", "invalid_value"),
    ({"tools": False}, "tools", "invalid_value"),
    ({"tools": ["f"]}, "tools.0", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools.0", "invalid_value"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type", "unsupported_parameter"),
    ({"tools": [{**TIME, "type": 5}]}, "tools.0.type", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [tool(name="a b")]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [tool(name="x" * 65)]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [tool(), tool()]}, "tools.1.function.name", "invalid_value"),
    ({"tools": [tool(description=5)]}, "tools.0.function.description", "invalid_value"),
    ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "invalid_value"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters", "invalid_value"),
    ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", "invalid_value"),
    ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools", "invalid_value"),
    ({"tools": [tool(description="x" * LIMITS.max_tools_bytes)]}, "tools", "payload_too_large"),
    ({"tools": [tool(parameters=DEEP)]}, None, "invalid_value"),
    ({"tools": [TIME], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": [TIME], "tool_choice": 5}, "tool_choice", "invalid_value"),
    ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.function.name", "invalid_value"),
    (
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", "invalid_value"),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
        "tool_choice.allowed_tools",
        "invalid_value",
    ),
    ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0", "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls", "invalid_value"),
    ({"messages": called(id=None)}, "messages.1.tool_calls.0.id", "invalid_value"),
    ({"messages": called(type="custom")}, "messages.1.tool_calls.0", "invalid_value"),
    ({"messages": called(function={"arguments": "{}"})}, "messages.1.tool_calls.0.function.name", "invalid_value"),
    (
        {"messages": called(function={"name": "f", "arguments": 5})},
        "messages.1.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages.0.tool_calls", "invalid_value"),
    ({"messages": [{"role": "assistant", "reasoning_content": 5}]}, "messages.0.reasoning_content", "invalid_value"),
    (
        {"tools": [tool(strict=True, parameters={"not": {"type": "null"}})], "tool_choice": "required"},
        "tools.0.function.parameters.not",
        "unsupported_parameter",
    ),
    (
        {"tools": [tool(parameters={"$ref": "https://example.com/x"})], "tool_choice": "required"},
        "tools.0.function.parameters.$ref",
        "unsupported_parameter",
    ),
    (
        {"tools": [tool(parameters={"properties": {"a": {"type": 5}}})], "tool_choice": "required"},
        "tools.0.function.parameters.properties.a",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
async def test_a_bad_field_is_named(
    client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any], param: str | None, code: str
) -> None:
    response = await chat(client, **fields)
    assert response.status_code in (400, 413), response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error["param"] == param
    assert not engine.seen


async def test_deprecated_fields_name_replacements(client: httpx2.AsyncClient) -> None:
    for name, value in (("functions", [{"name": "f"}]), ("function_call", {"name": "f"})):
        assert "Send tools" in (await chat(client, **{name: value})).json()["error"]["message"]


async def test_arguments_without_valid_json_are_shown_verbatim(client: httpx2.AsyncClient, engine: Any) -> None:
    messages = called(function={"name": "f", "arguments": "{oops"})
    assert (await chat(client, messages=messages)).status_code == 200
    assert '"arguments": {oops}' in prompt_of(engine)


@pytest.mark.parametrize(
    "value",
    ['"\\ud800"', "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 33 + "]" * 33, "[" * 900 + "]" * 900, "[" * 1500],
)
async def test_arguments_unwritable_by_templates_are_shown_verbatim(
    client: httpx2.AsyncClient, engine: Any, value: str
) -> None:
    # most were a 500: they can't be encoded, or written within the depth of the interpreter
    arguments = f'{{"a": {value}}}'
    messages = called(function={"name": "f", "arguments": arguments})
    assert (await chat(client, messages=messages, truncate_prompt_tokens=4000)).status_code == 200
    if len(arguments) < 3000:
        assert f'"arguments": {arguments}' in prompt_of(engine)


SILENT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "
TEMPLATES = {
    "system": SILENT_TEMPLATE.replace("<{{", "{# a system message #}<{{"),
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('No System role') }}{% endif %}"
    + SILENT_TEMPLATE,
}


def serve_template(services: Services, template: str, parser: str = "auto") -> None:
    template_of: Any = CompiledTemplate({"default": template}, {})
    services.chat_format = ChatFormat(template_of, services.tokenizer, tool_call_parser=parser)


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_prompt_lists_tools_for_silent_template(
    kind: str, client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    serve_template(services, TEMPLATES[kind])
    engine.script = CALL
    body = (await chat(client, tools=[WEATHER, TIME])).json()
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], body["choices"][0]["finish_reason"]) == ("get_weather", "tool_calls")
    prompt, role = prompt_of(engine), "system" if kind == "system" else "user"
    assert prompt.startswith(f"<{role}> You can call functions.")
    assert f"<tools>\n{json.dumps(WEATHER['function'])}\n" in prompt
    assert prompt.endswith("What's the weather?\n<assistant> ")
    assert prompt.count("<user>") == 1
    # the calls and their results, once, whether there are tools now or not
    messages = [{"role": "system", "content": "Be brief."}] if kind == "system" else []
    messages += [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
    ]
    for tools in ([WEATHER], []):
        engine.script = "Both."
        answer = await chat(client, messages=messages, tools=tools)
        assert answer.json()["choices"][0]["message"]["content"] == "Both."
        prompt = prompt_of(engine)
        assert prompt.count(f"<tool_call>\n{CALL.split(chr(10))[1]}\n</tool_call>") == 2
        assert prompt.endswith(
            "<user> <tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\n<assistant> "
        )
        assert ("You can call functions." in prompt) == bool(tools)
        assert prompt.startswith("<system> Be brief." if kind == "system" else "<user>")


async def test_generic_parser_tells_tools_to_any_template(
    client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    services.chat_format = ChatFormat(services.chat_format.template, services.tokenizer, tool_call_parser="generic")
    assert (await chat(client, tools=[TIME])).status_code == 200
    prompt = prompt_of(engine)
    assert (prompt.count("You can call functions."), prompt.count("get_time")) == (1, 1)


async def test_template_without_tool_support_refuses_tools(client: httpx2.AsyncClient, services: Services) -> None:
    template = services.chat_format.template
    template._read.discard("tools")
    response = await chat(client, tools=[TIME])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "doesn't read tools" in response.json()["error"]["message"]
    assert (await chat(client, tools=[TIME], tool_choice="none")).status_code == 200
    template._read.add("tools")
    services.chat_format = ChatFormat(template, services.tokenizer, tool_call_parser="none", reasoning_parser="none")
    assert "--tool-call-parser" in (await chat(client, tools=[TIME])).json()["error"]["message"]
