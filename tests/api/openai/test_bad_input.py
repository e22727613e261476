"""Every bad body is a clear 4xx that names the field, never a 5xx, never an echo,
and reaches no engine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from loraserve.api.inference.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

MARK = "SECRETMARKER"
MESSAGE = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"model": "sql", "prompt": "x", **fields}).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"model": "sql", "messages": [MESSAGE], **fields}).encode()


def raw(body: bytes, path: str = "/v1/completions") -> tuple[str, bytes]:
    return path, body


# (what, (path, body), status, param, code)
CASES: list[tuple[str, tuple[str, bytes], int, str | None, str]] = [
    # JSON
    ("empty body", raw(b""), 400, None, "invalid_value"),
    ("not json", raw(b'{"model": SECRETMARKER'), 400, None, "invalid_value"),
    ("an array", raw(b'["SECRETMARKER"]'), 400, None, "invalid_value"),
    ("NaN", raw(b'{"model": "sql", "prompt": "x", "temperature": NaN}'), 400, None, "invalid_value"),
    ("Infinity", raw(b'{"model": "sql", "prompt": "x", "temperature": -Infinity}'), 400, None, "invalid_value"),
    ("1e400", raw(b'{"model": "sql", "prompt": "x", "temperature": 1e400}'), 400, None, "invalid_value"),
    ("an endless integer", raw(b'{"model": "sql", "prompt": [' + b"9" * 6000 + b"]}"), 400, None, "invalid_value"),
    ("duplicate keys", raw(b'{"model": "sql", "model": "SECRETMARKER"}'), 400, None, "invalid_value"),
    ("a lone surrogate", raw(b'{"model": "sql", "prompt": "SECRETMARKER\\ud800"}'), 400, None, "invalid_value"),
    ("a lone surrogate in a key", raw(b'{"model": "sql", "prompt": "x", "\\udc00": 1}'), 400, None, "invalid_value"),
    ("not UTF-8", raw(b'{"model": "sql", "prompt": "\xff\xfe"}'), 400, None, "invalid_value"),
    ("too deep", raw(b'{"model": "sql", "prompt": ' + b"[" * 50 + b"]" * 50 + b"}"), 400, None, "invalid_value"),
    ("far too deep", raw(b"[" * 500_000), 400, None, "invalid_value"),
    ("2 MiB and more", raw(b'{"prompt": "' + b"x" * (2 << 20) + b'"}'), 413, None, "payload_too_large"),
    # model
    ("no model", raw(b'{"prompt": "x"}'), 400, "model", "invalid_value"),
    ("model null", completion(model=None), 400, "model", "invalid_value"),
    ("model a number", completion(model=3), 400, "model", "invalid_value"),
    ("model empty", completion(model=""), 400, "model", "invalid_value"),
    ("model absent", completion(model="nobody"), 404, "model", "model_not_found"),
    ("version absent", completion(model="sql@9"), 404, "model", "model_not_found"),
    ("version huge", completion(model="sql@" + "9" * 30), 404, "model", "model_not_found"),
    ("alias absent", completion(model="sql@canary"), 404, "model", "model_not_found"),
    ("model with a path", completion(model="../../SECRETMARKER"), 404, "model", "model_not_found"),
    ("model with a NUL", completion(model="sql\0SECRETMARKER"), 404, "model", "model_not_found"),
    # prompt
    ("no prompt", raw(b'{"model": "sql"}'), 400, "prompt", "invalid_value"),
    ("prompt empty", completion(prompt=""), 400, "prompt", "invalid_value"),
    ("prompt no list", completion(prompt=[]), 400, "prompt", "invalid_value"),
    ("prompt an object", completion(prompt={"a": MARK}), 400, "prompt", "invalid_value"),
    ("prompt mixed", completion(prompt=[MARK, 3]), 400, "prompt", "invalid_value"),
    ("prompt of floats", completion(prompt=[1.5]), 400, "prompt", "invalid_value"),
    ("prompt of booleans", completion(prompt=[True]), 400, "prompt", "invalid_value"),
    ("an empty prompt among others", completion(prompt=["a", ""]), 400, "prompt.1", "invalid_value"),
    ("token id negative", completion(prompt=[1, -1]), 400, "prompt.1", "invalid_value"),
    ("token id at the width", completion(prompt=[[1], [2, 260]]), 400, "prompt.1.1", "invalid_value"),
    ("token id huge", completion(prompt=[10**30]), 400, "prompt.0", "invalid_value"),
    (
        "a token that the tokenizer has and the model lacks",
        completion(prompt="a<|late|>"),
        400,
        "prompt.1",
        "invalid_value",
    ),
    (
        "such a token in a message",
        chat(messages=[{"role": "user", "content": "a<|late|>"}]),
        400,
        "messages",
        "invalid_value",
    ),
    ("too many prompts", completion(prompt=["x"] * 129), 400, "prompt", "invalid_value"),
    ("too many choices", completion(prompt=["x"] * 100, n=2), 400, "n", "invalid_value"),
    (
        "a million tokens",
        raw(b'{"model": "sql", "prompt": [' + b"1," * 900_000 + b"1]}"),
        400,
        "prompt",
        "context_length_exceeded",
    ),
    ("over 1 MiB of text", completion(prompt="x" * ((1 << 20) + 1)), 413, "prompt", "payload_too_large"),
    ("over the context", completion(prompt="x" * 300), 400, "prompt", "context_length_exceeded"),
    ("as long as the context", completion(prompt="x" * 256), 400, "prompt", "context_length_exceeded"),
    ("over the context with max_tokens", completion(max_tokens=256), 400, "prompt", "context_length_exceeded"),
    (
        "scoring over the context",
        completion(prompt="x" * 257, max_tokens=0, echo=True),
        400,
        "prompt",
        "context_length_exceeded",
    ),
    # numbers and their ranges
    ("max_tokens below -1", completion(max_tokens=-2), 400, "max_tokens", "invalid_value"),
    ("max_tokens 0 without echo", completion(max_tokens=0), 400, "max_tokens", "invalid_value"),
    ("max_tokens a string", completion(max_tokens=MARK), 400, "max_tokens", "invalid_value"),
    ("max_tokens a float", completion(max_tokens=1.5), 400, "max_tokens", "invalid_value"),
    ("max_tokens a boolean", completion(max_tokens=True), 400, "max_tokens", "invalid_value"),
    ("min_tokens above", completion(max_tokens=2, min_tokens=3), 400, "min_tokens", "invalid_value"),
    ("temperature negative", completion(temperature=-0.1), 400, "temperature", "invalid_value"),
    ("temperature a word", completion(temperature=MARK), 400, "temperature", "invalid_value"),
    ("top_p over 1", completion(top_p=1.01), 400, "top_p", "invalid_value"),
    ("top_k below -1", completion(top_k=-2), 400, "top_k", "invalid_value"),
    ("min_p over 1", completion(min_p=2), 400, "min_p", "invalid_value"),
    ("repetition_penalty 0", completion(repetition_penalty=0), 400, "repetition_penalty", "invalid_value"),
    ("presence_penalty 3", completion(presence_penalty=3), 400, "presence_penalty", "invalid_value"),
    ("frequency_penalty -3", completion(frequency_penalty=-3), 400, "frequency_penalty", "invalid_value"),
    ("n 0", completion(n=0), 400, "n", "invalid_value"),
    ("n 129", completion(n=129), 400, "n", "invalid_value"),
    ("seed past int64", completion(seed=1 << 63), 400, "seed", "invalid_value"),
    ("logprobs 21", completion(logprobs=21), 400, "logprobs", "invalid_value"),
    ("logprobs a boolean", completion(logprobs=True), 400, "logprobs", "invalid_value"),
    ("stream a string", completion(stream="yes"), 400, "stream", "invalid_value"),
    (
        "stream_options without stream",
        chat(stream_options={"include_usage": True}),
        400,
        "stream_options",
        "invalid_value",
    ),
    ("stream_options a list", completion(stream=True, stream_options=[1]), 400, "stream_options", "invalid_value"),
    (
        "include_usage a string",
        completion(stream=True, stream_options={"include_usage": MARK}),
        400,
        "stream_options.include_usage",
        "invalid_value",
    ),
    ("best_of below n", completion(best_of=1, n=2), 400, "best_of", "invalid_value"),
    ("best_of 129", completion(best_of=129), 400, "best_of", "invalid_value"),
    ("best_of of a stream", completion(best_of=2, stream=True), 400, "best_of", "invalid_value"),
    ("prompt_logprobs 21", completion(prompt_logprobs=21), 400, "prompt_logprobs", "invalid_value"),
    ("prompt_logprobs -1", completion(prompt_logprobs=-1), 400, "prompt_logprobs", "invalid_value"),
    ("prompt_logprobs of a stream", chat(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "invalid_value"),
    ("nothing of the prompt", completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "invalid_value"),
    ("more than fits", chat(truncate_prompt_tokens=257), 400, "truncate_prompt_tokens", "invalid_value"),
    ("truncation at a third end", completion(truncation_side=MARK), 400, "truncation_side", "invalid_value"),
    ("truncation -2", completion(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "invalid_value"),
    ("allowed past the width", completion(allowed_token_ids=[1, 260]), 400, "allowed_token_ids.1", "invalid_value"),
    ("allowed of strings", completion(allowed_token_ids=[MARK]), 400, "allowed_token_ids.0", "invalid_value"),
    ("nothing allowed", chat(allowed_token_ids=[]), 400, "allowed_token_ids", "invalid_value"),
    ("too many allowed", completion(allowed_token_ids=[1] * 1025), 400, "allowed_token_ids", "invalid_value"),
    ("bad_words a string", completion(bad_words=MARK), 400, "bad_words", "invalid_value"),
    ("a bad word of nothing", completion(bad_words=["a", ""]), 400, "bad_words.1", "invalid_value"),
    ("a bad word too long", chat(bad_words=["x" * 129]), 400, "bad_words.0", "invalid_value"),
    ("too many bad words", completion(bad_words=["x"] * 65), 400, "bad_words", "invalid_value"),
    ("a bad word that the model lacks", completion(bad_words=["<|late|>"]), 400, "bad_words.0", "invalid_value"),
    ("two adapters", completion(lora_path="other"), 400, "lora_path", "invalid_value"),
    (
        "two fields' adapters",
        chat(model="org/base:1", lora_path="sql", adapter_id="other"),
        400,
        "adapter_id",
        "invalid_value",
    ),
    ("an adapter for each prompt", completion(lora_path=["sql", "b"]), 400, "lora_path", "invalid_value"),
    ("the base for one prompt", completion(lora_path=["sql", None]), 400, "lora_path", "invalid_value"),
    ("lora_path a number", completion(lora_path=3), 400, "lora_path", "invalid_value"),
    ("lora_path of numbers", chat(lora_path=["sql", 3]), 400, "lora_path", "invalid_value"),
    ("lora_path too long", completion(lora_path=MARK * 200), 400, "lora_path", "invalid_value"),
    ("lora_path of too many", completion(lora_path=["sql"] * 129), 400, "lora_path", "invalid_value"),
    ("a path on a disk", completion(model="org/base:1", lora_path="/etc/" + MARK), 404, "lora_path", "model_not_found"),
    ("an absent adapter_id", chat(model="org/base:1", adapter_id="nobody"), 404, "adapter_id", "model_not_found"),
    ("an adapter_id that is no sum", chat(model="org/base:1", adapter_id="a++b"), 400, "adapter_id", "invalid_value"),
    ("an adapter_id too long", chat(adapter_id=MARK * 200), 400, "adapter_id", "invalid_value"),
    ("an adapter's source", completion(adapter_source="hub"), 400, "adapter_source", "unsupported_parameter"),
    (
        "continued and begun",
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
        "invalid_value",
    ),
    # lists
    ("stop a number", completion(stop=3), 400, "stop", "invalid_value"),
    ("stop empty", completion(stop=["a", ""]), 400, "stop.1", "invalid_value"),
    ("stop too many", completion(stop=["a"] * 65), 400, "stop", "invalid_value"),
    ("stop too long", completion(stop="x" * 513), 400, "stop.0", "invalid_value"),
    ("stop_token_ids past the width", completion(stop_token_ids=[1, 999]), 400, "stop_token_ids.1", "invalid_value"),
    ("stop_token_ids of strings", completion(stop_token_ids=[MARK]), 400, "stop_token_ids.0", "invalid_value"),
    ("stop_token_ids too many", completion(stop_token_ids=[1] * 65), 400, "stop_token_ids", "invalid_value"),
    ("logit_bias a list", completion(logit_bias=[1]), 400, "logit_bias", "invalid_value"),
    ("logit_bias of words", completion(logit_bias={MARK: 1}), 400, "logit_bias", "invalid_value"),
    ("logit_bias past the width", completion(logit_bias={"260": 1}), 400, "logit_bias", "invalid_value"),
    ("logit_bias of odd digits", completion(logit_bias={"²": 1}), 400, "logit_bias", "invalid_value"),
    ("logit_bias 101", completion(logit_bias={"1": 101}), 400, "logit_bias", "invalid_value"),
    ("logit_bias true", completion(logit_bias={"1": True}), 400, "logit_bias", "invalid_value"),
    ("logit_bias too many", completion(logit_bias={str(i): 1 for i in range(301)}), 400, "logit_bias", "invalid_value"),
    ("priority before everyone", completion(priority=-1), 403, None, "permission_denied"),
    # what isn't implemented
    *(
        (name, completion(**{name: value}), 400, name, "unsupported_parameter")
        for name, value in {
            "suffix": MARK,
            "logits_processors": [MARK],
            "tools": [{"type": "function"}],
            "use_beam_search": True,
            "typical_p": 0.5,
        }.items()
    ),
    # structured output
    ("response_format a text", completion(response_format=MARK), 400, "response_format", "invalid_value"),
    ("a format of its own", chat(response_format={"type": MARK}), 400, "response_format.type", "invalid_value"),
    ("json_schema", chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema", "invalid_value"),
    ("an unknown kind", completion(structured_outputs={MARK: "x"}), 400, "structured_outputs", "unsupported_parameter"),
    (
        "a bad regex",
        completion(structured_outputs={"regex": f"({MARK}"}),
        400,
        "structured_outputs.regex",
        "invalid_value",
    ),
    ("a bad schema", completion(guided_json={"type": MARK}), 400, "guided_json", "invalid_value"),
    ("choices of numbers", completion(guided_choice=[MARK, 3]), 400, "guided_choice.1", "invalid_value"),
    # chat
    ("no messages", raw(b'{"model": "sql"}', "/v1/chat/completions"), 400, "messages", "invalid_value"),
    ("messages empty", chat(messages=[]), 400, "messages", "invalid_value"),
    ("messages a string", chat(messages=MARK), 400, "messages", "invalid_value"),
    ("too many messages", chat(messages=[MESSAGE] * 1025), 400, "messages", "invalid_value"),
    ("a message a string", chat(messages=[MESSAGE, MARK]), 400, "messages.1", "invalid_value"),
    ("no role", chat(messages=[{"content": MARK}]), 400, "messages.0.role", "invalid_value"),
    ("no role's name", chat(messages=[{"role": f"{MARK} a", "content": ""}]), 400, "messages.0.role", "invalid_value"),
    (
        "a role that is a list",
        chat(messages=[{"role": [MARK], "content": ""}]),
        400,
        "messages.0.role",
        "invalid_value",
    ),
    ("no content", chat(messages=[{"role": "user"}]), 400, "messages.0.content", "invalid_value"),
    ("content a number", chat(messages=[{"role": "user", "content": 3}]), 400, "messages.0.content", "invalid_value"),
    ("content no parts", chat(messages=[{"role": "user", "content": []}]), 400, "messages.0.content", "invalid_value"),
    (
        "a part without text",
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages.0.content.0",
        "invalid_value",
    ),
    (
        "a picture",
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MARK}}]}]),
        400,
        "messages.0.content.0",
        "unsupported_parameter",
    ),
    (
        "a tool's message",
        chat(messages=[{"role": "tool", "content": MARK}]),
        400,
        "messages.0.tool_call_id",
        "invalid_value",
    ),
    ("name too long", chat(messages=[MESSAGE | {"name": "x" * 65}]), 400, "messages.0.name", "invalid_value"),
    (
        "chat over the context",
        chat(messages=[MESSAGE | {"content": "x" * 300}]),
        400,
        "messages",
        "context_length_exceeded",
    ),
    ("chat max_completion_tokens 0", chat(max_completion_tokens=0), 400, "max_completion_tokens", "invalid_value"),
    ("top_logprobs alone", chat(top_logprobs=2), 400, "top_logprobs", "invalid_value"),
    ("top_logprobs 21", chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    ("chat logprobs a number", chat(logprobs=1), 400, "logprobs", "invalid_value"),
    ("tool_choice required", chat(tool_choice="required"), 400, "tool_choice", "invalid_value"),
    ("a template of one's own", chat(chat_template=MARK), 400, "chat_template", "unsupported_parameter"),
    (
        "messages through a variable",
        chat(chat_template_kwargs={"messages": []}),
        400,
        "chat_template_kwargs",
        "invalid_value",
    ),
    ("speech", chat(modalities=["text", "audio"]), 400, "modalities.1", "invalid_value"),
    ("greedy as others say it", completion(do_sample=False), 400, "do_sample", "unsupported_parameter"),
    ("zero new tokens", completion(max_new_tokens=0), 400, "max_new_tokens", "unsupported_parameter"),
    # tokenize
    ("tokenize nothing", raw(b"{}", "/tokenize"), 400, "prompt", "invalid_value"),
    ("tokenize a number", raw(b'{"prompt": 3}', "/tokenize"), 400, "prompt", "invalid_value"),
    ("tokenize for nobody", raw(b'{"prompt": "x", "model": "nobody"}', "/tokenize"), 404, "model", "model_not_found"),
    ("detokenize words", raw(b'{"tokens": ["SECRETMARKER"]}', "/detokenize"), 400, "tokens.0", "invalid_value"),
    ("detokenize past the width", raw(b'{"tokens": [260]}', "/detokenize"), 400, "tokens.0", "invalid_value"),
]


async def test_bad_input_is_refused_by_name(client: httpx2.AsyncClient, engine: Any, subtests: pytest.Subtests) -> None:
    """All of it on one server, as from one client that sends nothing right."""
    for what, (path, body), status, param, code in CASES:
        with subtests.test(what):
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (status, param, code)
            assert error["message"]
            assert len(response.content) < 1500
            assert MARK not in response.text
            assert response.headers["x-request-id"]
            assert engine.seen == []
    assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})).status_code == 200


async def test_overlong_prompt_error_uses_wording_clients_expect(client: httpx2.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"model": "sql", "prompt": "x" * 300})
    assert response.json()["error"]["message"].startswith("This model's maximum context length is 256 tokens.")


FEW_VALUES = [None, True, -1, 10**30, 0.5, "é\u0000", [], [None], [[1, "x"]], {}, {"type": "text"}]
"""A value of each kind that fields are read as."""
VALUES = [
    *FEW_VALUES,
    False,
    0,
    1,
    2**31,
    -(2**63),
    -1e308,
    "",
    "x",
    [1],
    ["x"],
    [[]],
    {"a": 1},
    [{}],
    {"1": 1},
    [True],
    ["x"] * 200,
    "live",
    "sql@1",
    {"role": "user"},
]


BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


few_or_all = pytest.mark.parametrize(
    "values",
    [pytest.param(FEW_VALUES, id="few"), pytest.param(VALUES, id="all", marks=pytest.mark.campaign)],
)


@few_or_all
@pytest.mark.parametrize("path", BODIES)
async def test_no_value_of_any_field_is_a_5xx(client: httpx2.AsyncClient, path: str, values: list[object]) -> None:
    good = {"model": "sql", "prompt": "x", "messages": [MESSAGE], "tokens": [1], "max_tokens": 2}
    good = {name: value for name, value in good.items() if path != "/tokenize" or name != "prompt"}
    # a few at once, which share steps
    free = asyncio.Semaphore(8)

    async def send(name: str, value: object) -> None:
        async with free:
            response = await client.post(path, json=good | {name: value})
        assert response.status_code in (200, 400, 403, 404), (name, value, response.text)

    # and some that it hasn't
    for name in sorted({*BODIES[path].model_fields, "prompt", "messages", "suffix", "temperature"}):
        await asyncio.gather(*(send(name, value) for value in values))


@few_or_all
async def test_no_shape_of_a_message_is_a_5xx(client: httpx2.AsyncClient, values: list[object]) -> None:
    async def send(message: object) -> None:
        body = {"model": "sql", "messages": [message], "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=body)).status_code in (200, 400), message

    for value in values:
        shapes: tuple[object, ...] = (
            {"role": "user", "content": value},
            {"role": value, "content": "x"},
            {"role": "assistant", "tool_calls": value},
            {"role": "assistant", "tool_calls": [value]},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": value}]},
            {"role": "assistant", "reasoning_content": value},
            {"role": "tool", "content": value, "tool_call_id": value},
            {"role": "user", "content": [value]},
            value,
        )
        await asyncio.gather(*map(send, shapes))
