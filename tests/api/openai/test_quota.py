"""A tenant's share, over HTTP: refused before anything is done for it, told when it passes, and
given back however a request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.prompts import Prompt
from loraserve.api.services import Services
from loraserve.errors import AdapterNumerics, DeadlineExceeded, Overloaded
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.policy import TenantLimits, TenantPolicy
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.tenancy.limits.admission import Admissions

Limit = Callable[..., Awaitable[None]]
PROMPT = {"model": "sql", "prompt": "0123456789", "max_tokens": 20}
"""Ten tokens, since the tests' tokens are bytes."""


@pytest.fixture
async def services(services: Services) -> Services:
    """Services whose rates stand still: a busy machine's delay would give tokens back."""
    services.admissions = Admissions(monotonic=lambda: 100.0)
    return services


@pytest.fixture
def limit(services: Services) -> Limit:
    """Sets limits of a tenant."""

    async def run(tenant: str = "acme", **limits: float | None) -> None:
        await services.authenticator.tenants.update(tenant, TenantChange(limits), actor="test")

    return run


async def complete(client: httpx2.AsyncClient, **changed: Any) -> httpx2.Response:
    return await client.post("/v1/completions", json={**PROMPT, **changed})


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        await asyncio.sleep(0.002)


async def test_a_tenant_without_limits_gets_no_rate_headers(client: httpx2.AsyncClient) -> None:
    response = await complete(client)
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def test_answers_say_how_the_tenant_stands(client: httpx2.AsyncClient, limit: Limit) -> None:
    await limit(requests_per_minute=3, tokens_per_minute=1000)
    headers = (await complete(client)).headers
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == "970"
    assert headers["x-ratelimit-reset-requests"].endswith("s")


async def test_a_stream_says_how_the_tenant_stands(client: httpx2.AsyncClient, limit: Limit) -> None:
    await limit(requests_per_minute=3)
    assert (await complete(client, stream=True)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_exceeded_rate_gets_429_with_retry_after(client: httpx2.AsyncClient, limit: Limit) -> None:
    await limit(requests_per_minute=1)
    await complete(client)
    response = await complete(client)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("60", "60000")
    assert response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_rate_is_checked_before_body_is_parsed(client: httpx2.AsyncClient, limit: Limit, engine: Any) -> None:
    await limit(requests_per_minute=1)
    await complete(client)
    response = await client.post("/v1/completions", content=b"{no json")
    assert response.status_code == 429
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/tokenize", "/detokenize", "/t/acme/v1/completions"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    ],
)
async def test_each_computing_route_counts_towards_rate(client: httpx2.AsyncClient, limit: Limit, path: str) -> None:
    await limit(requests_per_minute=1)
    await complete(client)
    assert (await client.post(path, json={})).status_code == 429


async def test_listing_models_doesnt_count(client: httpx2.AsyncClient, limit: Limit) -> None:
    await limit(requests_per_minute=1)
    for _ in range(3):
        assert (await client.get("/v1/models")).status_code == 200
    assert (await complete(client)).status_code == 200


async def test_requests_of_other_tenant_use_no_quota(
    url: str, client: httpx2.AsyncClient, limit: Limit, make_tenant: Any, publish: Any
) -> None:
    globex = await make_tenant("globex")
    await publish("sql", tenant=globex)
    await limit(requests_per_minute=1)
    await limit("globex", requests_per_minute=1)
    assert (await complete(client)).status_code == 200
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as other:
        assert (await complete(other)).status_code == 200
        assert (await complete(other)).status_code == 429


async def test_unused_reserved_tokens_are_returned(client: httpx2.AsyncClient, limit: Limit, engine: Any) -> None:
    engine.script = "four"
    await limit(tokens_per_minute=100)
    assert (await complete(client, max_tokens=90)).json()["usage"]["total_tokens"] == 15
    response = await complete(client, max_tokens=70)
    assert response.status_code == 200
    assert (await complete(client, max_tokens=70)).status_code == 429


