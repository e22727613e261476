"""LoRAX's and TGI's routes, read as their clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import msgspec
import pytest
from pydantic import BaseModel

from loraserve.errors import EngineUnavailable
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.types import FinishReason, TokenOutput

PATHS = ("/", "/generate", "/generate_stream")


class Candidate(BaseModel):
    """As LoRAX's client has it, and with no field left out."""

    id: int
    text: str
    logprob: float | None
    special: bool


class Token(Candidate):
    alternative_tokens: list[Candidate] | None = None
    skipped: bool


class StreamDetails(BaseModel):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(BaseModel):
    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: list[Candidate] | None = None


def generate_body(inputs: str = "list", **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"adapter_id": "sql", **parameters}}


async def generate(client: httpx2.AsyncClient, inputs: str = "list", **parameters: Any) -> dict[str, Any]:
    answer = await client.post("/generate", json=generate_body(inputs, **parameters))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(
    client: httpx2.AsyncClient, inputs: str = "list", path: str = "/generate_stream", **parameters: Any
) -> list[StreamEvent]:
    """Read a stream by LoRAX's client's own steps, which fail at a line that isn't an event."""
    body = generate_body(inputs, **parameters) | {"stream": True}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    return [StreamEvent(**json.loads(line.lstrip("data:").rstrip("/n"))) for line in lines]  # noqa: B005 (as the client does)


async def test_generate_answers_with_adapter_and_requested_details(client: httpx2.AsyncClient, engine: Any) -> None:
    answer = await client.post("/generate", json=generate_body(max_new_tokens=3))
    assert answer.json() == {"generated_text": "sql"}
    assert answer.headers["x-loraserve-adapter"] == answer.headers["x-adapter-id"] == "sql@1"
    assert answer.headers["x-model-id"] == engine.base.id
    assert answer.headers["x-adapter-source"] == "local"
    details = (await generate(client, max_new_tokens=3, details=True))["details"]
    assert {name: details[name] for name in ("finish_reason", "prompt_tokens", "generated_tokens", "seed")} == {
        "finish_reason": "length",
        "prompt_tokens": 4,
        "generated_tokens": 3,
        "seed": None,
    }
    assert "".join(token["text"] for token in details["tokens"]) == "sql"
    assert details["prefill"] == []


async def test_the_base_answers_without_an_adapter(client: httpx2.AsyncClient) -> None:
    for parameters in ({}, {"adapter_id": None}, {"adapter_id": ""}, {"adapter_id": "__base_model__"}):
        body = {"inputs": "x", "parameters": {"max_new_tokens": 4, **parameters}}
        answer = await client.post("/generate", json=body)
        assert answer.json() == {"generated_text": "base"}
        assert "x-adapter-id" not in answer.headers
    assert (await client.post("/generate", json={"inputs": "x", "parameters": None})).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_stream_has_event_per_token_without_done_marker(client: httpx2.AsyncClient, path: str) -> None:
    found = await events(client, path=path, details=True)
    assert [one.index for one in found] == list(range(1, len(found) + 1))
    assert {one.generated_text for one in found[:-1]} == {None}
    last = found[-1]
    # the last token is the end's, which is special
    assert last.token.special
    assert last.generated_text == "".join(one.token.text for one in found if not one.token.special)
    assert last.generated_text.startswith("sql says ")
    assert last.details is not None
    assert last.details.finish_reason == "eos_token"
    assert last.details.generated_tokens == len(found)
    assert last.details.prompt_tokens == last.details.input_length == 4


async def test_root_route_answers_with_single_item_list(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/", json=generate_body(max_new_tokens=3))
    assert answer.json() == [{"generated_text": "sql"}]


async def test_tokens_of_single_character_share_text(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "é!"
    found = await events(client)
    assert [one.token.text for one in found] == ["", "é", "!", "<|eos|>"]


DRAWN: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0}, 0.0),
    ({"do_sample": True}, 1.0),
    ({"temperature": 0.7}, 0.7),
    ({"top_k": 5}, 1.0),
    ({"top_p": 0.9}, 1.0),
    ({"do_sample": True, "temperature": 0}, 0.0),
]


async def test_tokens_are_sampled_only_if_parameter_requests(client: httpx2.AsyncClient, engine: Any) -> None:
    for parameters, expected in DRAWN:
        details = (await generate(client, details=True, max_new_tokens=1, **parameters))["details"]
        params = engine.seen[-1].params
        assert params.temperature == expected, parameters
        assert details["seed"] == (params.seed if expected else None), parameters


async def test_parameters_reach_the_engine(client: httpx2.AsyncClient, engine: Any) -> None:
    await generate(
        client,
        max_new_tokens=7,
        do_sample=True,
        top_k=3,
        top_p=0.5,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=0.125,
        seed=(1 << 64) - 1,
        ignore_eos_token=True,
        stop=["fox"],
    )
    request = engine.seen[-1]
    params = request.params
    assert (params.max_tokens, params.top_k, params.top_p, params.seed) == (7, 3, 0.5, (1 << 63) - 1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, 0.25, 0.125)
    assert params.ignore_eos
    assert (request.stop, params.logprobs) == (("fox",), None)


