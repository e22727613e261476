"""One tenant's requests that wait, stall or flood, beside another's that are answered."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from core_clock import scheduled_s
from stalled import head, stalled, statuses

from loraserve.api.http import connection
from loraserve.api.services import Services
from loraserve.limits import KIB, LIMITS, Limits
from loraserve.registry.uploads import concurrency_limiter

pytestmark = pytest.mark.usefixtures("no_leaks")

BODY = {"model": "base", "prompt": "x", "max_tokens": 4}


@pytest.fixture
async def globex(
    url: str, base: Any, make_tenant: Callable[[str], Awaitable[Any]]
) -> AsyncIterator[httpx2.AsyncClient]:
    """The other tenant's client."""
    tenant = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=tenant.headers, timeout=10) as client:
        yield client


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        await asyncio.sleep(0.005)


def delayed(event: asyncio.Event, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def late(*args: Any, **kwargs: Any) -> Any:
        await event.wait()
        return await call(*args, **kwargs)

    return late


async def answers(client: httpx2.AsyncClient, base_id: str) -> httpx2.Response:
    return await client.post("/v1/completions", json=BODY | {"model": base_id})


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def half_sent(key: str, num_bytes: int = 100, of: int = 1000, path: str = "/v1/completions") -> bytes:
    return head("POST", path, {"Authorization": f"Bearer {key}"}, length=of) + b" " * num_bytes


@pytest.mark.parametrize("limits", [Limits(max_live_requests=16)])
async def test_stalled_bodies_leave_capacity_to_other_tenants(
    url: str, acme: Any, globex: httpx2.AsyncClient, base: Any, services: Services, limits: Limits
) -> None:
    async with stalled(url, half_sent(acme.key), 24) as connections:
        # of the half that is one tenant's, a key leaves a part to the tenant's others
        await until(lambda: statuses(connections) == {None: 7, 429: 17})
        for _ in range(4):
            response = await answers(globex, base.id)
            assert response.status_code == 200, response.text
        mine = await globex.post("/v1/completions", json=BODY, headers=acme.headers)
        assert (mine.status_code, mine.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in mine.headers
        other_key = await services.authenticator.keys.create(acme.caller.tenant, name="second", actor="test")
        other = await globex.post("/tokenize", json={"prompt": "x"}, headers=bearer(other_key.secret))
        assert other.status_code == 200, other.text
    await until(lambda: [shares.total for shares in services.rooms.all()][1:] == [0] * 5)


@pytest.mark.parametrize("limits", [Limits(max_live_requests=8)])
async def test_waiting_requests_leave_capacity_to_other_tenants(
    url: str, acme: Any, globex: httpx2.AsyncClient, base: Any, engine: Any, limits: Limits
) -> None:
    engine.step_s = 60
    async with httpx2.AsyncClient(base_url=url, headers=acme.headers, timeout=30) as client:
        waiting = [asyncio.create_task(answers(client, base.id)) for _ in range(8)]
        await until(lambda: sum(task.done() for task in waiting) == 4 and len(engine.live) == 4)
        assert {task.result().status_code for task in waiting if task.done()} == {429}
        engine.step_s = 0
        assert (await answers(globex, base.id)).status_code == 200
        for task in waiting:
            task.cancel()
        await until(lambda: not engine.live)


@pytest.mark.parametrize("limits", [Limits(max_body_bytes_in_flight=400 * KIB)])
async def test_half_sent_bodies_hold_bounded_bytes(
    url: str, acme: Any, globex: httpx2.AsyncClient, base: Any, services: Services, limits: Limits
) -> None:
    held = services.rooms.body_bytes
    most = 0
    async with stalled(url, half_sent(acme.key, 100 * KIB, of=200 * KIB), 20) as connections:
        deadline = time.monotonic() + 5
        while statuses(connections)[None] > 2 and time.monotonic() < deadline:
            most = max(most, held.total)
            await asyncio.sleep(0.001)
        assert statuses(connections)[429] >= 17
        assert most <= 200 * KIB
        response = await globex.post("/v1/completions", json=BODY | {"model": base.id, "user": "u" * 60 * KIB})
        assert response.status_code == 200, response.text
    await until(lambda: held.total == 0)


@pytest.mark.parametrize("limits", [Limits(stalled_reader_s=0.5)])
async def test_body_stalling_after_fast_start_frees_slot_promptly(
    url: str, acme: Any, services: Services, limits: Limits
) -> None:
    # at 16 KiB a second this much once bought another 64 seconds
    async with stalled(url, half_sent(acme.key, 1024 * KIB, of=1100 * KIB), 1) as (connection,):
        began = scheduled_s()
        while connection.status is None:
            # never silent for as long as would end it
            assert connection.writer is not None
            connection.writer.write(b" ")
            await asyncio.sleep(0.1)
            assert scheduled_s() - began < 3
        assert connection.status == 408
    await until(lambda: services.rooms.live.total == 0)


async def test_reader_below_minimum_pace_is_dropped(
    url: str, acme: Any, base: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.5, min_read_bytes_per_s=1024 * KIB))
    engine.script = "word " * 45
    body = BODY | {"model": base.id, "n": 16, "stream": True, "max_tokens": 200, "logprobs": 20}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", urlsplit(url).port))
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    sock.sendall(head("POST", "/v1/completions", acme.headers, length=len(data)) + data)
    await until(lambda: len(engine.live) > 0)
    began = scheduled_s()
    while engine.live:
        # each time enough for the server to write on
        for _ in range(40):
            await loop.sock_recv(sock, 4 * KIB)
        await asyncio.sleep(0.4)
        assert scheduled_s() - began < 5, "it holds its place"
    assert engine.num_aborted > 0
    sock.close()


def large_answer(acme: Any) -> bytes:
    """Return a request whose answer has some megabytes, in one piece."""
    data = json.dumps({"prompt": "x" * 500_000, "return_token_strs": True}).encode()
    return head("POST", "/tokenize", acme.headers | {"Connection": "close"}, length=len(data)) + data


async def read_in_steps(url: str, data: bytes, step_bytes: int, pause_s: float) -> int:
    """Return how much of an answer a reader gets that takes so much at a time."""
    sock = socket.socket()
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", urlsplit(url).port))
        await loop.sock_sendall(sock, data)
        num_bytes = 0
        try:
            while piece := await loop.sock_recv(sock, step_bytes):
                num_bytes += len(piece)
                await asyncio.sleep(pause_s)
        except ConnectionError:
            pass
        return num_bytes


async def test_large_answer_is_delivered_at_reader_pace(url: str, acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.5, min_read_bytes_per_s=32 * KIB))
    whole = await read_in_steps(url, large_answer(acme), 1024 * KIB, 0)
    assert whole > 3_000_000
    began = time.monotonic()
    # in far more than half a second, at far more than the least pace
    assert await read_in_steps(url, large_answer(acme), 32 * KIB, 0.015) == whole
    assert time.monotonic() - began > 1.0
    # a reader that takes less is cut, and gets little more than what the system held by then
    got = await read_in_steps(url, large_answer(acme), 1 * KIB, 0.05)
    assert got < whole // 4


