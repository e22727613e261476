"""Slots of connections, which count from their acceptance on, of their address and their tenant."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from stalled import head, stalled, statuses
from tls_files import write_certificate

from loraserve.api import server
from loraserve.api.app import create_app
from loraserve.api.http.acceptor import Acceptor
from loraserve.api.http.client_address import TrustedProxies
from loraserve.api.http.listener import DescriptorBudget
from loraserve.api.http.tls import TlsFiles
from loraserve.api.services import Services
from loraserve.limits import Limits
from loraserve.tenancy.limits.shares import address_holder, tenant_holder

from .conftest import served
from .test_shares import answers, delayed, half_sent, until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
async def globex(
    url: str, base: Any, make_tenant: Callable[[str], Awaitable[Any]]
) -> AsyncIterator[httpx2.AsyncClient]:
    tenant = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=tenant.headers, timeout=10) as client:
        yield client


@pytest.fixture
def secure(tmp_path: Path) -> ssl.SSLContext:
    """What a client trusts the server's certificate with."""
    return ssl.create_default_context(cafile=tmp_path / "tls.pem")


@pytest.fixture
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    if not getattr(request, "param", False):
        return None
    write_certificate(tmp_path / "tls.pem", tmp_path / "tls.key")
    return TlsFiles(tmp_path / "tls.pem", tmp_path / "tls.key")


def client_at(url: str, address: str, headers: dict[str, str], verify: ssl.SSLContext | bool) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(local_address=address, verify=verify)
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=10, transport=transport)


@pytest.mark.parametrize("tls", [True], indirect=True)
@pytest.mark.parametrize("limits", [Limits(handshake_s=0.5)])
async def test_connections_without_handshake_count_and_end(
    url: str, acme: Any, base: Any, services: Services, secure: ssl.SSLContext, limits: Limits
) -> None:
    rooms = services.rooms.connections
    rooms.capacity = 8
    num_files = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    async with stalled(url, b"", 10, source="127.0.0.2") as connections:
        # ten descriptors of this side, and four of the server's
        await until(lambda: sum(connection.is_closed for connection in connections) == 6 and rooms.total == 4)
        assert len(os.listdir("/proc/self/fd")) <= num_files + 10 + 4
        async with client_at(url, "127.0.0.1", acme.headers, secure) as others:
            assert (await answers(others, base.id)).status_code == 200
            await until(lambda: all(connection.is_closed for connection in connections))
            assert 0.4 < time.monotonic() - began < 4
            assert rooms.total == 1
    await until(lambda: rooms.total == 0)


@pytest.mark.parametrize("tls", [True], indirect=True)
@pytest.mark.parametrize("data", [b"", b"\x16", b"\x16\x03\x01\x02\x00" + 300 * b"x"], ids=["silent", "byte", "half"])
async def test_connection_without_hello_has_no_tls_object(
    url: str, acme: Any, base: Any, services: Services, secure: ssl.SSLContext, tls: TlsFiles, data: bytes
) -> None:
    made: list[object] = []
    wrap = tls.context.wrap_bio
    tls.context.wrap_bio = lambda *given, **named: made.append(1) or wrap(*given, **named)  # type: ignore[method-assign]
    async with stalled(url, data, 4, source="127.0.0.2"):
        await until(lambda: services.rooms.connections.total == 4)
        async with client_at(url, "127.0.0.1", acme.headers, secure) as others:
            assert (await answers(others, base.id)).status_code == 200
            assert len(made) == 1


