from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from core_clock import scheduled_s

from loraserve.api.services import Services

pytestmark = pytest.mark.usefixtures("no_leaks")


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The payloads of a stream that ended as streams end."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def complete(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/completions", json={"model": "sql", "prompt": "list", **body})


async def test_a_completion_has_openai_shape(client: httpx2.AsyncClient) -> None:
    response = await complete(client, max_tokens=200, seed=7)
    body = response.json()
    assert response.status_code == 200
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (body["object"], body["model"]) == ("text_completion", "sql")
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "sql says 7: the quick brown fox jumps over the lazy dog",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            # vLLM's, which its clients read whether or not they were requested
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    num_tokens = len("sql says 7: the quick brown fox jumps over the lazy dog") + 1
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": num_tokens,
        "total_tokens": 4 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_headers_name_request_adapter_and_timings(client: httpx2.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"model": "sql", "prompt": "x"}, headers={"x-request-id": "mine-1"}
    )
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert response.headers["server-timing"] == "queue;dur=1.0, adapter;dur=2.0, prefill;dur=3.0"


async def test_sixteen_tokens_unless_asked(client: httpx2.AsyncClient) -> None:
    choice = (await complete(client)).json()["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


@pytest.mark.parametrize("model", ["sql", "sql@live", "sql@1", "org/base:1:sql", "org/base:1:sql@1"])
async def test_adapter_is_reached_by_each_name(client: httpx2.AsyncClient, model: str) -> None:
    response = await complete(client, model=model)
    assert response.json()["choices"][0]["text"].startswith("sql says")
    assert response.json()["model"] == model


async def test_the_base_is_a_model(client: httpx2.AsyncClient) -> None:
    response = await complete(client, model="org/base:1")
    assert response.json()["choices"][0]["text"].startswith("base says")
    assert "x-loraserve-adapter" not in response.headers


async def test_a_stream_adds_up_to_the_whole_answer(client: httpx2.AsyncClient) -> None:
    whole = (await complete(client, max_tokens=200, seed=3)).json()
    response = await complete(client, max_tokens=200, seed=3, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
        (last["id"], last["created"], "sql", "text_completion")
    }
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_completion_names_base_and_arithmetic(client: httpx2.AsyncClient, services: Services) -> None:
    fingerprint = f"fp_{services.engine.base.digest[:8]}_fp32"
    for fields in ({"logprobs": 1}, {"stream_options": {"include_usage": True}}, {}):
        for chunk in events_of(await complete(client, max_tokens=3, stream=True, **fields)):
            assert chunk["system_fingerprint"] == fingerprint
        whole = {name: value for name, value in fields.items() if name != "stream_options"}
        assert (await complete(client, model="org/base:1", **whole)).json()["system_fingerprint"] == fingerprint


async def test_a_stream_has_no_usage_unless_asked(client: httpx2.AsyncClient) -> None:
    chunks = events_of(await complete(client, stream=True))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


async def test_usage_counts_up_when_asked(client: httpx2.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(await complete(client, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_choices_are_in_prompt_order_with_different_seeds(client: httpx2.AsyncClient, engine: Any) -> None:
    body = (await complete(client, prompt=["a", "bb"], n=3, seed=5, max_tokens=12)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6 * 12
    by_id = {request.request_id.rsplit("-", 1)[1]: request for request in engine.seen}
    assert [len(by_id[str(index)].prompt_token_ids) for index in range(6)] == [1, 1, 1, 2, 2, 2]
    seeds = [by_id[str(index)].params.seed for index in range(6)]
    assert seeds[0] == 5
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


async def test_choices_of_a_stream_interleave(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.step_s = 0.002
    chunks = events_of(await complete(client, n=2, stream=True, max_tokens=10))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)
    assert order.count(0) == order.count(1) == 10


async def test_requests_without_a_seed_differ(client: httpx2.AsyncClient, engine: Any) -> None:
    await complete(client, n=2)
    await complete(client)
    assert len({request.params.seed for request in engine.seen}) == 3


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_prompt_accepts_text_tokens_or_lists(client: httpx2.AsyncClient, engine: Any, prompt: Any) -> None:
    response = await complete(client, prompt=prompt, max_tokens=1)
    assert response.status_code == 200
    assert len(engine.seen[0].prompt_token_ids) == 2


async def test_echo_begins_with_the_prompt(client: httpx2.AsyncClient) -> None:
    assert (await complete(client, echo=True, max_tokens=3)).json()["choices"][0]["text"] == "listsql"
    chunks = events_of(await complete(client, echo=True, max_tokens=3, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "listsql"


async def test_echo_of_tokens_returns_text(client: httpx2.AsyncClient, engine: Any) -> None:
    prompt = engine.tokenizer.encode("é!")
    assert (await complete(client, prompt=prompt, echo=True, max_tokens=1)).json()["choices"][0]["text"] == "é!s"


async def test_echo_of_cut_text_has_no_added_token(
    client: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, added = engine.tokenizer.encode, min(engine.tokenizer.special_token_ids)

    def encode_with_added(text: str, add_special_tokens: bool = True) -> list[int]:
        return [added] * add_special_tokens + encode(text, False)

    monkeypatch.setattr(engine.tokenizer, "encode", encode_with_added)
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    response = await complete(client, prompt="listing", echo=True, max_tokens=1, **cut)
    assert response.json()["choices"][0]["text"] == "lists"


async def test_logprobs_are_parallel_lists(client: httpx2.AsyncClient) -> None:
    logprobs = (await complete(client, logprobs=2, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["s", "q", "l"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert len(logprobs["token_logprobs"]) == 3
    # the sampled token comes first, although it isn't among the two likeliest
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3, 3]
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == logprobs["tokens"]


async def test_an_impossible_token_has_a_finite_logprob(client: httpx2.AsyncClient) -> None:
    response = await complete(client, logprobs=0, max_tokens=8)
    values = response.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert -9999.0 in values
    assert "Infinity" not in response.text


async def test_logprobs_of_a_stream_add_up(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "naïve 👩!"
    whole = (await complete(client, logprobs=1, max_tokens=50)).json()["choices"][0]["logprobs"]
    chunks = events_of(await complete(client, logprobs=1, max_tokens=50, stream=True))
    for name, values in whole.items():
        parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [value for part in parts for value in part] == values


async def test_part_of_a_character_is_spelled_in_bytes(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "é!"
    logprobs = (await complete(client, logprobs=0, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 0, 1]


async def test_echo_without_new_tokens_scores_the_prompt(client: httpx2.AsyncClient, engine: Any) -> None:
    body = (await complete(client, prompt="list", echo=True, max_tokens=0, logprobs=1)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("list", "length")
    assert choice["logprobs"]["tokens"] == ["l", "i", "s", "t"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 0


async def test_prompt_filling_context_can_be_scored(client: httpx2.AsyncClient) -> None:
    response = await complete(client, prompt="x" * 256, echo=True, max_tokens=0, logprobs=0)
    assert len(response.json()["choices"][0]["logprobs"]["tokens"]) == 256


@pytest.mark.parametrize("stop", ["fox", ["zebra", "fox"]])
async def test_stop_string_ends_text_before_match(client: httpx2.AsyncClient, stop: Any) -> None:
    choice = (await complete(client, stop=stop, max_tokens=100, seed=1)).json()["choices"][0]
    assert choice["text"] == "sql says 1: the quick brown "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "fox")


async def test_token_ids_are_returned_when_asked(client: httpx2.AsyncClient, engine: Any) -> None:
    choice = (await complete(client, return_token_ids=True, max_tokens=3)).json()["choices"][0]
    assert choice["token_ids"] == engine.tokenizer.encode("sql")
    assert choice["prompt_token_ids"] == engine.tokenizer.encode("list")


async def test_sampling_fields_reach_the_engine(client: httpx2.AsyncClient, engine: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "min_tokens": 3,
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    await complete(client, **fields, logit_bias={"3": -100, "4": 1.5}, max_tokens=5, priority=9)
    params = engine.seen[0].params
    assert {name: getattr(params, name) for name in fields} == fields | {"stop_token_ids": (5,)}
    assert params.logit_bias == {3: -100.0, 4: 1.5}
    assert engine.seen[0].priority == 9


async def test_explicit_nulls_are_absent_fields(client: httpx2.AsyncClient) -> None:
    names = (
        "best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
        "stream_options suffix temperature top_p user top_k min_p repetition_penalty stop_token_ids ignore_eos "
        "min_tokens priority tools response_format"
    )
    response = await complete(client, **dict.fromkeys(names.split()))
    assert response.status_code == 200
    assert "x-loraserve-ignored" not in response.headers
    assert (await complete(client, stream=True, stream_options={"include_usage": None})).status_code == 200


async def test_harmless_unknown_fields_are_named(client: httpx2.AsyncClient) -> None:
    response = await complete(client, user="u", store=True, metadata={"a": "b"}, **{"é\n": 1})
    assert response.status_code == 200
    assert response.headers["x-loraserve-ignored"] == "store, metadata, (1 more)"


async def test_misspelt_fields_are_named_with_suggestions(client: httpx2.AsyncClient) -> None:
    response = await complete(client, temprature=0.5, top_kk=3, store=True)
    assert response.status_code == 200
    assert response.headers["x-loraserve-ignored"] == "temprature, top_kk, store"
    assert response.headers["x-loraserve-did-you-mean"] == "temprature=temperature, top_kk=top_k"
    assert "x-loraserve-did-you-mean" not in (await complete(client, store=True, metadata={})).headers


async def test_many_long_unknown_fields_are_answered_at_once(client: httpx2.AsyncClient) -> None:
    names = {f"temperatur_{'e' * 45}{number}": 1 for number in range(500)}
    began = scheduled_s()
    response = await complete(client, **names, **{"temperature\r\nx-evil": 1, "temperature,": 1})
    assert scheduled_s() - began < 2
    assert response.status_code == 200
    assert "evil" not in str(response.headers)
    assert response.headers["x-loraserve-ignored"].endswith("(482 more)")


async def test_fields_stating_default_behaviour_are_accepted(client: httpx2.AsyncClient) -> None:
    response = await complete(client, best_of=1, response_format={"type": "text"}, tools=[], use_beam_search=False, n=1)
    assert response.status_code == 200


async def test_failure_before_first_token_has_error_status(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after = 0
    for is_stream in (False, True):
        response = await complete(client, stream=is_stream)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "50")


async def test_failure_after_first_token_is_error_event(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after = 3
    response = await complete(client, stream=True)
    *chunks, last = events_of(response)
    assert response.status_code == 200
    assert len(chunks) == 3
    assert last["error"]["code"] == "overloaded"


async def test_internal_bug_mid_stream_sends_event_without_details(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 3, KeyError("secret")
    response = await complete(client, stream=True)
    assert events_of(response)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_internal_bug_gets_500_with_request_id(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 0, KeyError("secret")
    response = await complete(client)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


async def test_failing_choice_fails_request_and_frees_other_choices(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.step_s = 2, 0.001
    assert (await complete(client, n=4, max_tokens=50)).status_code == 503
    assert engine.live == set()
