"""llama.cpp's names of fields, values that only other servers take, and special tokens in texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

ROUTES = ("completions", "chat/completions")
USER = "<|user|>"


async def ask(client: httpx2.AsyncClient, route: str, **body: Any) -> httpx2.Response:
    prompt = {"prompt": "list"} if route == "completions" else {"messages": [{"role": "user", "content": "list"}]}
    return await client.post(f"/v1/{route}", json={"model": "sql", **prompt, **body})


@pytest.mark.parametrize("route", ROUTES)
async def test_llamacpp_names_set_same_fields(client: httpx2.AsyncClient, engine: Any, route: str) -> None:
    answer = await ask(client, route, n_predict=5, repeat_penalty="1.25", n_probs=2)
    assert answer.status_code == 200, answer.text
    params = engine.seen[-1].params
    assert (params.max_tokens, params.repetition_penalty, params.logprobs) == (5, 1.25, 2)
    logprobs = answer.json()["choices"][0]["logprobs"]
    if route == "completions":
        # the two likeliest, and the chosen token
        assert {len(top) for top in logprobs["top_logprobs"]} == {3}
    else:
        assert {len(entry["top_logprobs"]) for entry in logprobs["content"]} == {2}
    assert "x-loraserve-ignored" not in answer.headers
    answer = await ask(client, route, n_predict=-1, n_probs=0)
    assert engine.seen[-1].params.max_tokens == 256 - len(engine.seen[-1].prompt_token_ids)
    assert (engine.seen[-1].params.logprobs, answer.json()["choices"][0]["logprobs"]) == (None, None)


@pytest.mark.parametrize("route", ROUTES)
async def test_both_names_need_same_value(client: httpx2.AsyncClient, engine: Any, route: str) -> None:
    own = {"logprobs": 2} if route == "completions" else {"logprobs": True, "top_logprobs": 2}
    same = {"max_tokens": 5, "n_predict": 5, "repeat_penalty": 1.5, "repetition_penalty": 1.5, "n_probs": 2, **own}
    assert (await ask(client, route, **same)).status_code == 200
    assert engine.seen.pop().params.max_tokens == 5
    for name, value in (("n_predict", 6), ("repeat_penalty", 1.1), ("n_probs", 3)):
        error = (await ask(client, route, **same | {name: value})).json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_value"), error
        assert "is another name of" in error["message"]
    for name, value in (("n_predict", -2), ("repeat_penalty", 0), ("n_probs", 21), ("n_probs", True)):
        answer = await ask(client, route, **{name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert engine.seen == []


LLAMACPP: dict[str, Any] = {
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "typical_p": 1.0,
    "typ_p": 1.0,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "repeat_last_n": 64,
    "cache_prompt": True,
    "id_slot": -1,
    "n_keep": 0,
    "t_max_predict_ms": 0,
    "post_sampling_probs": False,
}
"""Defaults that llama.cpp's clients send with each request."""
WITHOUT_EFFECT = {"mirostat", "typical_p", "typ_p", "xtc_probability", "dry_multiplier", "dynatemp_range"}
WITHOUT_EFFECT |= {"t_max_predict_ms", "post_sampling_probs"}


@pytest.mark.parametrize("route", ROUTES)
async def test_llamacpp_defaults_are_ignored_by_name(client: httpx2.AsyncClient, route: str) -> None:
    answer = await ask(client, route, max_tokens=2, **LLAMACPP)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-loraserve-ignored"].split(", ")) == LLAMACPP.keys() - WITHOUT_EFFECT


@pytest.mark.parametrize("route", ROUTES)
async def test_llamacpp_sampling_is_refused_by_name(client: httpx2.AsyncClient, route: str) -> None:
    refused = {"mirostat": 2, "typ_p": 0.5, "xtc_probability": 0.5, "dry_multiplier": 0.8, "samplers": ["top_k"]}
    for name, value in (refused | {"t_max_predict_ms": 500, "post_sampling_probs": True}).items():
        error = (await ask(client, route, **{name: value})).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter"), error


@pytest.mark.parametrize(("route", "field"), [("completions", "logprobs"), ("chat/completions", "top_logprobs")])
async def test_whole_vocabulary_is_refused_in_words(client: httpx2.AsyncClient, route: str, field: str) -> None:
    for name in (field, "prompt_logprobs"):
        error = (await ask(client, route, **{name: -1, "logprobs": -1 if field == "logprobs" else True})).json()[
            "error"
        ]
        assert "all tokens of the vocabulary" in error["message"], error
    error = (await ask(client, route, **{field: -2})).json()["error"]
    assert error["param"] == field
    assert "vocabulary" not in error["message"]


