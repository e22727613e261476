"""Live figures and slow requests: each tenant's own, all of them for an admin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.errors import AdapterNotReady

from .conftest import ADMIN_KEY
from .test_disconnect import until

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY = {"model": "sql", "prompt": "x", "max_tokens": 5}


async def live(client: httpx2.AsyncClient, **how: Any) -> Any:
    answer = await client.get("/api/v1/live", **how)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def slow(client: httpx2.AsyncClient, query: str = "", **how: Any) -> Any:
    answer = await client.get(f"/api/v1/requests/slow{query}", **how)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def test_live_figures_follow_requests_from_queue_to_end(client: httpx2.AsyncClient, engine: Any) -> None:
    assert (await live(client))["num_ended"] == 0
    engine.steps = asyncio.Semaphore(0)
    asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
    await until(lambda: len(engine.live) == 1)
    assert (await live(client))["num_waiting"] == 1
    engine.steps.release()
    while (now := await live(client))["num_waiting"]:
        await asyncio.sleep(0.01)
    assert now["num_running"] == 1
    for _ in range(4):
        engine.steps.release()
    assert (await asking).status_code == 200
    now = await live(client)
    assert (now["num_waiting"], now["num_running"], now["num_ended"], now["num_failed"]) == (0, 0, 1, 0)
    assert (now["completion_tokens"], now["cached_tokens"]) == (5, 16)
    assert sum(now["first_token_counts"]) == sum(now["per_token_counts"]) == 1
    assert len(now["first_token_counts"]) == len(now["per_token_counts"]) == len(now["bounds_s"]) + 1


async def test_tenant_sees_only_own_activity(
    client: httpx2.AsyncClient, url: str, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    other = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=other.headers | {"x-request-id": "one"}) as stranger:
        ask = {"headers": {"x-request-id": "one"}}

        def steady(figures: Any) -> Any:
            return {name: value for name, value in figures.items() if name != "at"}

        before = steady(await live(stranger, **ask)), await slow(stranger)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert (steady(await live(stranger, **ask)), await slow(stranger)) == before
        assert before[0]["engine"] is None
        assert before[1] == []
        forced = await stranger.get("/api/v1/requests/slow", headers={"x-tenant": "acme"})
        assert forced.status_code == 404
    assert [one["tenant"] for one in await slow(client, headers=ADMIN)] == ["acme"]
    assert await slow(client, headers=ADMIN | {"x-tenant": "globex"}) == []
    everything = await live(client, headers=ADMIN)
    assert (everything["num_ended"], everything["engine"]["max_num_seqs"]) == (1, 64)


async def test_history_has_last_points(
    client: httpx2.AsyncClient, services: Services, make_tenant: Callable[[str], Awaitable[Any]], url: str
) -> None:
    async def history(**how: Any) -> Any:
        answer = await client.get("/api/v1/live/history", **how)
        assert answer.status_code == 200, answer.text
        return answer.json()

    await services.history.take()
    assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    await services.history.take()
    own, everything = await history(), await history(headers=ADMIN)
    assert own["interval_s"] == 20
    assert own["data"][-1]["num_running"] == 0
    assert own["data"][-1]["first_token_s"]["p50"] > 0
    assert own["data"][-1]["kv_share"] is None
    assert len(everything["data"]) == 2
    other = await make_tenant("globex")
    assert (await history(headers=dict(other.headers)))["data"] == []
    assert (await client.get("/api/v1/live/history?minutes=5")).status_code == 400


async def test_slow_requests_report_time_of_each_stage(client: httpx2.AsyncClient, engine: Any) -> None:
    first = (await client.post("/v1/completions", json=BODY)).json()
    engine.step_s = 0.02
    second = (await client.post("/v1/completions", json=BODY)).json()
    for query in ("", "?by=first_token", "?by=duration&limit=2"):
        assert [one["id"] for one in await slow(client, query)] == [second["id"], first["id"]]
    one = (await slow(client, "?limit=1"))[0]
    assert (one["asked"], one["answered_by"], one["outcome"]) == ("sql", "sql@1", "length")
    assert (one["queue_s"], one["adapter_s"], one["prefill_s"]) == (0.001, 0.002, 0.003)
    assert one["adapter_tier"] == "disk"
    assert 0.02 <= one["first_token_s"] < one["duration_s"]
    assert (one["completion_tokens"], one["cached_tokens"]) == (5, 16)


async def test_a_request_without_a_token_is_slow_too(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.fail_after, engine.failure = 0, AdapterNotReady("It isn't loaded yet.")
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503
    (one,) = await slow(client)
    assert (one["outcome"], one["first_token_s"], one["completion_tokens"]) == ("adapter_not_ready", None, 0)
    now = await live(client)
    assert (now["num_ended"], now["num_failed"], now["num_waiting"]) == (1, 1, 0)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


EVENTS = {"accept": "text/event-stream"}


async def test_a_stream_of_figures_ends_with_the_key(client: httpx2.AsyncClient, services: Services, acme: Any) -> None:
    async with client.stream("GET", "/api/v1/live?interval_s=0.5", headers=EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = []
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 1:
                    await services.authenticator.keys.revoke(acme.caller.tenant, acme.caller.key_id, actor="test")
    assert [event["type"] for event in found] == ["figures", "error"]
    assert (found[1]["error"]["status"], found[1]["error"]["code"]) == (401, "invalid_api_key")


async def test_stream_of_figures_ends_when_server_drains(client: httpx2.AsyncClient, services: Services) -> None:
    asking = asyncio.create_task(client.get("/api/v1/live?interval_s=0.5", headers=EVENTS))
    await asyncio.sleep(0.2)
    services.is_draining = True
    assert events_of((await asking).text)[-1] == {"type": "end", "is_draining": True}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/v1/live?interval_s=0.1", "interval_s"),
        ("/api/v1/live?interval_s=nan", "interval_s"),
        ("/api/v1/live?interval_s=1e9", "interval_s"),
        ("/api/v1/live?interval_s=x", "interval_s"),
        ("/api/v1/live?interval=2", "interval"),
        ("/api/v1/requests/slow?by=name", "by"),
        ("/api/v1/requests/slow?limit=0", "limit"),
        ("/api/v1/requests/slow?limit=201", "limit"),
        ("/api/v1/requests/slow?tenant=acme", "tenant"),
    ],
)
async def test_a_wrong_parameter_is_named(client: httpx2.AsyncClient, path: str, field: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, field)


async def test_figures_need_a_scope(client: httpx2.AsyncClient, services: Services, acme: Any) -> None:
    made = await services.authenticator.keys.create(acme.caller.tenant, name="x", actor="test", scopes=["inference"])
    for path in ("/api/v1/live", "/api/v1/requests/slow", "/api/v1/whoami"):
        answer = await client.get(path, headers={"authorization": f"Bearer {made.secret}"})
        assert answer.status_code == 403, path