async def test_answer_without_limit_may_fill_context(client: httpx2.AsyncClient, engine: Any) -> None:
    await generate(client, inputs="x" * 6)
    assert engine.seen[-1].params.max_tokens == engine.base.max_model_len - 6


async def test_stop_sequence_ends_text_and_is_included(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = "one two three"
    whole = await generate(client, stop=["two"], details=True)
    assert whole["generated_text"] == "one two"
    assert whole["details"]["finish_reason"] == "stop_sequence"
    assert (await events(client, stop=["two"]))[-1].generated_text == "one two"


async def test_prompt_is_scored_truncated_and_repeated_on_request(client: httpx2.AsyncClient, engine: Any) -> None:
    scored = await generate(client, inputs="abc", decoder_input_details=True, max_new_tokens=1)
    prefill = scored["details"]["prefill"]
    assert [(token["text"], token["logprob"] is None) for token in prefill] == [("a", True), ("b", False), ("c", False)]
    cut = await generate(client, inputs="abc" * 200, truncate=2, max_new_tokens=1, return_full_text=True)
    assert engine.tokenizer.decode(engine.seen[-1].prompt_token_ids) == "bc"
    assert cut["generated_text"] == "abc" * 200 + "s"


async def test_likeliest_tokens_are_listed_in_two_forms(client: httpx2.AsyncClient) -> None:
    details = (await generate(client, max_new_tokens=2, details=True, return_k_alternatives=2, top_n_tokens=3))[
        "details"
    ]
    assert [len(token["alternative_tokens"]) for token in details["tokens"]] == [2, 2]
    assert [len(top) for top in details["top_tokens"]] == [3, 3]
    last = (await events(client, return_k_alternatives=1, top_n_tokens=2))[-1]
    assert last.token.alternative_tokens is not None
    assert last.top_tokens is not None
    assert (len(last.token.alternative_tokens), len(last.top_tokens)) == (1, 2)


async def test_best_candidate_is_answered_with_rest_in_details(
    client: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, log_probabilities = engine._steps, (-2.0, -0.1, -3.0)

    async def scored(request: Any) -> AsyncIterator[TokenOutput]:
        logprob = log_probabilities[int(request.request_id.rpartition("-")[2])]
        async for output in steps(request):
            entries = tuple(msgspec.structs.replace(entry, logprob=logprob) for entry in output.logprobs)
            yield msgspec.structs.replace(output, logprobs=entries)

    monkeypatch.setattr(engine, "_steps", scored)
    answer = await generate(client, best_of=3, do_sample=True, details=True, max_new_tokens=12, seed=5)
    seeds = [request.params.seed for request in engine.seen]
    details = answer["details"]
    assert details["seed"] == seeds[1]
    assert answer["generated_text"] == f"sql says {seeds[1] % 1000}: "[:12]
    assert [one["seed"] for one in details["best_of_sequences"]] == [seeds[0], seeds[2]]
    assert {one["generated_tokens"] for one in details["best_of_sequences"]} == {12}


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, "inputs", "validation"),
    ({"inputs": ""}, 400, "inputs", "validation"),
    ({"inputs": ["a"]}, 400, "inputs", "validation"),
    ({"inputs": "x", "parameters": []}, 400, "parameters", "validation"),
    ({"inputs": "x" * 300}, 400, "inputs", "validation"),
    (generate_body(max_new_tokens=0), 400, "parameters.max_new_tokens", "validation"),
    (generate_body(max_new_tokens=1000), 400, "inputs", "validation"),
    (generate_body(top_p=0), 400, "parameters.top_p", "validation"),
    (generate_body(temperature="SECRETMARKER"), 400, "parameters.temperature", "validation"),
    (generate_body(seed=1 << 64), 400, "parameters.seed", "validation"),
    (generate_body(stop=["a", ""]), 400, "parameters.stop.1", "validation"),
    (generate_body(truncate=0), 400, "parameters.truncate", "validation"),
    (generate_body(best_of=17), 400, "parameters.best_of", "validation"),
    (generate_body(best_of=2), 400, "parameters.best_of", "validation"),
    (generate_body(best_of=2, do_sample=True) | {"stream": True}, 400, "parameters.best_of", "validation"),
    (
        generate_body(decoder_input_details=True) | {"stream": True},
        400,
        "parameters.decoder_input_details",
        "validation",
    ),
    (generate_body(return_k_alternatives=21), 400, "parameters.return_k_alternatives", "validation"),
    (generate_body(adapter_source="hub"), 400, "parameters.adapter_source", "validation"),
    (generate_body(merged_adapters={"ids": ["a"]}), 400, "parameters.merged_adapters", "validation"),
    (generate_body(response_format={"type": "json_object"}), 400, "parameters.response_format", "validation"),
    (generate_body(grammar={"type": "regex", "value": "a"}), 400, "parameters.grammar", "validation"),
    (generate_body(typical_p=0.5), 400, "parameters.typical_p", "validation"),
    (generate_body(watermark=True), 400, "parameters.watermark", "validation"),
    (generate_body(adapter_id="nobody"), 404, "parameters.adapter_id", "not_found"),
    (generate_body(adapter_id="../../etc"), 404, "parameters.adapter_id", "not_found"),
    (generate_body(adapter_id="sql+*sql"), 400, "parameters.adapter_id", "validation"),
]