async def test_tokens_are_reserved_while_a_request_runs(
    client: httpx2.AsyncClient, limit: Limit, engine: Any, services: Services, acme: Any
) -> None:
    engine.step_s = 0.05
    await limit(tokens_per_minute=100)
    first = asyncio.create_task(complete(client, max_tokens=40))
    await until(lambda: len(engine.live) == 1)
    refused = await complete(client, max_tokens=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "tokens")
    assert (await first).status_code == 200
    assert services.admissions.num_running(acme.caller.tenant) == 0


async def test_each_choice_reserves_separate_answer_tokens(client: httpx2.AsyncClient, limit: Limit) -> None:
    await limit(tokens_per_minute=100)
    response = await complete(client, n=5)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (429, "insufficient_quota", "tokens")
    assert "110 tokens" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


async def test_choices_beyond_tenant_queue_limit_never_pass(
    client: httpx2.AsyncClient, limit: Limit, engine: Any
) -> None:
    await limit(max_queued_requests=3)
    assert (await complete(client, n=3)).status_code == 200
    for body in ({"n": 4}, {"n": 2, "prompt": ["x", "y"]}):
        response = await complete(client, **body)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "insufficient_quota")
    assert len(engine.seen) == 3


async def test_an_unbounded_chat_reserves_a_part_alone(
    client: httpx2.AsyncClient, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.api.inference.quota.LIMITS", LIMITS.__class__(unasked_tokens_reserved=20))
    await limit(tokens_per_minute=120)
    messages = [{"role": "user", "content": "hi"}]
    response = await client.post("/v1/chat/completions", json={"model": "sql", "messages": messages})
    assert response.status_code == 200
    used = response.json()["usage"]["total_tokens"]
    assert used > 40
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 120 - used


async def test_so_many_requests_at_once(client: httpx2.AsyncClient, limit: Limit, engine: Any) -> None:
    engine.step_s = 60
    await limit(max_concurrent_requests=2)
    running = [asyncio.create_task(complete(client)) for _ in range(2)]
    await until(lambda: len(engine.live) == 2)
    refused = await complete(client)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for task in running:
        task.cancel()
    await until(lambda: not engine.live)
    engine.step_s = 0.0
    assert (await complete(client)).status_code == 200


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"max_tokens": 0, "echo": True}, {"n": 3}])
async def test_disconnect_frees_slot_and_tokens_except_prompt_tokens(
    client: httpx2.AsyncClient, limit: Limit, engine: Any, services: Services, acme: Any, body: dict[str, Any]
) -> None:
    engine.step_s = 60
    await limit(tokens_per_minute=100)
    task = asyncio.create_task(complete(client, **body))
    await until(lambda: len(engine.live) == body.get("n", 1))
    assert services.admissions.num_running(acme.caller.tenant) == 1
    task.cancel()
    await until(lambda: services.admissions.num_running(acme.caller.tenant) == 0)
    caller = await services.authenticator.authenticate(acme.key)
    # the engine was at it
    assert services.admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "90"


