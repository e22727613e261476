"""POST /v1/embeddings: its inputs, its forms, what it bills and what it refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest

from loraserve.errors import AdapterNumerics
from loraserve.limits import LIMITS
from loraserve.registry.composition import label
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.types import PoolingKind

BASE = "org/base:1"
pytestmark = pytest.mark.usefixtures("no_leaks")


async def embed(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await client.post("/v1/embeddings", json={"model": "sql", "input": "hello", **body})


async def vectors(client: httpx2.AsyncClient, **body: Any) -> np.ndarray:
    response = await embed(client, **body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [(item["object"], item["index"]) for item in data] == [("embedding", i) for i in range(len(data))]
    return np.array([item["embedding"] for item in data], dtype=np.float32)


async def test_each_form_of_input_is_pooled_in_order(client: httpx2.AsyncClient, engine: Any) -> None:
    tokens = engine.tokenizer.encode("hello")
    [whole] = await vectors(client)
    for value in (["hello"], tokens, [tokens]):
        np.testing.assert_array_equal(await vectors(client, input=value), [whole])
    both = await vectors(client, input=["hello", "world"])
    np.testing.assert_array_equal(both[0], whole)
    np.testing.assert_array_equal(await vectors(client, input=[tokens, engine.tokenizer.encode("world")]), both)
    assert {(r.params.max_tokens, r.pooling.kind, r.adapter.name) for r in engine.seen} == {
        (0, PoolingKind.LAST, "sql")
    }


async def test_answer_names_model_and_adapter_and_counts_tokens(client: httpx2.AsyncClient, services: Any) -> None:
    response = await embed(client, input=["hello", "hi"])
    body = response.json()
    assert (body["object"], body["model"]) == ("list", "sql")
    assert body["id"].startswith("embd-")
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    assert "prefill;dur=3.0" in response.headers["server-timing"]
    [billed] = await UsageReports(services.usage).all(UsageQuery(group_by=("adapter",)))
    assert (billed.amounts.num_requests, billed.amounts.prompt_tokens) == (1, 7)
    assert (billed.amounts.completion_tokens, billed.amounts.undelivered_tokens) == (0, 0)


async def test_base64_is_the_same_numbers(client: httpx2.AsyncClient) -> None:
    plain = await vectors(client, input=["hello", "world"])
    data = (await embed(client, input=["hello", "world"], encoding_format="base64")).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in data]
    np.testing.assert_array_equal(decoded, plain)


async def test_fields_reach_the_engine(client: httpx2.AsyncClient, engine: Any) -> None:
    for kind in PoolingKind:
        assert (await vectors(client, pooling=kind.value, dimensions=3)).shape == (1, 3)
        assert engine.seen[-1].pooling.kind is kind
    for field in ("normalize", "use_activation"):
        [vector] = await vectors(client, **{field: False})
        assert not np.isclose(np.linalg.norm(vector), 1)
    [vector] = await vectors(client, model=BASE, normalize=None, dimensions=None, user=None, encoding_format=None)
    assert np.isclose(np.linalg.norm(vector), 1)
    assert engine.seen[-1].adapter is None
    await vectors(client, model="sql+0.5*sql@1", priority=3, timeout=5)
    assert (label(engine.seen[-1].adapter), engine.seen[-1].priority) == ("1.5*sql@1", 3)


async def test_long_input_is_truncated_as_request_specifies(client: httpx2.AsyncClient, engine: Any) -> None:
    tokens = engine.tokenizer.encode("abcdefgh")
    for value in ("abcdefgh", [tokens]):
        for fields, kept in (
            ({"truncate_prompt_tokens": 3}, tokens[:3]),
            ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, tokens[-3:]),
            ({"truncate_prompt_tokens": 100}, tokens),
            ({"truncate_prompt_tokens": -1}, tokens),
        ):
            await vectors(client, input=value, **fields)
            assert list(engine.seen[-1].prompt_token_ids) == kept
    for value in ("x" * 300, tokens * 40):
        await vectors(client, input=value, truncate_prompt_tokens=-1)
        assert len(engine.seen[-1].prompt_token_ids) == engine.base.max_model_len


async def test_many_inputs_pass_through_engine_in_small_groups(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.step_s = 0.001
    texts = [f"text {i}" for i in range(300)]
    many = await vectors(client, input=texts)
    assert 1 < engine.most_live <= LIMITS.max_live_pooled_inputs
    np.testing.assert_array_equal(many[257], (await vectors(client, input=texts[257]))[0])


async def test_inputs_in_engine_stay_within_tenant_queue_limit(
    client: httpx2.AsyncClient, engine: Any, services: Any
) -> None:
    change = TenantChange({"max_queued_requests": 3})
    await services.authenticator.tenants.update("acme", change, actor="test")
    engine.step_s = 0.001
    await vectors(client, input=["a"] * 20)
    assert engine.most_live == 3


async def test_failure_is_single_answer_and_not_billed(client: httpx2.AsyncClient, engine: Any, services: Any) -> None:
    engine.fail_after, engine.failure = 0, AdapterNumerics("The hidden states were not finite.")
    response = await embed(client, input=["a"] * 100)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_numerics")
    assert await UsageReports(services.usage).all(UsageQuery(group_by=())) == []


async def test_inputs_are_counted_by_pooling_not_as_completions(client: httpx2.AsyncClient, services: Any) -> None:
    await vectors(client, input=["a", "b"], pooling="mean")
    value = services.metrics.registry.get_sample_value
    assert value("loraserve_pooled_inputs_total", {"pooling": "mean", "reason": "stop"}) == 2
    assert value("loraserve_pooling_duration_seconds_count") == 2
    assert value("loraserve_time_to_first_token_seconds_count") == 0
    assert value("loraserve_prompt_tokens_total") == 2


BAD: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("no input", {"input": None}, 400, "input", "invalid_value"),
    ("an empty text", {"input": ""}, 400, "input", "invalid_value"),
    ("an empty list", {"input": []}, 400, "input", "invalid_value"),
    ("an empty text among others", {"input": ["a", ""]}, 400, "input.1", "invalid_value"),
    ("an empty list of tokens", {"input": [[1], []]}, 400, "input.1", "invalid_value"),
    ("texts and tokens", {"input": ["a", 1]}, 400, "input", "invalid_value"),
    ("tokens and texts", {"input": [1, "a"]}, 400, "input", "invalid_value"),
    ("an object", {"input": {"text": "a"}}, 400, "input", "invalid_value"),
    ("a bool", {"input": [True]}, 400, "input", "invalid_value"),
    ("a token that the model lacks", {"input": [[1], [99999]]}, 400, "input.1.0", "invalid_value"),
    ("a negative token", {"input": [-1]}, 400, "input.0", "invalid_value"),
    ("too many texts", {"input": ["a"] * 2049}, 400, "input", "invalid_value"),
    ("too many lists", {"input": [[1]] * 2049}, 400, "input", "invalid_value"),
    ("too many tokens", {"input": [1] * 257}, 400, "input", "context_length_exceeded"),
    ("a long text", {"input": ["a", "x" * 257]}, 400, "input.1", "context_length_exceeded"),
    ("a text of a megabyte and more", {"input": ["x" * 600_000] * 2}, 413, "input", "payload_too_large"),
    ("a pooling that isn't one", {"pooling": "max"}, 400, "pooling", "invalid_value"),
    ("a pooling of another type", {"pooling": 1}, 400, "pooling", "invalid_value"),
    ("no dimensions", {"dimensions": 0}, 400, "dimensions", "invalid_value"),
    ("more dimensions than there are", {"dimensions": 9}, 400, "dimensions", "invalid_value"),
    ("dimensions as a word", {"dimensions": "three"}, 400, "dimensions", "invalid_value"),
    ("a form that isn't one", {"encoding_format": "hex"}, 400, "encoding_format", "invalid_value"),
    ("another dtype", {"embed_dtype": "float16"}, 400, "embed_dtype", "invalid_value"),
    ("another order", {"endianness": "big"}, 400, "endianness", "invalid_value"),
    ("cut to nothing", {"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "invalid_value"),
    ("cut below nothing", {"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "invalid_value"),
    ("cut in the middle", {"truncation_side": "both"}, 400, "truncation_side", "invalid_value"),
    ("padding", {"padding": "max_length"}, 400, "padding", "unsupported_parameter"),
    ("ahead of all", {"priority": -1}, 403, "", "permission_denied"),
    ("a model that isn't there", {"model": "nobody"}, 404, "model", "model_not_found"),
]


async def test_bad_input_gets_4xx_naming_field(client: httpx2.AsyncClient, engine: Any) -> None:
    for what, fields, status, param, code in BAD:
        response = await embed(client, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"] or "", error["code"]) == (status, param, code), what
    assert engine.seen == []


async def test_foreign_model_reads_as_absent(
    client: httpx2.AsyncClient, make_tenant: Callable[..., Any], publish: Callable[..., Any]
) -> None:
    await publish("theirs", 2, tenant=await make_tenant("globex"))
    answers = {
        (await client.post(path, content=json.dumps({"model": name, **body}))).content.replace(name.encode(), b"N")
        for name in ("theirs", "absent")
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/score", {"text_1": "x", "text_2": "y"}),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        )
    }
    assert len(answers) == 1
