"""Addresses that trusted proxies hand on, in headers and before a connection's first byte."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from loraserve.api.http.client_address import ProxyHeaderInvalid, TrustedProxies, read_proxy_header

PROXIES = ("10.0.0.0/8", "fd00::/8")
V2 = b"\r\n\r\n\x00\r\nQUIT\n"


def headers(name: str, *values: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((name.encode(), value.encode()) for value in values)]


@pytest.mark.parametrize(
    ("peer", "values", "host"),
    [
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        # what stands before is the client's own word
        ("10.0.0.1", ["198.51.100.1, 203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["198.51.100.1", "203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["203.0.113.7, 10.2.0.1, fd00::3"], "203.0.113.7"),
        ("10.0.0.1", ["203.0.113.7:51000"], "203.0.113.7"),
        ("10.0.0.1", ["[2001:db8::7]:443"], "2001:db8::7"),
        ("10.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        # no address: the last proxy's that there is
        ("10.0.0.1", ["203.0.113.7, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.7, rubbish, 10.2.0.1"], "10.2.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        # a stranger's word
        ("203.0.113.9", ["198.51.100.1"], "203.0.113.9"),
        ("", ["198.51.100.1"], ""),
    ],
)
def test_forwarded_for_names_client_of_trusted_proxy(peer: str, values: list[str], host: str) -> None:
    proxies = TrustedProxies(PROXIES)
    assert proxies.client_host(peer, headers("x-forwarded-for", *values)) == host
    assert TrustedProxies().client_host(peer, headers("x-forwarded-for", *values)) == peer


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("for=203.0.113.7", "203.0.113.7"),
        ('for=198.51.100.1, For="[2001:db8::7]:4711";proto=https;by=10.0.0.1', "2001:db8::7"),
        ("by=10.0.0.1; for=203.0.113.7", "203.0.113.7"),
        ("for=203.0.113.7, for=10.3.0.1", "203.0.113.7"),
        ("for=203.0.113.7, for=_hidden", "10.0.0.1"),
        ("for=203.0.113.7, for=unknown", "10.0.0.1"),
        ("proto=https", "10.0.0.1"),
    ],
)
def test_forwarded_names_client_of_trusted_proxy(value: str, host: str) -> None:
    proxies = TrustedProxies(PROXIES, "forwarded")
    given = headers("forwarded", value) + headers("x-forwarded-for", "198.51.100.99")
    assert proxies.client_host("10.0.0.1", given) == host


def test_header_of_other_source_is_ignored() -> None:
    given = headers("forwarded", "for=198.51.100.99")
    assert TrustedProxies(PROXIES).client_host("10.0.0.1", given) == "10.0.0.1"
    proxies = TrustedProxies(PROXIES, "proxy-protocol")
    assert proxies.client_host("10.0.0.1", headers("x-forwarded-for", "198.51.100.99")) == "10.0.0.1"
    assert [proxies.sends_proxy_header(host) for host in ("10.9.9.9", "203.0.113.9")] == [True, False]


def v2(command: int, family: int, data: bytes) -> bytes:
    return V2 + struct.pack("!BBH", command, family, len(data)) + data


TCP4 = socket.inet_aton("203.0.113.7") + socket.inet_aton("10.0.0.1") + struct.pack("!HH", 51000, 443)
TCP6 = (
    socket.inet_pton(socket.AF_INET6, "2001:db8::7")
    + socket.inet_pton(socket.AF_INET6, "fd00::1")
    + struct.pack("!HH", 51000, 443)
)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 51000 443\r\n", "203.0.113.7"),
        (b"PROXY TCP6 2001:db8::7 fd00::1 51000 443\r\n", "2001:db8::7"),
        (b"PROXY UNKNOWN\r\n", None),
        (b"PROXY UNKNOWN ffff:f::1 ffff:f::1 65535 65535\r\n", None),
        (v2(0x21, 0x11, TCP4), "203.0.113.7"),
        (v2(0x21, 0x21, TCP6), "2001:db8::7"),
        # fields that other proxies read, such as a name asked for in TLS
        (v2(0x21, 0x11, TCP4 + b"\x02\x00\x03abc"), "203.0.113.7"),
        (v2(0x20, 0x00, b""), None),
        (v2(0x21, 0x31, bytes(216)), None),
    ],
)
@pytest.mark.parametrize("is_bytewise", [False, True])
async def test_proxy_header_is_read_to_last_byte(header: bytes, host: str | None, is_bytewise: bool) -> None:
    proxy, server = socket.socketpair()
    with proxy, server:
        server.setblocking(False)
        reading = asyncio.create_task(read_proxy_header(server))
        for i in range(0, len(header), 1 if is_bytewise else len(header)):
            proxy.sendall(header[i:] if not is_bytewise else header[i : i + 1])
            await asyncio.sleep(0)
        proxy.sendall(b"GET /")
        assert await asyncio.wait_for(reading, 60) == host
        assert server.recv(100) == b"GET /"


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PROXY TCP4 203.0.113.7\r\n",
        b"PROXY TCP4 nowhere 10.0.0.1 1 2\r\n",
        b"PROXY UDP4 203.0.113.7 10.0.0.1 1 2\r\n",
        b"PROXY " + b"x" * 200,
        v2(0x22, 0x11, TCP4),
        v2(0x21, 0x11, TCP4[:8]),
        v2(0x21, 0x11, bytes(5000)),
    ],
)
async def test_proxy_header_is_refused_when_malformed(header: bytes) -> None:
    proxy, server = socket.socketpair()
    with proxy, server:
        server.setblocking(False)
        proxy.sendall(header)
        with pytest.raises(ProxyHeaderInvalid):
            await asyncio.wait_for(read_proxy_header(server), 60)


async def test_truncated_proxy_header_is_refused() -> None:
    proxy, server = socket.socketpair()
    with server:
        server.setblocking(False)
        proxy.sendall(b"PROXY TCP4 203")
        proxy.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(read_proxy_header(server), 60)