async def remaining_tokens(services: Services, acme: Any) -> int:
    caller = await services.authenticator.authenticate(acme.key)
    return int(services.admissions.headers(caller)["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("failure", [DeadlineExceeded("Its time was over."), AdapterNumerics("Not finite.")])
async def test_failed_request_still_charges_computed_prompt(
    client: httpx2.AsyncClient, limit: Limit, engine: Any, services: Services, acme: Any, failure: Exception
) -> None:
    engine.fail_after, engine.failure = 0, failure
    await limit(tokens_per_minute=100)
    assert (await complete(client)).status_code >= 500
    assert await remaining_tokens(services, acme) == 90


@pytest.mark.parametrize("n", [1, 3])
async def test_request_rejected_by_engine_uses_no_tokens(
    client: httpx2.AsyncClient, limit: Limit, engine: Any, services: Services, acme: Any, n: int, monkeypatch: Any
) -> None:
    generate = engine.generate

    async def full_but_for_one(request: Any) -> Any:
        if engine.seen:
            raise Overloaded("The queue is full.")
        engine.step_s = 60
        async for chunk in generate(request):
            yield chunk

    if n == 1:
        engine.fail_after = 0
    else:
        monkeypatch.setattr(engine, "generate", full_but_for_one)
    await limit(tokens_per_minute=100)
    assert (await complete(client, n=n)).status_code == 503
    assert await remaining_tokens(services, acme) == 100


async def test_tokens_generated_before_disconnect_are_charged(
    client: httpx2.AsyncClient, limit: Limit, engine: Any, services: Services, acme: Any
) -> None:
    engine.step_s = 0.005
    await limit(tokens_per_minute=1000)
    task = asyncio.create_task(complete(client, stream=False))
    await until(lambda: len(engine.live) == 1)
    await asyncio.sleep(0.06)
    task.cancel()
    await until(lambda: services.admissions.num_running(acme.caller.tenant) == 0)
    caller = await services.authenticator.authenticate(acme.key)
    assert 970 <= int(services.admissions.headers(caller)["x-ratelimit-remaining-tokens"]) < 990


def test_unread_generated_tokens_are_charged_at_request_end(services: Services, acme: Any) -> None:
    caller = replace(acme.caller, policy=TenantPolicy(limits=TenantLimits(tokens_per_minute=100)))
    admitted = services.admissions.enter(caller)
    admitted.reserve(10, 50)
    prompt = Prompt(tuple(range(10)), None)
    context: Any = SimpleNamespace(prompts=[prompt], body=SimpleNamespace(n=1), services=services, adapter=None)
    RequestUsage(context, caller, admitted).close(num_made=7)
    admitted.release()
    assert services.admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "83"


@pytest.mark.parametrize("changed", [{"model": "nothing"}, {"prompt": 3}, {"temperature": "x"}, {"max_tokens": 10**6}])
async def test_refused_request_frees_slot(
    client: httpx2.AsyncClient, limit: Limit, services: Services, acme: Any, changed: dict[str, Any]
) -> None:
    await limit(tokens_per_minute=100)
    response = await complete(client, **changed)
    assert response.status_code in (400, 404)
    assert services.admissions.num_running(acme.caller.tenant) == 0
    assert response.headers["x-ratelimit-remaining-tokens"] == "100"


async def test_engine_failure_frees_slot(
    client: httpx2.AsyncClient, engine: Any, services: Services, acme: Any
) -> None:
    engine.fail_after = 0
    assert (await complete(client)).status_code == 503
    assert services.admissions.num_running(acme.caller.tenant) == 0


async def test_engine_receives_tenant_weight_and_shares(
    client: httpx2.AsyncClient, services: Services, engine: Any, limit: Limit
) -> None:
    await complete(client)
    await services.authenticator.tenants.update("acme", TenantChange(weight=2.5), actor="test")
    await limit(max_queued_requests=7, max_kv_share=0.25)
    await complete(client)
    facts = [(request.weight, request.kv_share, request.max_queued) for request in engine.seen]
    assert facts == [(1.0, 1.0, 0), (2.5, 0.25, 7)]


async def test_admin_acting_for_tenant_uses_tenant_rate(client: httpx2.AsyncClient, url: str, limit: Limit) -> None:
    await limit(requests_per_minute=1)
    await complete(client)
    headers = {"authorization": "Bearer admin-key-of-the-tests-" + "x" * 20, "x-tenant": "acme"}
    async with httpx2.AsyncClient(base_url=url, headers=headers) as admin:
        assert (await complete(admin)).status_code == 429


async def test_unserved_requests_use_no_rate(client: httpx2.AsyncClient, limit: Limit, engine: Any) -> None:
    await limit(requests_per_minute=3)
    engine.fail_after = 0
    for _ in range(5):
        answer = await complete(client)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (503, "3")
    engine.fail_after = None
    assert [(await complete(client)).status_code for _ in range(4)] == [200, 200, 200, 429]