@pytest.mark.parametrize("tls", [False, True], indirect=True)
async def test_stalled_bodies_leave_shared_address_to_other_tenants(
    url: str, acme: Any, make_tenant: Any, base: Any, services: Services, tls: Any, tmp_path: Path
) -> None:
    """Behind a proxy or a NAT, one tenant's requests would take the connections of all."""
    services.rooms.connections.capacity = 16
    globex = await make_tenant("globex")
    secure = ssl.create_default_context(cafile=tmp_path / "tls.pem") if tls else None
    async with stalled(url, half_sent(acme.key), 24, source="127.0.0.2", tls=secure) as connections:
        await until(lambda: sum(connection.is_closed for connection in connections) == 17)
        assert services.rooms.connections.held(tenant_holder(acme.caller.tenant)) == 7
        for _ in range(3):
            async with client_at(url, "127.0.0.2", globex.headers, secure or False) as others:
                assert (await answers(others, base.id)).status_code == 200
        async with client_at(url, "127.0.0.2", acme.headers, secure or False) as others:
            own = await answers(others, base.id)
            assert (own.status_code, own.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "connections" in own.json()["error"]["message"]
            assert own.headers["connection"] == "close"
    await until(lambda: services.rooms.connections.total == 0)


async def test_idle_connection_is_the_last_tenants(
    url: str, acme: Any, globex: httpx2.AsyncClient, services: Services
) -> None:
    connections = services.rooms.connections
    tenant = tenant_holder(acme.caller.tenant)
    assert (await globex.get("/v1/models")).status_code == 200
    assert (connections.total, connections.held(tenant)) == (1, 0)
    assert (await globex.get("/v1/models", headers=acme.headers)).status_code == 200
    assert (connections.total, connections.held(tenant)) == (1, 1)


@pytest.mark.parametrize("limits", [Limits(max_unproven_requests=4)])
async def test_forwarded_address_of_trusted_proxy_has_own_share(
    acme: Any, services: Services, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.proxies = TrustedProxies(["127.0.0.1"])
    looked_up = asyncio.Event()
    authenticate = services.authenticator.authenticate
    monkeypatch.setattr(services.authenticator, "authenticate", delayed(looked_up, authenticate))

    def sent(client: str) -> bytes:
        return head("GET", "/v1/models", acme.headers | {"X-Forwarded-For": client}, length=0)

    async with (
        served(create_app(services), services) as url,
        stalled(url, sent("203.0.113.7"), 6) as first,
        stalled(url, sent("203.0.113.8"), 6) as second,
    ):
        await until(lambda: statuses(first)[429] == 4 and statuses(second)[429] == 5)
        held = services.rooms.connections.held
        assert [held(address_holder(f"203.0.113.{n}")) for n in (7, 8)] == [6, 6]
        looked_up.set()
        await until(lambda: statuses(first)[200] == 2 and statuses(second)[200] == 1)


async def test_proxy_header_names_the_connections_address(acme: Any, services: Services, tmp_path: Path) -> None:
    write_certificate(tmp_path / "tls.pem", tmp_path / "tls.key")
    services.proxies = TrustedProxies(["127.0.0.1"], "proxy-protocol")
    tls = TlsFiles(tmp_path / "tls.pem", tmp_path / "tls.key")
    secure = ssl.create_default_context(cafile=tmp_path / "tls.pem")
    held = services.rooms.connections.held
    async with served(create_app(services), services, tls) as url:
        sock = socket.create_connection(("127.0.0.1", urlsplit(url).port))
        sock.sendall(b"PROXY TCP4 203.0.113.7 10.0.0.1 51000 443\r\n")
        await until(lambda: held(address_holder("203.0.113.7")) == 1)
        reader, writer = await asyncio.open_connection(sock=sock, ssl=secure, server_hostname="127.0.0.1")
        writer.write(head("GET", "/v1/models", acme.headers, length=0))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert held(tenant_holder(acme.caller.tenant)) == 1
        writer.transport.abort()
        # without the header, and from an address that isn't a proxy's
        async with stalled(url, b"GET / HTTP/1.1\r\n\r\n", 1) as (without,):
            await until(lambda: without.is_closed)
        async with client_at(url, "127.0.0.3", acme.headers, secure) as direct:
            assert (await direct.get("/v1/models")).status_code == 200
    await until(lambda: services.rooms.connections.total == 0)


async def test_descriptors_are_kept_for_other_files(
    acme: Any, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the lowest free one: a shell may have left high ones open, and the system gives those below
    os.close(lowest := os.dup(0))
    budget = DescriptorBudget(max_connections=1000, first_reserved=lowest + 20)
    monkeypatch.setattr(server, "raise_file_limit", lambda _: budget)
    async with served(create_app(services), services) as url, stalled(url, b"", 40) as connections:
        open_ones = services.rooms.connections
        await until(lambda: open_ones.total == sum(not connection.is_closed for connection in connections) < 20)
        assert services.rooms.connections.num_refused["full"] >= statuses(connections)[503]
    await until(lambda: services.rooms.connections.total == 0)


async def test_accepting_pauses_while_the_system_has_no_descriptor(
    acme: Any, services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, num_failures = Acceptor._accept_one, 0

    def exhausted(self: Acceptor) -> Any:
        nonlocal num_failures
        num_failures += 1
        if num_failures == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(Acceptor, "_accept_one", exhausted)
    async with (
        served(create_app(services), services) as url,
        client_at(url, "127.0.0.1", acme.headers, False) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 200
    assert "Too many open files" in caplog.text
    assert num_failures < 10


async def test_single_address_leaves_connections_to_other_addresses(
    url: str, globex: httpx2.AsyncClient, base: Any, services: Services
) -> None:
    services.rooms.connections.capacity = 8
    async with stalled(url, b"", 10, source="127.0.0.2") as connections:
        await until(lambda: statuses(connections) == {None: 4, 429: 6})
        assert (await answers(globex, base.id)).status_code == 200
        await until(lambda: sum(connection.is_closed for connection in connections) == 6)
    await until(lambda: services.rooms.connections.total <= 1)


async def test_compressed_body_is_refused_by_encoding(url: str, globex: httpx2.AsyncClient) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    for path in ("/tokenize", "/api/v1/uploads"):
        answer = await globex.post(path, content=body, headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 415, answer.text
        assert "Content-Encoding" in answer.text
        assert "unsupported_content_encoding" in answer.text
    plain = await globex.post("/tokenize", json={"prompt": "x"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/nowhere", "/api/v1/limits", "/openapi.json", "/console/"])
async def test_answer_of_any_route_is_not_sniffed(globex: httpx2.AsyncClient, path: str) -> None:
    assert (await globex.get(path)).headers["x-content-type-options"] == "nosniff"
