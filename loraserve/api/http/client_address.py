"""Address of a client behind proxies: what trusted ones report of it, in headers or before them."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

Source = Literal["x-forwarded-for", "forwarded", "proxy-protocol"]
"""Sources of a client's address that trusted proxies write."""

_V2_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_MAX_V1_BYTES = 107
_MAX_V2_BYTES = 4096
"""Maximum of a header's addresses and fields. Those of cloud balancers have some hundred bytes."""
_V2_LOCAL, _V2_PROXY = 0x20, 0x21
_V2_TCP4, _V2_TCP6 = 0x11, 0x21

_FORWARDED_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^;\s]+))\s*(?=;|$)', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[([0-9A-Fa-f:.%\w]+)\](?::\d+)?|(\d+\.\d+\.\d+\.\d+):\d+")


class ProxyHeaderInvalid(Exception):
    """Report that a trusted proxy's first bytes are no header of the PROXY protocol."""


class TrustedProxies:
    """Proxies whose word on their clients' addresses is taken.

    Args:
        networks: addresses of the proxies, each an address or a CIDR.
        source: the one place where they all write it. Only one is read: proxies hand on what their
            clients send in the other.
    """

    def __init__(self, networks: Iterable[str] = (), source: Source = "x-forwarded-for") -> None:
        self._networks = tuple(ip_network(network) for network in networks)
        self._source = source

    def sends_proxy_header(self, host: str) -> bool:
        """Check whether a connection from this address begins with the PROXY protocol."""
        return self._source == "proxy-protocol" and self._is_trusted(host)

    def client_host(self, host: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Find the address of a request's client, for which `host` passes it on.

        It is the last one that no trusted proxy has: those before it are the client's own word.
        """
        if self._source == "proxy-protocol" or not self._networks or not self._is_trusted(host):
            return host
        name = self._source.encode()
        text = ",".join(value.decode("latin-1") for key, value in headers if key == name)
        hosts = _forwarded_hosts(text) if self._source == "forwarded" else _listed_hosts(text)
        for found in hosts:
            if found is None:
                return host
            host = found
            if not self._is_trusted(host):
                break
        return host

    def _is_trusted(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _listed_hosts(text: str) -> Iterator[str | None]:
    """Yield the addresses of X-Forwarded-For, the last one first; None for what isn't one."""
    for entry in reversed(text.split(",") if text else ()):
        yield _host(entry.strip())


def _forwarded_hosts(text: str) -> Iterator[str | None]:
    """Yield the addresses of RFC 7239's Forwarded, the last one first; None for what isn't one."""
    for element in reversed(text.split(",") if text else ()):
        match = _FORWARDED_FOR.search(element)
        yield None if match is None else _host((match[1] or match[2] or "").strip())


def _host(entry: str) -> str | None:
    match = _WITH_PORT.fullmatch(entry)
    if match is not None:
        entry = match[1] or match[2]
    address = _address(entry)
    return None if address is None else str(address)


async def read_proxy_header(sock: socket.socket) -> str | None:
    """Read the PROXY protocol's header (version 1 or 2), and not a byte more.

    Return the client's address; None: the proxy speaks for itself, or hands on no TCP.

    Raises:
        ProxyHeaderInvalid: it isn't one.
        ConnectionError: the connection ended before it did.
    """
    begin = await _read(sock, len(_V2_SIGNATURE))
    if begin == _V2_SIGNATURE:
        return await _read_v2(sock)
    if not begin.startswith(b"PROXY "):
        raise ProxyHeaderInvalid("neither version 1 nor 2 of the PROXY protocol")
    line = bytearray(begin)
    while not line.endswith(b"\r\n"):
        if len(line) >= _MAX_V1_BYTES:
            raise ProxyHeaderInvalid(f"no end of the line within {_MAX_V1_BYTES} bytes")
        line += await _read(sock, 1)
    return _parse_v1(bytes(line))


def _parse_v1(line: bytes) -> str | None:
    words = line[:-2].split(b" ")
    if words[1] == b"UNKNOWN":
        return None
    if len(words) != 6 or words[1] not in (b"TCP4", b"TCP6"):
        raise ProxyHeaderInvalid("a line of version 1 that isn't PROXY TCP4|TCP6 and two addresses and ports")
    address = _address(words[2].decode("latin-1"))
    if address is None:
        raise ProxyHeaderInvalid("a line of version 1 without the client's address")
    return str(address)


async def _read_v2(sock: socket.socket) -> str | None:
    command, family, num_bytes = struct.unpack("!BBH", await _read(sock, 4))
    if command not in (_V2_LOCAL, _V2_PROXY) or num_bytes > _MAX_V2_BYTES:
        raise ProxyHeaderInvalid(f"a header of version 2 with command {command:#x} and {num_bytes} bytes")
    data = await _read(sock, num_bytes)
    if command == _V2_LOCAL or family not in (_V2_TCP4, _V2_TCP6):
        return None
    num_address_bytes = 4 if family == _V2_TCP4 else 16
    if num_bytes < 2 * num_address_bytes + 4:
        raise ProxyHeaderInvalid(f"a header of version 2 whose addresses have only {num_bytes} bytes")
    return str(_address(str(ip_address(data[:num_address_bytes]))))


async def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    loop = asyncio.get_running_loop()
    while len(data) < count:
        try:
            piece = sock.recv(count - len(data))
        except (BlockingIOError, InterruptedError):
            piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the connection ended in the PROXY protocol's header")
        data += piece
    return bytes(data)
