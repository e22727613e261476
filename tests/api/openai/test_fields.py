"""vLLM's, SGLang's and LoRAX's fields of completions and chats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import pytest

from loraserve.api.http.text_threads import ON_LOOP_BYTES
from loraserve.limits import LIMITS
from loraserve.types import TokenOutput

BASE = "org/base:1"


async def complete(client: httpx2.AsyncClient, **body: Any) -> Any:
    answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "list", "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx2.AsyncClient, *messages: tuple[str, str], **body: Any) -> Any:
    sent = [{"role": role, "content": content} for role, content in messages or (("user", "list"),)]
    answer = await client.post("/v1/chat/completions", json={"model": "sql", "messages": sent, "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(engine: Any) -> str:
    text: str = engine.tokenizer.decode(engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    return text


async def test_sglang_and_lorax_fields_name_adapter_with_base(client: httpx2.AsyncClient, engine: Any) -> None:
    for fields in (
        {"model": BASE, "lora_path": "sql"},
        {"model": BASE, "lora_path": ["sql"]},
        {"model": BASE, "lora_path": ["sql", "sql"], "prompt": ["a", "b"]},
        {"model": BASE, "adapter_id": "sql@1", "adapter_source": "local"},
        {"model": "sql", "lora_path": "sql"},
        {"model": f"{BASE}:sql", "lora_path": "sql"},
        {"model": BASE, "lora_path": "sql", "adapter_id": "sql"},
    ):
        await complete(client, **fields)
        assert engine.seen[-1].adapter.name == "sql", fields
    await chat(client, model=BASE, lora_path="sql")
    assert engine.seen[-1].adapter.name == "sql"
    for fields in (
        *({"lora_path": value} for value in (None, "", [], [None, None], [None, ""])),
        *({"adapter_id": value} for value in (None, "", "__base_model__")),
    ):
        await complete(client, model=BASE, **fields)
        assert engine.seen[-1].adapter is None, fields


async def test_the_end_of_a_long_prompt_is_kept(client: httpx2.AsyncClient, engine: Any) -> None:
    for prompt in ("abc" * 200, [*range(60)] * 10):
        answer = await complete(client, prompt=prompt, truncate_prompt_tokens=4)
        assert answer["usage"]["prompt_tokens"] == 4
    assert engine.seen[-1].prompt_token_ids == (56, 57, 58, 59)
    echoed = await complete(client, prompt="abc" * 200, truncate_prompt_tokens=4, echo=True)
    assert echoed["choices"][0]["text"].startswith("cabcsql")
    # as many as fit beside the answer
    answer = await complete(client, prompt="abc" * 200, truncate_prompt_tokens=-1, max_tokens=56)
    assert answer["usage"]["prompt_tokens"] == 200
    await chat(client, ("user", "abc" * 200), truncate_prompt_tokens=5)
    assert prompt_of(engine) == "abc\n<|assistant|>"


async def test_prompt_keeps_start_with_truncation_side(client: httpx2.AsyncClient, engine: Any) -> None:
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    await complete(client, prompt=[*range(60)] * 10, **cut)
    assert engine.seen[-1].prompt_token_ids == (0, 1, 2, 3)
    await chat(client, ("user", "abc" * 200), **cut)
    assert prompt_of(engine) == "<|user|>abc"
    await complete(client, prompt="abc" * 200, **{**cut, "truncate_prompt_tokens": -1}, max_tokens=56)
    assert prompt_of(engine) == ("abc" * 200)[:200]
    await complete(client, prompt="abc" * 200, **{**cut, "truncation_side": "left"})
    assert prompt_of(engine) == "cabc"


async def test_chat_echoes_continued_message(client: httpx2.AsyncClient) -> None:
    messages = [
        {"role": "user", "content": "list"},
        {"role": "assistant", "content": [{"type": "text", "text": "To "}]},
    ]
    body = {"model": "sql", "messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 3}
    whole = (await client.post("/v1/chat/completions", json={**body, "n": 2})).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["To sql", "To sql"]
    deltas = [
        event["choices"][0]["delta"]
        for event in _events(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    ]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "To "}]
    assert "".join(delta.get("content", "") for delta in deltas) == "To sql"
    # a question isn't repeated
    question = {**body, "messages": messages[:1], "continue_final_message": False}
    asked = (await client.post("/v1/chat/completions", json=question)).json()
    assert asked["choices"][0]["message"]["content"] == "sql"


async def test_tokens_are_restricted_by_id_and_by_word(client: httpx2.AsyncClient, engine: Any) -> None:
    encode = engine.tokenizer.encode
    for ask in (complete, chat):
        await ask(client, allowed_token_ids=[5, 7], bad_words=["no", " yes"])
        params = engine.seen[-1].params
        assert params.allowed_token_ids == (5, 7)
        assert params.bad_words == (tuple(encode("no", False)), tuple(encode("yes", False)))


async def test_the_last_message_is_continued(client: httpx2.AsyncClient, engine: Any) -> None:
    messages = (("user", "list"), ("assistant", "The tickets: "))
    for fields in ({}, {"add_generation_prompt": False}):
        await chat(client, *messages, continue_final_message=True, **fields)
        assert prompt_of(engine) == "<|user|>list\n<|assistant|>The tickets: "


async def test_the_prompts_log_probabilities_are_by_id(client: httpx2.AsyncClient, engine: Any) -> None:
    choice = (await complete(client, prompt_logprobs=2, n=2))["choices"][1]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    token_id = engine.seen[-1].prompt_token_ids[1]
    assert len(choice["prompt_logprobs"]) == 4
    # the two likeliest, and the prompt's own, whose rank isn't known
    assert second[str(token_id)] == {"logprob": -0.5 if token_id % 2 else -9999.0, "rank": None, "decoded_token": "i"}
    assert [entry["rank"] for entry in second.values()] == [1, 2, None]
    whole = await chat(client, prompt_logprobs=0)
    assert [entry is None for entry in whole["prompt_logprobs"]][:2] == [True, False]
    assert (await chat(client))["prompt_logprobs"] is None
    both = (await complete(client, prompt_logprobs=3, echo=True, logprobs=1))["choices"][0]
    # the token itself beside those that were asked for
    assert {len(top) for top in both["logprobs"]["top_logprobs"] if top is not None} == {2}
    assert len(both["prompt_logprobs"][1]) == 4


async def test_excessive_prompt_logprobs_are_refused(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(LIMITS, max_prompt_candidates=2 * 4 * 3)
    monkeypatch.setattr("loraserve.api.inference.context.LIMITS", limits)
    for fields, param in (
        ({"prompt_logprobs": 2, "n": 2}, "prompt_logprobs"),
        ({"logprobs": 2, "echo": True, "prompt": ["list", "list"]}, "logprobs"),
    ):
        await complete(client, **fields)
        more = fields | {"prompt": ["list", "list", "x"]}
        answer = await client.post("/v1/completions", json={"model": "sql", "max_tokens": 3, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    await chat(client, prompt_logprobs=0)
    answer = await client.post(
        "/v1/chat/completions",
        json={"model": "sql", "messages": [{"role": "user", "content": "list"}], "prompt_logprobs": 20},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_many_log_probabilities_are_rendered_on_a_thread(
    client: httpx2.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, run = [], services.text_threads.run

    async def measured(tenant: str, num_bytes: int, work: Any) -> Any:
        sizes.append(num_bytes)
        return await run(tenant, num_bytes, work)

    monkeypatch.setattr(services.text_threads, "run", measured)
    for fields in (
        {"prompt_logprobs": 20},
        {"logprobs": 20, "echo": True},
        {"max_tokens": 50, "logprobs": 1},
    ):
        await complete(client, **fields)
        assert sizes.pop() > ON_LOOP_BYTES
    await complete(client)
    assert sizes.pop() == 0


async def test_loglikelihoods_are_readable_by_lm_eval(client: httpx2.AsyncClient, engine: Any) -> None:
    context, continuations = "list", ("s", "sql")
    encode = engine.tokenizer.encode
    prompts = [encode(context + continuation, False) for continuation in continuations]
    answer = await complete(
        client, prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234, temperature=0, stop=None
    )
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]
        # lm-eval drops the one token that was made
        own = logprobs["token_logprobs"][len(context) : -1]
        top = logprobs["top_logprobs"][len(context) : -1]
        assert len(own) == len(top) == len(prompt) - len(context)
        assert all(value <= max(likeliest.values()) for value, likeliest in zip(own, top, strict=True))


async def test_best_candidates_are_answered_and_all_are_billed(
    client: httpx2.AsyncClient, engine: Any, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, log_probabilities = engine._steps, (-2.0, -0.1, -3.0, -0.4, -5.0, -1.0)

    async def scored(request: Any) -> AsyncIterator[TokenOutput]:
        logprob = log_probabilities[int(request.request_id.rpartition("-")[2])]
        async for output in steps(request):
            entries = tuple(msgspec.structs.replace(entry, logprob=logprob) for entry in output.logprobs)
            yield msgspec.structs.replace(output, logprobs=entries)

    monkeypatch.setattr(engine, "_steps", scored)
    before = services.usage.recorded
    answer = await complete(client, prompt=["a", "b"], n=2, best_of=3, max_tokens=12, seed=5, logprobs=0)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == [-0.1, -2.0, -0.4, -1.0]
    assert answer["usage"]["completion_tokens"] == 6 * 12
    assert services.usage.recorded.completion_tokens - before.completion_tokens == 6 * 12
    plain = await complete(client, best_of=3)
    assert [choice["logprobs"] for choice in plain["choices"]] == [None]


async def test_tokens_without_text_keep_distinct_keys(
    client: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(engine)._logprobs

    def reserved(token_id: int, num: int) -> Any:
        # ids that the vocabulary lacks, likeliest first, and one text twice
        top = ((300, -0.1), (301, -0.2), (65, -0.3))
        return msgspec.structs.replace(original(engine, token_id, num), top=top)

    monkeypatch.setattr(engine, "_logprobs", reserved)
    top = (await complete(client, logprobs=3, max_tokens=1))["choices"][0]["logprobs"]["top_logprobs"][0]
    assert {"token_id:300": -0.1, "token_id:301": -0.2}.items() <= top.items()
    assert "" not in top
    content = (await chat(client, logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in content[0]["top_logprobs"]][:2] == [
        ("token_id:300", []),
        ("token_id:301", []),
    ]


async def test_tokens_are_shown_as_ids_if_asked(client: httpx2.AsyncClient, engine: Any) -> None:
    ids = engine.tokenizer.encode("sql", False)
    asked = {"return_tokens_as_token_ids": True}
    logprobs = (await complete(client, logprobs=1, **asked))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert all(key.startswith("token_id:") for top in logprobs["top_logprobs"] for key in top)
    assert logprobs["text_offset"] == [0, 1, 2]
    content = (await chat(client, logprobs=True, top_logprobs=1, **asked))["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token_id}" for token_id in ids]
    assert bytes(content[0]["bytes"]) == b"s"


SWITCHED_ON: dict[str, Any] = {
    "web_search_options": {},
    "thinking_token_budget": 0,
    "truncate_prompt_tokens": "0",
    "lora_request": {},
    "repetition_detection": {},
    "audio": {},
    "do_sample": False,
    "length_penalty": 0,
    "samplers": [],
    "merged_adapters": {},
    "guided_decoding_options": {},
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.1,
    "min_new_tokens": 4,
    "sampling_seed": 0,
    "bad_words_ids": [[3]],
    "suppress_tokens": [3],
    "top_n_sigma": 0,
}
"""Fields with values that ask for something, some of them though they're empty, 0 or false."""
SWITCHED_OFF: dict[str, Any] = {
    "tfs_z": 1,
    "typical_p": 1.0,
    "documents": [],
    "xtc_probability": 0.0,
    "mm_processor_kwargs": {},
    "verbosity": "medium",
    "early_stopping": False,
    "epsilon_cutoff": 0,
    "web_search_options": None,
    "min_new_tokens": 0,
    "top_n_sigma": -1,
}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_field_with_effect_is_refused_when_empty(client: httpx2.AsyncClient, engine: Any, route: str) -> None:
    body = {"model": "sql", "max_tokens": 3}
    body |= {"prompt": "list"} if route == "completions" else {"messages": [{"role": "user", "content": "list"}]}
    for name, value in SWITCHED_ON.items():
        answer = await client.post(f"/v1/{route}", json=body | {name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (name, answer.text)
    assert engine.seen == []
    answer = await client.post(f"/v1/{route}", json=body | SWITCHED_OFF)
    assert answer.status_code == 200, answer.text
    assert "x-loraserve-ignored" not in answer.headers


async def test_refusal_names_equivalent_field(client: httpx2.AsyncClient) -> None:
    for name, instead in (("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")):
        body = {"model": "sql", "prompt": "list", name: 3}
        error = (await client.post("/v1/completions", json=body)).json()["error"]
        assert f"Send {instead} instead." in error["message"], error


async def test_white_space_is_bad_word(client: httpx2.AsyncClient, engine: Any) -> None:
    await complete(client, bad_words=["\n"])
    assert engine.seen[-1].params.bad_words == (tuple(engine.tokenizer.encode("\n", False)),)


async def test_choices_number_openais_most(client: httpx2.AsyncClient) -> None:
    assert len((await complete(client, n=128, max_tokens=1))["choices"]) == 128
    answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "list", "n": 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_number_may_come_as_text(client: httpx2.AsyncClient, engine: Any) -> None:
    await complete(client, max_tokens="5", temperature="0.5", seed=7.0, top_k="-1", top_p="1")
    params = engine.seen[-1].params
    assert (params.max_tokens, params.temperature, params.seed, params.top_k) == (5, 0.5, 7, 0)
    await chat(client, max_tokens=2.0, presence_penalty="1e-1")
    params = engine.seen[-1].params
    assert (params.max_tokens, params.presence_penalty) == (2, 0.1)
    for value in ("", "5 tokens", "0x5", "٥", "5.5", 5.5, "nan", "9" * 30):
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "x", "max_tokens": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), value


async def test_negative_max_tokens_takes_whole_room(client: httpx2.AsyncClient, engine: Any) -> None:
    room = 256
    await complete(client, max_tokens=-1)
    assert engine.seen[-1].params.max_tokens == room - len(engine.seen[-1].prompt_token_ids)
    await complete(client, max_tokens="-1", min_tokens=3, truncate_prompt_tokens=-1)
    assert engine.seen[-1].params.max_tokens == room - len(engine.seen[-1].prompt_token_ids)
    for name in ("max_tokens", "max_completion_tokens"):
        await chat(client, **{"max_tokens": None, name: -1})
        assert engine.seen[-1].params.max_tokens == room - len(engine.seen[-1].prompt_token_ids)


async def test_stop_strings_are_bounded_together(client: httpx2.AsyncClient, engine: Any) -> None:
    stops = [f"<stop {number}>" for number in range(LIMITS.max_stop_strings)]
    await complete(client, stop=stops)
    assert engine.seen[-1].stop == tuple(stops)
    too_long = ["x" * LIMITS.max_stop_bytes] * (LIMITS.max_stop_bytes_in_all // LIMITS.max_stop_bytes)
    for refused in ([*stops, "one more"], [*too_long, "y"]):
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "x", "stop": refused})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")


