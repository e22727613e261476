"""Many connections at once, each with a request that begins and doesn't go on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

FILES_BESIDE = 256


@dataclass(slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter | None
    status: int | None = None
    """Status of the server's answer; None: it waits."""
    is_closed: bool = False
    """Whether the server ended it."""


def head(method: str, path: str, headers: Mapping[str, str], *, length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    return ("\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]) + "\r\n\r\n").encode()


def raise_file_limit(num_connections: int) -> None:
    """Let this process have so many connections, which is more than most shells allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted, hard)
        )


@contextlib.asynccontextmanager
async def stalled(
    url: str,
    data: bytes,
    count: int,
    *,
    source: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    every_s: float = 0.0,
) -> AsyncIterator[list[Connection]]:
    """`count` connections that have sent `data` and stay open, for the length of the block;
    answers are noted as they come.

    Args:
        source: the address that they come from: any of 127.0.0.0/8.
        tls: what they shake hands with; None: they don't.
        every_s: between two of them.
    """
    raise_file_limit(2 * count)
    connections: list[Connection] = []
    watchers: list[asyncio.Task[None]] = []
    try:
        for _ in range(count):
            try:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", urlsplit(url).port, local_addr=(source, 0), limit=1 << 16, ssl=tls
                )
            except ConnectionResetError:
                if tls is None:
                    raise
                # refused before the handshake
                connections.append(Connection(asyncio.StreamReader(), None, is_closed=True))
                continue
            connection = Connection(reader, writer)
            connections.append(connection)
            watchers.append(asyncio.create_task(_watch(connection)))
            writer.write(data)
            await asyncio.sleep(every_s)
        yield connections
    finally:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for connection in connections:
            if connection.writer is not None:
                connection.writer.transport.abort()
        # the transports close in the loop's next turn
        await asyncio.sleep(0)


async def _watch(connection: Connection) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        line = await connection.reader.readline()
        connection.status = int(line.split()[1]) if line else None
        while await connection.reader.read(1 << 16):
            pass
    connection.is_closed = True


def statuses(connections: list[Connection]) -> Counter[int | None]:
    return Counter(connection.status for connection in connections)
