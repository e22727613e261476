"""A kept answer is the same answer, for its tenant alone, and gone with its version."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx2
import pytest

from loraserve.errors import EngineCrashed
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.tenancy.prices import Price, PriceTable

pytestmark = pytest.mark.usefixtures("no_leaks")

CACHE = {"ttl": 60}
HEADER = "x-loraserve-cache"


@pytest.fixture
def allow(services: Any) -> Callable[..., Awaitable[None]]:
    """Sets how much of the result cache a tenant may have."""

    async def run(tenant: str = "acme", max_cached_bytes: int | None = 1 << 20) -> None:
        change = TenantChange({"max_cached_bytes": max_cached_bytes})
        await services.authenticator.tenants.update(tenant, change, actor="test")

    return run


@pytest.fixture
async def _allowed(client: httpx2.AsyncClient, allow: Callable[..., Awaitable[None]]) -> None:
    await allow()


async def ask(client: httpx2.AsyncClient, path: str = "completions", **fields: Any) -> httpx2.Response:
    prompt = {"prompt": "x" * 20} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "sql", "max_tokens": 8, "temperature": 0, "cache": CACHE, **prompt, **fields}
    return await client.post(f"/v1/{path}", json=body)


async def outcome(client: httpx2.AsyncClient, path: str = "completions", **fields: Any) -> str:
    response = await ask(client, path, **fields)
    assert response.status_code == 200, response.text
    return response.headers.get(HEADER, "none")


def without_what_may_differ(response: httpx2.Response) -> str:
    """The body without its id, its time, and its usage's details."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n") if is_stream else [response.text]
    shown = []
    for line in lines:
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            shown.append(line)
            continue
        body = json.loads(data)
        del body["id"], body["created"]
        usage = body.get("usage") or {}
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            usage.pop(name, None)
        shown.append(json.dumps(body))
    return "\n".join(shown)


@pytest.mark.usefixtures("_allowed")
async def test_cached_answer_differs_only_in_id_and_usage(
    client: httpx2.AsyncClient, engine: Any, subtests: pytest.Subtests
) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("text", "completions", {}),
        ("a stream", "completions", {"temperature": 0.5, "seed": 9, **streamed}),
        ("choices", "completions", {"n": 3, "seed": 4, "temperature": 1, "prompt": ["a", "b"]}),
        ("log probabilities", "completions", {"logprobs": 3, "echo": True, "return_token_ids": True}),
        ("scores", "completions", {"logprobs": 2, "echo": True, "max_tokens": 0}),
        ("the best of some", "completions", {"best_of": 3, "seed": 2, "temperature": 1}),
        ("a stop string", "completions", {"stop": ["says"], "max_tokens": 40, "min_tokens": 1}),
        ("a stop string that is shown", "completions", {"stop": ["says"], "include_stop_str_in_output": True}),
        ("a chat", "chat/completions", {}),
        ("a streamed chat", "chat/completions", {"n": 2, "seed": 7, "logprobs": True, "top_logprobs": 2, **streamed}),
        ("the base", "completions", {"model": "test-base", **streamed}),
    ]
    for what, path, fields in cases:
        with subtests.test(what):
            if fields.get("model"):
                fields = {**fields, "model": (await client.get("/v1/models")).json()["data"][0]["id"]}
            first = await ask(client, path, **fields)
            num_asked = len(engine.seen)
            second = await ask(client, path, **fields)
            assert (first.status_code, first.headers[HEADER], second.headers[HEADER]) == (200, "miss", "hit")
            assert len(engine.seen) == num_asked
            assert without_what_may_differ(first) == without_what_may_differ(second)


async def test_caching_needs_consent_of_request_and_tenant(
    client: httpx2.AsyncClient, allow: Callable[..., Awaitable[None]], services: Any
) -> None:
    assert [await outcome(client) for _ in range(2)] == ["off", "off"]
    await allow()
    assert [await outcome(client, cache=None) for _ in range(2)] == ["none", "none"]
    assert services.result_cache.num_answers == 0
    assert [await outcome(client) for _ in range(2)] == ["miss", "hit"]
    await allow(max_cached_bytes=None)
    assert await outcome(client) == "off"
    await allow(max_cached_bytes=0)
    assert await outcome(client) == "off"