ROUTES = (("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}), ("completions", {"prompt": "x"}))


@pytest.mark.parametrize(("value", "code"), [(-2, "invalid_value"), (True, "invalid_value"), ("many", "invalid_value")])
async def test_odd_thinking_budget_is_refused(client: httpx2.AsyncClient, value: object, code: str) -> None:
    for path, prompt in (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "x"}),
    ):
        answer = await client.post(f"/v1/{path}", json={"model": BASE, **prompt, "thinking_token_budget": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
        assert answer.json()["error"]["code"] == code


async def test_thinking_budget_needs_markers_of_reasoning(
    client: httpx2.AsyncClient, publish: Callable[..., Any]
) -> None:
    version = await publish("sql", reasoning_parser=b"qwen3")
    for model, words in ((BASE, "shows no markers of reasoning"), (f"sql@{version}", "qwen3: </think>")):
        for path, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("completions", {"prompt": "x"}),
        ):
            body = {"model": model, **prompt, "max_tokens": 2}
            assert (await client.post(f"/v1/{path}", json={**body, "thinking_token_budget": -1})).status_code == 200
            error = (await client.post(f"/v1/{path}", json={**body, "thinking_token_budget": 4})).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "thinking_token_budget")
            assert words in error["message"]


def _events(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = response.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
