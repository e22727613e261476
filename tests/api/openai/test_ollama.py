"""/api/chat and /api/generate: what reaches the prompt and the engine, lines, ends and times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from hermes_model import CALL, TIME_CALL, base, model_dir, prompt_of

from loraserve.adapters.config.generation_config import GenerationDefaults
from loraserve.api.services import Services
from loraserve.errors import EngineCrashed
from loraserve.limits import Limits

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = f"<think>\nRain < sun?\n</think>\n\nLook:\n{CALL}\n{TIME_CALL}"
HELLO = [{"role": "user", "content": "hello"}]
IGNORED = "x-loraserve-ignored"


async def chat(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/api/chat", json={"model": "sql", "messages": HELLO, "stream": False, **body})


async def generate(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/api/generate", json={"model": "sql", "prompt": "hello", "stream": False, **body})


def whole_of(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    whole: dict[str, Any] = answer.json()
    return whole


def lines_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_whole_chat_has_ollama_shape(client: httpx2.AsyncClient) -> None:
    answer = await chat(client, options={"seed": 2, "num_predict": 10})
    body = whole_of(answer)
    times = [body.pop(name) for name in ("total_duration", "prompt_eval_duration", "eval_duration", "load_duration")]
    assert all(isinstance(time, int) for time in times)
    assert body.pop("created_at").endswith("Z")
    count = body.pop("prompt_eval_count")
    assert body == {
        "model": "sql",
        "message": {"role": "assistant", "content": "sql says 2"},
        "done": True,
        "done_reason": "length",
        "eval_count": 10,
    }
    total, prompt, made, load = times
    # the fake engine's own figures: 3 ms and 2 ms
    assert (prompt, load) == (3_000_000, 2_000_000)
    assert 0 < made < total < 60_000_000_000
    usage = (await client.post("/v1/chat/completions", json={"model": "sql", "messages": HELLO})).json()["usage"]
    assert count == usage["prompt_tokens"]
    assert answer.headers["x-loraserve-adapter"] == "sql@1"
    assert IGNORED not in answer.headers


async def test_chat_streams_lines_by_default(client: httpx2.AsyncClient, engine: Any) -> None:
    body = {"model": "sql:latest", "messages": HELLO, "options": {"seed": 3}}
    lines = lines_of(await client.post("/api/chat", json=body))
    assert engine.num_taken > 5
    assert {line["model"] for line in lines} == {"sql:latest"}
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(line["message"]["content"] for line in lines)
    last = lines[-1]
    assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "stop")
    whole = whole_of(await chat(client, options={"seed": 3}))
    assert whole["message"]["content"] == text
    assert whole["eval_count"] == last["eval_count"]
    assert set(last) == set(whole)
    assert set(lines[0]) == {"model", "created_at", "message", "done"}


async def test_generate_answers_prompt_as_user_message(client: httpx2.AsyncClient, engine: Any) -> None:
    body = whole_of(await generate(client, system="be brief", options={"seed": 2, "num_predict": 10}))
    assert (body["response"], body["done_reason"]) == ("sql says 2", "length")
    assert "message" not in body
    prompt = prompt_of(engine)
    await chat(client, messages=[{"role": "system", "content": "be brief"}, *HELLO])
    assert prompt_of(engine) == prompt
    lines = lines_of(await generate(client, stream=True, options={"seed": 2, "num_predict": 10}))
    assert "".join(line["response"] for line in lines) == "sql says 2"


@pytest.mark.parametrize("stream", [False, True])
async def test_raw_prompt_passes_template(client: httpx2.AsyncClient, engine: Any, stream: bool) -> None:
    engine.script = "<think>\nnot parsed\n</think>"
    answer = await generate(client, raw=True, stream=stream, think=True, options={"num_predict": 200})
    parts = lines_of(answer) if stream else [whole_of(answer)]
    assert prompt_of(engine) == "hello"
    # markers are special tokens, which a plain text leaves out
    assert "".join(part["response"] for part in parts) == "\nnot parsed\n"
    assert answer.headers[IGNORED] == "think"


async def test_raw_prompt_may_have_format(client: httpx2.AsyncClient, engine: Any) -> None:
    await generate(client, raw=True, format={"type": "object", "properties": {"n": {"type": "integer"}}})
    assert '"n"' in engine.seen[-1].params.grammar


async def test_thinking_and_calls_are_separate_fields(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    message = whole_of(await chat(client, tools=[WEATHER, TIME]))["message"]
    assert (message["thinking"], message["content"]) == ("Rain < sun?", "Look:")
    weather, time = message["tool_calls"]
    assert weather["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Ångström"}}
    assert time["function"] == {"index": 1, "name": "get_time", "arguments": {}}
    assert weather["id"] != time["id"]
    assert whole_of(await generate(client))["thinking"] == "Rain < sun?"


async def test_streamed_call_has_single_line(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = THOUGHT
    lines = lines_of(await chat(client, tools=[WEATHER, TIME], stream=True))
    messages = [line["message"] for line in lines]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["index"], call["name"], call["arguments"]) for call in calls] == [
        (0, "get_weather", {"city": "Ångström"}),
        (1, "get_time", {}),
    ]
    assert "".join(message.get("thinking", "") for message in messages) == "Rain < sun?"
    assert "".join(message["content"] for message in messages) == "Look:"
    assert (lines[-1]["done_reason"], "tool_calls" in messages[-1]) == ("stop", False)


async def test_truncated_call_keeps_text(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = CALL
    for stream in (False, True):
        answer = await chat(client, tools=[WEATHER], stream=stream, options={"num_predict": 50})
        parts = lines_of(answer) if stream else [whole_of(answer)]
        (call,) = [call for part in parts for call in part["message"].get("tool_calls", ())]
        assert list(call["function"]["arguments"]) == ["INVALID_JSON"]
        assert parts[-1]["done_reason"] == "length"


async def test_results_find_calls_without_ids(client: httpx2.AsyncClient, engine: Any) -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": "Å"}}},
        {"function": {"index": 1, "name": "get_time", "arguments": {}}},
    ]
    assistant = {"role": "Assistant", "content": "", "thinking": "Hm.", "tool_calls": calls, "images": []}
    by_name = [
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
    ]
    answer = await chat(client, messages=[*HELLO, assistant, *by_name], tools=[WEATHER, TIME])
    assert answer.status_code == 200, answer.text
    found = prompt_of(engine)
    ids = [{**call, "id": f"c{index}", "type": "function"} for index, call in enumerate(calls)]
    openai = [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": ids},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c0"},
    ]
    body = {"model": "sql", "messages": openai, "tools": [WEATHER, TIME]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert prompt_of(engine) == found
    in_order = [{"role": "tool", "content": text} for text in ("rain", "noon")]
    assert (await chat(client, messages=[*HELLO, assistant, *in_order], tools=[WEATHER])).status_code == 200
    alone = await chat(client, messages=[*HELLO, {"role": "tool", "content": "rain", "tool_name": "get_weather"}])
    assert alone.status_code == 200


async def test_last_assistant_message_is_continued(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client, messages=[*HELLO, {"role": "assistant", "content": "Dear"}])
    assert prompt_of(engine).endswith("Dear")


async def test_options_reach_the_engine(client: httpx2.AsyncClient, engine: Any) -> None:
    options = {"temperature": 0.5, "top_p": 0.7, "top_k": 3, "min_p": 0.1, "seed": 5, "num_predict": 7, "stop": ["x"]}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_last_n": -1}
    answer = await chat(client, options=options, priority=2)
    assert IGNORED not in answer.headers
    request = engine.seen[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.7, 3, 0.1, 5)
    assert (params.max_tokens, request.stop, request.priority) == (7, ("x",), 2)
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    assert penalties == (1.5, 0.5, -0.5)
    await chat(client, options=options | {"repeat_last_n": 0, "stop": "y", "num_predict": "9", "top_k": 3.0})
    params = engine.seen[-1].params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert (engine.seen[-1].stop, params.max_tokens, params.top_k) == (("y",), 9, 3)


async def test_silent_request_has_ollama_defaults(client: httpx2.AsyncClient, engine: Any) -> None:
    for options in (None, {}, {"seed": -1}, {"seed": -1}):
        await chat(client, options=options)
    params = engine.seen[0].params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.8, 0.9, 40, 1)
    assert len({request.params.seed for request in engine.seen}) == 4


class TestVersionDefaults:
    @pytest.fixture
    def base_defaults(self) -> GenerationDefaults:
        return GenerationDefaults(temperature=0.6, top_k=20, max_default_tokens=3)

    async def test_base_defaults_precede_ollama_defaults(self, client: httpx2.AsyncClient, engine: Any) -> None:
        await chat(client)
        params = engine.seen[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 3)


@pytest.mark.parametrize("num_predict", [-1, -2, 1_000_000])
async def test_answer_may_fill_context(client: httpx2.AsyncClient, engine: Any, num_predict: int) -> None:
    answer = await chat(client, options={"num_predict": num_predict})
    request = engine.seen[-1]
    assert request.params.max_tokens == engine.base.max_model_len - len(request.prompt_token_ids)
    assert answer.headers.get(IGNORED) == ("options.num_predict" if num_predict > 0 else None)


async def test_ineffective_fields_are_named(client: httpx2.AsyncClient) -> None:
    options = {"num_ctx": 4096, "num_thread": 8, "repeat_last_n": 64, "tempature": 1, "typical_p": 1.0}
    answer = await chat(
        client,
        options=options | {"mirostat": 0, "mirostat_tau": 5.0},
        keep_alive="5m",
        truncate=True,
        shift=True,
        unknown=1,
    )
    assert set(answer.headers[IGNORED].split(", ")) == {
        "unknown",
        "options.mirostat_tau",
        "options.num_ctx",
        "options.num_thread",
        "options.tempature",
        "options.repeat_last_n",
        "keep_alive",
        "truncate",
        "shift",
    }
    assert answer.headers["x-loraserve-did-you-mean"] == "options.tempature=options.temperature"
    nulls = await chat(client, format=None, options={"num_ctx": None}, keep_alive=None, tools=[], think=None, raw=False)
    assert nulls.headers[IGNORED] == "raw"


async def test_think_turns_template_switch(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client, think=True)
    thinking = prompt_of(engine)
    for send in (chat(client, think=False), generate(client, think=False)):
        assert IGNORED not in (await send).headers
        assert prompt_of(engine) != thinking
    assert (await chat(client, think="high")).headers[IGNORED] == "think"


async def test_format_becomes_grammar(client: httpx2.AsyncClient, engine: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for send, expected in (
        (chat(client, format="json"), "object"),
        (chat(client, format=schema), '"n"'),
        (generate(client, format=schema), '"n"'),
    ):
        assert (await send).status_code == 200
        assert expected in engine.seen[-1].params.grammar
    await chat(client, format="")
    assert engine.seen[-1].params.grammar == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_reported(client: httpx2.AsyncClient, stream: bool) -> None:
    answer = await generate(client, logprobs=True, top_logprobs=2, stream=stream, options={"num_predict": 4})
    parts = lines_of(answer) if stream else [whole_of(answer)]
    tokens = [token for part in parts for token in part.get("logprobs", ())]
    assert "".join(token["token"] for token in tokens) == "sql "
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_request_without_prompt_loads_adapter(client: httpx2.AsyncClient, engine: Any, path: str) -> None:
    for keep_alive, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
        engine.warmed.clear()
        answer = await client.post(path, json={"model": "sql", "keep_alive": keep_alive})
        body = whole_of(answer)
        assert (body["done"], body["done_reason"]) == (True, reason)
        assert body.get("response", "") == body.get("message", {"content": ""})["content"] == ""
        assert [ref.name for ref in engine.warmed] == (["sql"] if reason == "load" else [])
        assert answer.headers.get(IGNORED) == (None if keep_alive is None else "keep_alive")
        assert answer.headers["x-loraserve-adapter"] == "sql@1"
    assert whole_of(await client.post(path, json={"model": engine.base.id, "messages": []}))["done"] is True
    assert (await client.post(path, json={"model": "absent"})).status_code == 404
    assert engine.seen == []


class TestSilence:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(silent_stream_s=0.05)

    @pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
    async def test_silent_stream_begins_with_empty_lines(
        self, client: httpx2.AsyncClient, engine: Any, path: str
    ) -> None:
        engine.steps = asyncio.Semaphore(0)
        body = {"model": "sql", "messages": HELLO, "prompt": "hello", "options": {"num_predict": 3}}
        async with client.stream("POST", path, json=body) as response:
            lines = response.aiter_lines()
            for _ in range(2):
                line = json.loads(await anext(lines))
                assert line["done"] is False
                assert line.get("response", "") == line.get("message", {"content": ""})["content"] == ""
            for _ in range(3):
                engine.steps.release()
            last = [json.loads(line) async for line in lines][-1]
        assert (last["done"], last["eval_count"]) == (True, 3)


async def test_error_in_stream_is_last_line(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 3, EngineCrashed("The engine died twice under this request.")
    for send in (chat(client, stream=True), generate(client, stream=True)):
        lines = lines_of(await send)
        assert lines[-1]["error"].startswith("The engine died twice")
        assert lines[-1]["code"] == "engine_crashed"
        assert not any(line.get("done") for line in lines)


async def test_chat_is_billed_as_openais(client: httpx2.AsyncClient, services: Services) -> None:
    assert services.usage is not None
    options = {"num_predict": 7}
    amounts = set()
    for send in (
        client.post("/v1/chat/completions", json={"model": "sql", "messages": HELLO, "max_tokens": 7}),
        *(form(client, options=options, stream=stream) for form in (chat, generate) for stream in (False, True)),
    ):
        before = services.usage.recorded
        assert (await send).status_code == 200
        after = services.usage.recorded
        amounts.add((after.prompt_tokens - before.prompt_tokens, after.completion_tokens - before.completion_tokens))
    assert len(amounts) == 1
    assert amounts.pop()[1] == 7


async def test_latest_tag_finds_model(
    client: httpx2.AsyncClient, engine: Any, publish: Callable[..., Any], services: Services
) -> None:
    base_id = engine.base.id

    async def answering(model: str) -> str:
        body = whole_of(await chat(client, model=model))
        assert body["model"] == model
        adapter = engine.seen[-1].adapter
        return "" if adapter is None else adapter.name

    assert [await answering(name) for name in ("sql", "sql:latest", "sql@1:latest", f"{base_id}:sql")] == ["sql"] * 4
    assert [await answering(name) for name in (base_id, f"{base_id}:latest")] == ["", ""]
    await publish("pirate", 1)
    body = whole_of(await chat(client, model="sql+0.5*pirate:latest"))
    assert body["model"] == "sql+0.5*pirate:latest"
    assert len(engine.seen[-1].adapter.parts) == 2
    assert await answering("pirate:latest") == "pirate"
    # names that end in the tag themselves
    await publish("poet:latest", 2)
    assert await answering("poet:latest") == "poet:latest"
    await publish("poet", 3)
    assert await answering("poet:latest") == "poet"
    assert await answering("poet:latest:latest") == "poet:latest"
    services.settings = services.settings.model_copy(update={"model_aliases": (f"llama3={base_id}",)})
    assert await answering("llama3:latest") == ""
    # programs that list models by /api/tags and chat by /v1
    answer = await client.post("/v1/chat/completions", json={"model": "sql:latest", "messages": HELLO})
    assert (answer.status_code, answer.json()["model"]) == (200, "sql:latest")
    for absent in ("absent:latest", ":latest", "absent"):
        assert (await chat(client, model=absent)).status_code == 404