@pytest.mark.usefixtures("_allowed")
async def test_each_field_affecting_answer_changes_cache_key(
    client: httpx2.AsyncClient, subtests: pytest.Subtests
) -> None:
    await outcome(client)
    for fields in (
        {"prompt": "x" * 21},
        {"max_tokens": 7},
        {"temperature": 0.1, "seed": 1},
        {"temperature": 0.1, "seed": 2},
        {"top_k": 3},
        {"logit_bias": {"5": 1}},
        {"stop": ["q"]},
        {"stop": ["q"], "include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"logprobs": 1},
        {"model": "sql+0.5*sql@1"},
        {"ignore_eos": True},
        {"structured_outputs": {"choice": ["a", "b"]}},
    ):
        with subtests.test(str(fields)):
            assert await outcome(client, **fields) == "miss"
    # what doesn't: its place in queues, its timeout, its form
    for same in (
        {"priority": 3},
        {"timeout": 50},
        {"stream": True},
        {"seed": 77},
        {"user": "u"},
        {"cache": {"ttl": 1}},
    ):
        with subtests.test(str(same)):
            assert await outcome(client, **same) == "hit"


@pytest.mark.usefixtures("_allowed")
async def test_cached_answer_never_reaches_other_tenant(
    client: httpx2.AsyncClient,
    url: str,
    make_tenant: Callable[[str], Awaitable[Any]],
    publish: Callable[..., Any],
    allow: Callable[..., Awaitable[None]],
    engine: Any,
) -> None:
    base_id = (await client.get("/v1/models")).json()["data"][0]["id"]
    other = await make_tenant("other")
    await allow("other")
    # the same bytes: the same digest
    await publish("sql", tenant=other)
    assert [await outcome(client, model=model) for model in ("sql", base_id)] == ["miss", "miss"]
    async with httpx2.AsyncClient(base_url=url, headers=other.headers, timeout=10) as theirs:
        for model in ("sql", base_id):
            num_asked = len(engine.seen)
            assert [await outcome(theirs, model=model) for _ in range(2)] == ["miss", "hit"]
            assert len(engine.seen) == num_asked + 1
            assert await outcome(client, model=model) == "hit"


@pytest.mark.usefixtures("_allowed")
async def test_new_version_misses_cache_and_deletion_clears_answers(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, acme: Any
) -> None:
    assert [await outcome(client) for _ in range(2)] == ["miss", "hit"]
    assert await publish("sql", seed=1) == 2
    assert [await outcome(client) for _ in range(2)] == ["miss", "hit"]
    await services.registry.delete(acme.caller.tenant, "sql", actor="test")
    assert (services.result_cache.num_answers, services.result_cache.num_bytes) == (0, 0)
    gone, absent = await ask(client), await ask(client, model="sqm")
    assert (gone.status_code, gone.text) == (404, absent.text.replace("sqm", "sql"))


@pytest.mark.usefixtures("_allowed")
async def test_answer_generated_during_version_deletion_is_not_cached(
    client: httpx2.AsyncClient, services: Any, acme: Any, engine: Any
) -> None:
    engine.step_s = 0.02
    body = {"model": "sql", "prompt": "x", "max_tokens": 8, "temperature": 0, "cache": CACHE, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await services.registry.delete(acme.caller.tenant, "sql", actor="test")
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
    assert services.result_cache.num_answers == 0


@pytest.mark.usefixtures("_allowed")
async def test_tenant_deletion_clears_cache_and_revoked_key_fails(
    client: httpx2.AsyncClient, services: Any, acme: Any
) -> None:
    assert await outcome(client) == "miss"
    keys = services.authenticator.keys
    (key,) = (await keys.list(acme.caller.tenant)).items
    await keys.revoke(acme.caller.tenant, key.id, actor="test")
    assert (await ask(client)).status_code == 401
    await services.authenticator.tenants.delete("acme", actor="test")
    assert services.result_cache.num_answers == 0


@pytest.mark.usefixtures("_allowed")
async def test_failed_or_truncated_answers_are_not_cached(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 3, EngineCrashed("gone")
    assert (await ask(client)).status_code == 500
    failed = await ask(client, stream=True)
    assert '"error"' in failed.text
    engine.fail_after = None
    assert await outcome(client) == "miss"


@pytest.mark.usefixtures("_allowed")
async def test_disconnect_leaves_no_partial_answer_in_cache(
    client: httpx2.AsyncClient, engine: Any, services: Any
) -> None:
    engine.step_s = 0.02
    body = {"model": "sql", "prompt": "x" * 20, "max_tokens": 8, "temperature": 0, "cache": CACHE, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    engine.step_s = 0
    assert await outcome(client) == "miss"


@pytest.mark.usefixtures("_allowed")
async def test_bad_fields_are_named(client: httpx2.AsyncClient, engine: Any, subtests: pytest.Subtests) -> None:
    draws = {"temperature": 1}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"cache": True}, "cache", "should be an object"),
        ({"cache": "SECRETMARKER"}, "cache", "should be an object"),
        ({"cache": [60]}, "cache", "should be an object"),
        ({"cache": {"ttl": 60, "SECRETMARKER": 1}}, "cache", "may have only ttl"),
        ({"cache": {}}, "cache.ttl", "is missing"),
        ({"cache": {"ttl": None}}, "cache.ttl", "is missing"),
        ({"cache": {"ttl": "60"}}, "cache.ttl", "should be a number of seconds"),
        ({"cache": {"ttl": True}}, "cache.ttl", "should be a number of seconds"),
        ({"cache": {"ttl": 0}}, "cache.ttl", "should be a number of seconds"),
        ({"cache": {"ttl": -1}}, "cache.ttl", "should be a number of seconds"),
        ({"cache": {"ttl": 86_401}}, "cache.ttl", "at most 86400"),
        ({"cache": {"ttl": 10**18}}, "cache.ttl", "at most 86400"),
        (draws, "cache", "with temperature 1 and without a seed each one is drawn anew"),
        ({"temperature": None}, "cache", "drawn anew"),
    ]
    for path in ("completions", "chat/completions"):
        for fields, param, words in cases:
            with subtests.test(f"{path} {fields}"):
                response = await ask(client, path, **fields)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param)
                assert words in error["message"]
                assert "SECRETMARKER" not in response.text
    assert not engine.seen