async def test_verbosity_reaches_reading_template(
    client: httpx2.AsyncClient, engine: Any, publish: Callable[..., Any]
) -> None:
    answer = await ask(client, "chat/completions", verbosity="low")
    assert answer.headers["x-loraserve-ignored"] == "verbosity"
    assert "x-loraserve-ignored" not in (await ask(client, "chat/completions", verbosity="medium")).headers
    await publish("sql", chat_template=b"{{ messages[0].content }} {{ verbosity }}")
    answer = await ask(client, "chat/completions", verbosity="low")
    assert answer.status_code == 200, answer.text
    assert "x-loraserve-ignored" not in answer.headers
    assert engine.tokenizer.decode(engine.seen[-1].prompt_token_ids) == "list low"
    response = {"model": "sql", "input": "list", "text": {"verbosity": "high"}}
    answer = await client.post("/v1/responses", json=response)
    assert engine.tokenizer.decode(engine.seen[-1].prompt_token_ids) == "list high"
    assert "x-loraserve-ignored" not in answer.headers
    error = (await ask(client, "chat/completions", verbosity="loud")).json()["error"]
    assert error["param"] == "verbosity"


@pytest.mark.parametrize("route", ROUTES)
async def test_special_token_stops_as_string(client: httpx2.AsyncClient, engine: Any, route: str) -> None:
    engine.script = f"one{USER}two"
    choice = (await ask(client, route, max_tokens=50, stop=[USER])).json()["choices"][0]
    text = choice["text"] if route == "completions" else choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", USER)
    # elsewhere it is skipped as before
    choice = (await ask(client, route, max_tokens=50, stop=["zzz"])).json()["choices"][0]
    assert (choice["text"] if route == "completions" else choice["message"]["content"]) == "onetwo"
    answer = await ask(client, route, max_tokens=50, stop=[USER], stream=True)
    assert answer.text.count(USER) == answer.text.count(f'"stop_reason":"{USER}"') == 1


async def test_offsets_of_echo_count_special_tokens(client: httpx2.AsyncClient, engine: Any) -> None:
    prompt = f"a{USER}é\n"
    for fields in ({}, {"skip_special_tokens": False}):
        choice = (await ask(client, "completions", prompt=prompt, echo=True, logprobs=0, max_tokens=2, **fields)).json()
        choice = choice["choices"][0]
        assert choice["text"] == prompt + "sq"
        logprobs = choice["logprobs"]
        shown = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
        assert {token: shown[token] for token in ("a", USER, "\n", "s", "q")} == {
            "a": 0,
            USER: 1,
            "\n": 10,
            "s": 11,
            "q": 12,
        }
    ids = [*engine.tokenizer.encode("a", False), engine.tokenizer.token_to_id(USER)]
    for skips in (True, False):
        body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skips}
        choice = (await ask(client, "completions", **body)).json()["choices"][0]
        assert choice["logprobs"]["text_offset"] == [0, 1, 9]
        assert choice["text"] == f"a{USER}s"


async def test_named_tokens_are_shown_with_each(client: httpx2.AsyncClient, engine: Any) -> None:
    ids = [engine.tokenizer.token_to_id(letter) for letter in "CAB"]
    shown = {letter: -token_id / 64 for letter, token_id in zip("CAB", ids, strict=True)}
    body = {"max_tokens": 2, "logprob_token_ids": ids}
    choice = (await ask(client, "completions", logprobs=1, echo=True, **body)).json()["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    # the prompt's tokens have their likeliest
    assert [len(top) for top in tops[1:4]] == [2, 2, 2]
    assert [{letter: top[letter] for letter in shown} for top in tops[4:]] == [shown, shown]
    assert [list(top)[:3] for top in tops[4:]] == [["C", "A", "B"]] * 2
    choice = (await ask(client, "chat/completions", logprobs=True, **body)).json()["choices"][0]
    for entry in choice["logprobs"]["content"]:
        # the token itself is first, unless it is one of the named
        own, *named = entry["top_logprobs"]
        assert own == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert {one["token"]: one["logprob"] for one in named} == shown
    own_id = engine.tokenizer.token_to_id("s")
    named_too = {"max_tokens": 1, "logprob_token_ids": [*ids, own_id]}
    choice = (await ask(client, "chat/completions", logprobs=True, **named_too)).json()["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"][0]["top_logprobs"]] == ["C", "A", "B", "s"]
    await ask(client, "chat/completions", logprobs=True, **body)
    assert engine.seen[-1].params.logprob_token_ids == tuple(ids)


@pytest.mark.parametrize("route", ROUTES)
async def test_odd_named_tokens_are_refused(client: httpx2.AsyncClient, engine: Any, route: str) -> None:
    logprobs = {"logprobs": 1 if route == "completions" else True}
    for fields in (
        {"logprob_token_ids": [1]},
        {"logprob_token_ids": [100_000], **logprobs},
        {"logprob_token_ids": [-1], **logprobs},
        {"logprob_token_ids": ["A"], **logprobs},
        {"logprob_token_ids": [1] * 129, **logprobs},
    ):
        answer = await ask(client, route, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("logprob_token_ids")
    assert (await ask(client, route, logprob_token_ids=[])).status_code == 200
    assert [one.params.logprob_token_ids for one in engine.seen] == [()]