@pytest.mark.parametrize("limits", [Limits(max_unproven_requests=8)])
async def test_requests_without_a_good_key_hold_no_place(
    url: str, globex: httpx2.AsyncClient, base: Any, services: Services, limits: Limits
) -> None:
    for key in ("sk-lora-none", "", "x" * 600):
        async with stalled(url, half_sent(key), 40) as connections:
            await until(lambda: statuses(connections) == {401: 40})
            assert services.rooms.unproven.total == services.rooms.body_bytes.total == 0
            assert (await answers(globex, base.id)).status_code == 200


@pytest.mark.parametrize("limits", [Limits(max_unproven_requests=4)])
async def test_unproven_keys_hold_only_address_share_of_slots(
    url: str,
    globex: httpx2.AsyncClient,
    base: Any,
    services: Services,
    limits: Limits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (await answers(globex, base.id)).status_code == 200
    looked_up = asyncio.Event()
    slow = delayed(looked_up, services.authenticator.authenticate)
    monkeypatch.setattr(services.authenticator, "authenticate", slow)
    async with stalled(url, half_sent("sk-lora-none"), 6, source="127.0.0.2") as connections:
        await until(lambda: statuses(connections) == {None: 2, 429: 4})
        asking = asyncio.create_task(answers(globex, base.id))
        assert (await globex.get("/livez")).status_code == 200
        looked_up.set()
        assert (await asking).status_code == 200
        await until(lambda: statuses(connections) == {401: 2, 429: 4})


@pytest.mark.parametrize("limits", [Limits(max_management_requests=8)])
async def test_management_requests_leave_capacity_for_tenants_and_completions(
    url: str, acme: Any, globex: httpx2.AsyncClient, base: Any, services: Services, limits: Limits
) -> None:
    keys = services.authenticator.keys
    scraper = await keys.create(acme.caller.tenant, name="prometheus", actor="test", scopes=["metrics:read"])
    data = half_sent(acme.key, path="/api/v1/uploads")
    async with stalled(url, data, 10) as connections:
        await until(lambda: statuses(connections) == {None: 4, 429: 6})
        assert (await globex.get("/api/v1/adapters")).status_code == 200
        assert (await answers(globex, base.id)).status_code == 200
        own = await globex.get("/api/v1/adapters", headers=acme.headers)
        assert own.status_code == 429
        admin = {"authorization": "Bearer admin-key-of-the-tests-" + "x" * 20, "x-tenant": "acme"}
        # an operator has a share of its own, also where it acts for that tenant
        assert (await globex.get("/api/v1/adapters", headers=admin)).status_code == 200
        scrape = await globex.get("/metrics", headers={"authorization": f"Bearer {scraper.secret}"})
        assert scrape.status_code == 200, scrape.text
        metrics = scrape.text
    assert 'loraserve_share_refusals_total{reason="share",room="management"} 7.0' in metrics


def half_sent_upload(key: str, num_bytes: int) -> bytes:
    """Return a push of 64 MiB whose bytes stop coming."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "multipart/form-data; boundary=xx"}
    part = b'--xx\r\nContent-Disposition: form-data; name="weights"\r\n\r\n'
    return head("POST", "/api/v1/adapters/stalled/versions", headers, length=64 << 20) + part + bytes(num_bytes)


async def test_stalled_uploads_leave_slots_to_third_tenant(
    url: str,
    acme: Any,
    globex: httpx2.AsyncClient,
    make_tenant: Callable[[str], Awaitable[Any]],
    make_upload: Callable[..., tuple[bytes, bytes]],
    services: Services,
) -> None:
    initech = await make_tenant("initech")
    uploads = services.registry.uploads.shares()[0]
    config, weights = make_upload(1)
    files = {"config": ("adapter_config.json", config), "weights": ("adapter_model.safetensors", weights)}
    async with (
        stalled(url, half_sent_upload(acme.key, 8 * KIB), 10) as first,
        stalled(url, half_sent_upload(initech.key, 8 * KIB), 10) as second,
    ):
        await until(lambda: statuses(first)[429] + statuses(second)[429] == 20 - uploads.total and uploads.total >= 12)
        assert statuses(first)[None] + statuses(second)[None] == uploads.total == 12
        pushed = await globex.post("/api/v1/adapters/mine/versions", files=files)
        assert pushed.status_code == 201, pushed.text
        file = await globex.get("/api/v1/adapters/mine/versions/1/files/adapter_model.safetensors")
        assert file.content == weights
    await until(lambda: uploads.total == 0)


@pytest.mark.parametrize("kind", ["push", "piece"])
async def test_stalled_upload_yields_slot_to_tenant_without_slot(
    url: str,
    acme: Any,
    globex: httpx2.AsyncClient,
    make_upload: Callable[..., tuple[bytes, bytes]],
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(concurrency_limiter, "LIMITS", Limits(stalled_upload_s=0.5))
    uploads = services.registry.uploads.shares()[0]
    uploads.capacity = 1
    config, weights = make_upload(1)
    files = {"config": ("adapter_config.json", config), "weights": ("adapter_model.safetensors", weights)}
    data = half_sent_upload(acme.key, 100 * KIB)
    if kind == "piece":
        announced = {"sha256": "a" * 64, "size": 200 * KIB}
        made = await globex.post("/api/v1/uploads", json=announced, headers=acme.headers)
        headers = acme.headers | {"Content-Range": f"bytes 0-{200 * KIB - 1}/{200 * KIB}"}
        data = head("PATCH", f"/api/v1/uploads/{made.json()['id']}", headers, length=200 * KIB) + bytes(100 * KIB)
    async with stalled(url, data, 1) as (connection,):
        await until(lambda: uploads.total == 1)
        # not at once: everybody's bytes come a little late
        busy = await globex.post("/api/v1/adapters/mine/versions", files=files)
        assert (busy.status_code, busy.json()["code"]) == (503, "overloaded")
        await asyncio.sleep(0.6)
        pushed = await globex.post("/api/v1/adapters/mine/versions", files=files)
        assert pushed.status_code == 201, pushed.text
        await until(lambda: connection.status == 408)
    await until(lambda: uploads.total == 0)
    assert not services.registry.uploads._slots._senders
    if kind == "piece":
        kept = await globex.get(f"/api/v1/uploads/{made.json()['id']}", headers=acme.headers)
        assert kept.json()["received"] == 100 * KIB


@pytest.mark.parametrize("name", ["Authorization", "X-Tenant", "Idempotency-Key", "Content-Type", "Host", "Expect"])
async def test_duplicate_singleton_header_is_refused(url: str, acme: Any, name: str) -> None:
    headers = [("Host", "x"), ("Authorization", f"Bearer {acme.key}"), ("Connection", "close")]
    headers += [(name, "x")] * (1 if name in ("Host", "Authorization") else 2)
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers)
    async with stalled(url, f"GET /v1/models HTTP/1.1\r\n{lines}\r\n".encode(), 1) as (connection,):
        await until(lambda: connection.is_closed)
        assert connection.status == 400


async def test_the_bounds_are_shown(globex: httpx2.AsyncClient) -> None:
    shown = (await globex.get("/api/v1/limits")).json()
    for name in ("max_connections", "max_unproven_requests", "max_management_requests", "max_body_bytes_in_flight"):
        assert shown[name] == getattr(LIMITS, name)