@pytest.mark.usefixtures("_allowed")
async def test_cached_answer_costs_price_of_cached_tokens(
    client: httpx2.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = PriceTable("EUR", Price(prompt=Decimal(10), cached=Decimal(1), completion=Decimal(100)))
    authenticate = services.authenticator.authenticate

    async def with_prices(secret: str, **holder: Any) -> Any:
        caller = await authenticate(secret, **holder)
        return replace(caller, policy=replace(caller.policy, prices=table))

    monkeypatch.setattr(services.authenticator, "authenticate", with_prices)
    made, kept = (await ask(client)).json()["usage"], (await ask(client)).json()["usage"]
    num_prompt, num_completion = made["prompt_tokens"], made["completion_tokens"]
    assert "completion_tokens_details" not in made
    assert kept["prompt_tokens_details"] == {"cached_tokens": num_prompt}
    assert kept["completion_tokens_details"] == {"cached_tokens": num_completion}
    assert Decimal(kept["cost"]) == Decimal(num_prompt + num_completion) / 1_000_000
    (total,) = await UsageReports(services.usage).all(UsageQuery(group_by=()))
    assert total.amounts.num_requests == 2
    assert total.amounts.cached_tokens == 16 + num_prompt
    assert total.amounts.completion_tokens == 2 * num_completion
    assert total.amounts.num_cached_requests == 1
    assert total.amounts.cached_completion_tokens == num_completion
    assert total.cost == Decimal(made["cost"]) + Decimal(kept["cost"])
    value = services.metrics.registry.get_sample_value
    assert value("loraserve_result_cache_requests_total", {"outcome": "hit"}) == 1
    assert value("loraserve_result_cache_requests_total", {"outcome": "miss"}) == 1
    assert value("loraserve_result_cache_tokens_total") == num_completion
    assert value("loraserve_result_cache_bytes") > 0
    assert value("loraserve_billed_tokens_total", {"kind": "cached_completion"}) == num_completion
    assert value("loraserve_billed_cached_requests_total") == 1


@pytest.mark.usefixtures("_allowed")
async def test_cache_hit_is_counted_once_in_tenant_usage(
    client: httpx2.AsyncClient, services: Any, subtests: pytest.Subtests
) -> None:
    async def amounts() -> Amounts:
        sums = await UsageReports(services.usage).all(UsageQuery(group_by=("tenant",)))
        return next((one.amounts for one in sums if one.group["tenant"] == "acme"), Amounts())

    for body in ({}, {"stream": True, "max_tokens": 7}, {"n": 2, "seed": 3, "temperature": 1.0}):
        with subtests.test(**body):
            before = await amounts()
            await ask(client, **body)
            made = await amounts()
            assert made.num_cached_requests == before.num_cached_requests
            assert made.cached_completion_tokens == before.cached_completion_tokens
            response = await ask(client, **body)
            assert response.headers["x-loraserve-cache"] == "hit"
            kept = await amounts()
            num_tokens = made.completion_tokens - before.completion_tokens
            assert kept.num_requests - made.num_requests == 1
            assert kept.num_cached_requests - made.num_cached_requests == 1
            assert kept.completion_tokens - made.completion_tokens == num_tokens > 0
            assert kept.cached_completion_tokens - made.cached_completion_tokens == num_tokens
            assert kept.undelivered_tokens == before.undelivered_tokens
    (row,) = await UsageReports(services.usage).all(UsageQuery(group_by=("tenant",)))
    assert row.group["tenant"] == "acme", "another tenant has no usage of it"


@pytest.mark.usefixtures("_allowed")
async def test_routes_without_cache_field_report_field_as_ignored(
    client: httpx2.AsyncClient, services: Any, subtests: pytest.Subtests
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"model": "sql", "input": "hi", "temperature": 0}),
        ("/v1/messages", {"model": "sql", "messages": messages, "max_tokens": 8, "temperature": 0}),
        ("/generate", {"inputs": "hi", "parameters": {"adapter_id": "sql", "max_new_tokens": 8}}),
    ]
    for path, body in cases:
        with subtests.test(path):
            response = await client.post(path, json={**body, "cache": CACHE})
            assert response.status_code == 200, response.text
            assert response.headers["x-loraserve-ignored"] == "cache"
            assert HEADER not in response.headers
    assert services.result_cache.num_answers == 0
