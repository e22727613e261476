"""Sums of adapters in requests: as text in `model`, and as `adapters` beside the base."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from loraserve.errors import AdapterTooLarge, AdapterUnsupported, InvalidRequest
from loraserve.limits import LIMITS

BASE = "org/base:1"
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
async def two(client: httpx2.AsyncClient, publish: Callable[..., Any]) -> httpx2.AsyncClient:
    """acme's client; acme has ``sql`` and ``pirate``."""
    await publish("pirate", 1)
    return client


async def ask(client: httpx2.AsyncClient, path: str = "completions", **body: Any) -> httpx2.Response:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return await client.post(f"/v1/{path}", json={"model": BASE, "max_tokens": 4, **prompt, **body})


SUMS: list[dict[str, Any]] = [
    {"model": "sql+0.5*pirate"},
    {"model": f"{BASE}:0.5*pirate@live+sql@1"},
    {"adapters": [{"name": "pirate@1", "weight": 0.5}, {"name": "sql", "weight": None}]},
]


async def test_part_accepts_longest_possible_name(
    client: httpx2.AsyncClient, url: str, services: Any, make_tenant: Callable[..., Any], publish: Callable[..., Any]
) -> None:
    longest, name = "x" * LIMITS.max_name_length, "y" * LIMITS.max_adapter_name_length
    owner = await make_tenant(longest)
    await publish(name, 1, owner)
    await services.registry.grants.create(owner.caller.tenant, name, "acme", actor="test")
    async with httpx2.AsyncClient(base_url=url, headers=owner.headers) as theirs:
        moved = await theirs.put(f"/api/v1/adapters/{name}/aliases/{longest}", json={"version": 1})
        assert moved.status_code < 300
    named = f"{longest}/{name}@{longest}"
    assert (await ask(client, adapters=[{"name": named}])).status_code == 200
    assert (await ask(client, adapters=[{"name": named + "x"}])).status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_adapter_sum_runs_as_single_adapter_with_parts(two: httpx2.AsyncClient, engine: Any, path: str) -> None:
    for body in SUMS:
        response = await ask(two, path, **body)
        assert response.status_code == 200
        assert response.headers["x-loraserve-adapter"] == "0.5*pirate@1+sql@1"
        assert response.json()["model"] == body.get("model", BASE)
        adapter = engine.seen[-1].adapter
        assert [(part.adapter.name, part.weight) for part in adapter.parts] == [("pirate", 0.5), ("sql", 1.0)]


async def test_single_part_sum_is_adapter_and_empty_base(two: httpx2.AsyncClient, engine: Any) -> None:
    for body in ({"model": "1.0*sql"}, {"adapters": [{"name": "sql"}]}, {"model": "sql+pirate+-1*pirate"}):
        assert (await ask(two, **body)).headers["x-loraserve-adapter"] == "sql@1"
    for body in (
        {"model": "0*sql"},
        {"adapters": []},
        {"adapters": [{"name": "sql", "weight": 0}]},
        {"adapters": None},
    ):
        response = await ask(two, **body)
        assert (response.status_code, "x-loraserve-adapter" in response.headers) == (200, False)
    assert [request.adapter is None for request in engine.seen] == [False] * 3 + [True] * 4


NO_SUMS: list[tuple[dict[str, Any], str]] = [
    ({"model": "sql+"}, "model"),
    ({"model": "sql-0.5*pirate"}, "model"),
    ({"model": "11*sql"}, "model"),
    ({"model": "10*sql+1*sql"}, "model"),
    ({"model": "+".join(["sql"] * (LIMITS.max_composition_terms + 1))}, "model"),
    ({"model": "x" * 2049}, "model"),
    ({"model": "sql", "adapters": [{"name": "pirate"}]}, "adapters"),
    ({"model": "sql+pirate", "adapters": []}, "adapters"),
    ({"adapters": [{"name": "sql"}] * (LIMITS.max_composition_terms + 1)}, "adapters"),
    ({"adapters": [{"name": "sql", "weight": "0.5"}]}, "adapters.0.weight"),
    ({"adapters": [{"name": "sql", "weight": True}]}, "adapters.0.weight"),
    ({"adapters": [{"name": "sql", "weight": -10.5}]}, "adapters.0.weight"),
    ({"adapters": [{"name": "sql", "weight": 1e300}]}, "adapters.0.weight"),
    ({"adapters": [{"weight": 1}]}, "adapters.0.name"),
    ({"adapters": ["sql"]}, "adapters.0"),
]