async def test_bad_input_is_refused_in_client_error_form(client: httpx2.AsyncClient, engine: Any) -> None:
    for body, status, param, kind in REFUSED:
        answer = await client.post("/generate", json=body)
        error = answer.json()
        assert (answer.status_code, error["param"], error["error_type"]) == (status, param, kind), (body, error)
        assert isinstance(error["error"], str)
        assert "SECRETMARKER" not in answer.text
    assert engine.seen == []


async def test_neutral_fields_are_accepted_and_unknown_fields_named(client: httpx2.AsyncClient) -> None:
    body = generate_body(
        max_new_tokens=1,
        adapter_source="local",
        api_token=None,
        merged_adapters=None,
        best_of=1,
        typical_p=1.0,
        watermark=False,
        response_format={"type": "text"},
        no_such_field=1,
    )
    answer = await client.post("/generate", json=body | {"options": {"use_cache": False}})
    assert answer.status_code == 200
    assert answer.headers["x-loraserve-ignored"] == "options, no_such_field"


async def test_failure_in_stream_is_recognised_as_error_event(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 2, EngineUnavailable("The engine is away.")
    answer = await client.post("/generate_stream", json=generate_body())
    lines = [line for line in answer.text.split("\n") if line]
    assert len(lines) == 3
    error = json.loads(lines[-1].removeprefix("data: "))
    assert (error["error_type"], error["code"]) == ("generation", "engine_unavailable")
    assert error["error"].startswith("The engine is away.")


async def test_stream_ending_without_token_still_ends_with_event(
    client: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = engine._steps

    async def cut(request: Any) -> AsyncIterator[TokenOutput]:
        async for output in steps(request):
            yield output
            yield msgspec.structs.replace(output, token_ids=(), logprobs=(), finish_reason=FinishReason.LENGTH)
            return

    monkeypatch.setattr(engine, "_steps", cut)
    found = await events(client, details=True)
    assert [(one.token.text, one.token.special) for one in found] == [("s", False), ("", True)]
    last = found[-1]
    assert last.generated_text == "s"
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 1)


async def test_keys_tenants_and_quotas_apply_on_all_routes(
    url: str, client: httpx2.AsyncClient, services: Any, acme: Any, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    globex = await make_tenant("globex")
    for path in PATHS:
        none = await client.post(path, json=generate_body(), headers={"authorization": ""})
        assert (none.status_code, none.json()["error_type"]) == (401, "authentication")
        other = await client.post(path, json=generate_body(), headers=globex.headers)
        absent = await client.post(path, json=generate_body(adapter_id="lqs"), headers=globex.headers)
        assert (other.status_code, other.text.replace("sql", "lqs")) == (404, absent.text)
        assert (await client.post(f"/t/acme{path}", json=generate_body())).status_code == 200
        refused = await client.post(f"/t/acme{path}", json=generate_body(), headers=globex.headers)
        assert (refused.status_code, refused.json()["error_type"]) == (404, "not_found")
    await services.authenticator.tenants.update("acme", TenantChange({"requests_per_minute": 1}), actor="test")
    statuses = [(await client.post("/generate", json=generate_body(max_new_tokens=1))) for _ in range(2)]
    assert statuses[-1].status_code == 429
    assert statuses[-1].json()["error_type"] == "rate_limited"
    assert "retry-after" in statuses[-1].headers


async def test_delivered_tokens_are_billed_as_completion(client: httpx2.AsyncClient, services: Any) -> None:
    before = services.usage.recorded
    await generate(client, max_new_tokens=5)
    whole = services.usage.recorded
    assert whole.prompt_tokens - before.prompt_tokens == 4
    assert whole.completion_tokens - before.completion_tokens == 5
    await events(client, max_new_tokens=5)
    streamed = services.usage.recorded
    assert streamed.prompt_tokens - whole.prompt_tokens == 4
    assert streamed.completion_tokens - whole.completion_tokens == 5
    await generate(client, max_new_tokens=5, best_of=2, do_sample=True)
    assert services.usage.recorded.completion_tokens - streamed.completion_tokens == 10