async def test_invalid_sum_gets_400_naming_field(two: httpx2.AsyncClient, engine: Any) -> None:
    for body, param in NO_SUMS:
        for path in ("completions", "chat/completions"):
            response = await ask(two, path, **body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), body
    assert engine.seen == []


async def test_foreign_part_reads_byte_for_byte_as_absent(
    two: httpx2.AsyncClient, make_tenant: Callable[[str], Awaitable[Any]], publish: Callable[..., Any]
) -> None:
    await publish("theirs", 2, tenant=await make_tenant("globex"))
    answers = set()
    for name in ("theirs", "absent"):
        for body in ({"model": f"sql+0*{name}"}, {"adapters": [{"name": "sql"}, {"name": name}]}):
            response = await ask(two, **body)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            answers.add(response.content.replace(name.encode(), b"NAME"))
    assert len(answers) == 1


async def test_adapter_sum_is_not_listed_as_model(two: httpx2.AsyncClient) -> None:
    for model in ("sql+pirate", "0.5*sql", "1*sql"):
        response = await two.get(f"/v1/models/{model}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_incompatible_parts_get_400_naming_model(two: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after = 0
    for failure in (InvalidRequest("DoRA."), AdapterUnsupported("IA3."), AdapterTooLarge("Too many ranks.")):
        engine.failure = failure
        for stream in (False, True):
            response = await ask(two, model="sql+pirate", stream=stream)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["message"]) == (400, "model", str(failure))


async def test_incompatible_part_is_named_as_owner_named_part(two: httpx2.AsyncClient, engine: Any) -> None:
    await ask(two, model="sql+pirate")
    pirate = engine.seen[0].adapter.parts[0].adapter
    assert pirate.name == "pirate"
    engine.fail_after, engine.failure = 0, InvalidRequest(f"The adapter of digest {pirate.digest[:12]}… has DoRA.")
    message = (await ask(two, model="sql+pirate")).json()["error"]["message"]
    assert message == f"{engine.failure.message} {pirate.digest[:12]}… is pirate@1."


async def test_adapter_over_the_budget_is_not_worth_retrying(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 0, AdapterTooLarge("It takes 2 GiB.")
    response = await ask(client, model="sql")
    assert (response.status_code, response.headers["x-should-retry"]) == (507, "false")


async def test_routers_are_told_of_each_part(two: httpx2.AsyncClient, services: Any, engine: Any) -> None:
    engine.step_s = 0.01
    body = {"model": "sql+0.5*pirate", "prompt": "x", "max_tokens": 50, "stream": True}
    async with two.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["model"] == "sql+0.5*pirate"
        assert services.metrics.adapter_load.running_names() == ["pirate", "sql"]
        async for _ in lines:
            pass
    assert services.metrics.adapter_load.running_names() == []


async def test_quarantined_version_gets_409_without_retry(
    client: httpx2.AsyncClient, services: Any, acme: Any, make_certificate: Callable[..., Any]
) -> None:
    async def certify(ref: Any) -> Any:
        return make_certificate(verdict="failed", max_difference=0.31)

    services.registry.certificates._certify = certify
    await services.registry.certificates.verify(acme.caller.tenant, "sql", 1, actor="test")
    for body in ({"model": "sql"}, {"model": "0.5*sql@1"}, {"adapters": [{"name": "sql"}]}):
        response = await ask(client, **body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (409, "adapter_quarantined")
        assert "0.31" in error["message"]
        assert response.headers["x-should-retry"] == "false"
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [BASE]
    assert services.registry.num_quarantined_refused == 3
