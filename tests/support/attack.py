"""Attacks on a server's connections, each with an end: so many bytes and so many seconds at most.

Tests use the functions; a campaign by hand uses the command line, beside a watch over /livez::

    python tests/support/attack.py http://127.0.0.1:8000 trailers --mib 64
    python tests/support/attack.py http://127.0.0.1:8000 prompts --count 8 \\
        --key $KEY --model demo --pid $SERVER
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from core_clock import scheduled_s

KIB, MIB = 1 << 10, 1 << 20
PIECE_BYTES = 64 * KIB


@dataclass(slots=True)
class Outcome:
    """Outcome of one connection."""

    num_sent_bytes: int = 0
    answer: bytes = b""
    is_closed: bool = False
    """Whether the server ended it before the attack was over."""
    seconds: float = 0.0

    @property
    def status(self) -> int | None:
        """Status of the first answer; None: there was none."""
        words = self.answer.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None


async def send(
    url: str,
    pieces: Iterable[bytes],
    *,
    max_bytes: int = 64 * MIB,
    max_s: float = 30.0,
    pause_s: float = 0.0,
    rest_s: float = 0.0,
    recv_buffer_bytes: int | None = None,
) -> Outcome:
    """Send `pieces` until they end, the server closes the connection, or a bound is met; what it
    answered is read all the while.

    Args:
        pause_s: between two pieces.
        rest_s: how long the connection then stays open for the server to answer or close it.
        recv_buffer_bytes: for a reader that takes little.
    """
    sock = socket.socket()
    if recv_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, recv_buffer_bytes)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", urlsplit(url).port))
    reader, writer = await asyncio.open_connection(sock=sock)
    outcome, began = Outcome(), time.monotonic()
    reading = asyncio.create_task(_read(reader, outcome))
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(max_s):
            for piece in pieces:
                if outcome.is_closed or outcome.num_sent_bytes + len(piece) > max_bytes:
                    break
                writer.write(piece)
                await writer.drain()
                outcome.num_sent_bytes += len(piece)
                await asyncio.sleep(pause_s)
    if not outcome.is_closed and rest_s:
        await asyncio.wait({reading}, timeout=rest_s)
    outcome.seconds = time.monotonic() - began
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    writer.transport.abort()
    return outcome


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            outcome.answer = (outcome.answer + piece)[: 1 * MIB]
    outcome.is_closed = True


def head(path: str = "/v1/completions", method: str = "POST", **headers: str) -> bytes:
    """Return a request's head; in the headers' names ``_`` stands for ``-``."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, body: object, **headers: str) -> bytes:
    """Return a whole request with a JSON body."""
    data = json.dumps(body).encode()
    return head(path, content_type="application/json", content_length=str(len(data)), **headers) + data


def _repeated(line: bytes) -> Iterator[bytes]:
    return itertools.repeat(line * max(1, PIECE_BYTES // len(line)))


def _chunked(path: str) -> bytes:
    return head(path, transfer_encoding="chunked")


def endless(name: str, path: str = "/v1/completions") -> Iterator[bytes]:
    """Return the pieces of an attack that never ends by itself, by its name (`NAMES`)."""
    begin = _chunked(path)
    streams: dict[str, tuple[bytes, bytes]] = {
        "trailers": (begin + b"0\r\n", b"a: b\r\n"),
        "trailer-value": (begin + b"0\r\nx: ", b"y" * KIB),
        "trailer-name": (begin + b"0\r\n", b"y" * KIB),
        "trailer-folds": (begin + b"0\r\na: b\r\n", b" c\r\n"),
        "chunk-extension": (begin + b"1;x=", b"y" * KIB),
        "chunk-extensions": (begin, b"1;x=" + b"y" * 200 + b"\r\nz\r\n"),
        "chunk-size": (begin, b"0" * KIB),
        "tiny-chunks": (begin, b"1\r\nz\r\n"),
        "headers": (b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
        "header-value": (b"POST / HTTP/1.1\r\nx: ", b"y" * KIB),
        "header-folds": (b"POST / HTTP/1.1\r\na: b\r\n", b" c\r\n"),
        "target": (b"GET /", b"y" * KIB),
        "empty-lines": (b"", b"\r\n"),
        "empty-lines-after": (head("/livez", "GET"), b"\r\n"),
        "pipelined": (b"", head("/livez", "GET")),
        "unread-body": (head("/livez", "GET", transfer_encoding="chunked"), b"400\r\n" + b"y" * KIB + b"\r\n"),
    }
    first, then = streams[name]
    return itertools.chain([first] if first else [], _repeated(then))


NAMES = (
    "trailers",
    "trailer-value",
    "trailer-name",
    "trailer-folds",
    "chunk-extension",
    "chunk-extensions",
    "chunk-size",
    "tiny-chunks",
    "headers",
    "header-value",
    "header-folds",
    "target",
    "empty-lines",
    "empty-lines-after",
    "pipelined",
    "unread-body",
)


def bytewise(data: bytes) -> Iterator[bytes]:
    """Return the data one byte at a time."""
    return (data[i : i + 1] for i in range(len(data)))


@dataclass(slots=True)
class Watch:
    """Latencies of /livez, probe by probe."""

    latencies_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    @property
    def longest_s(self) -> float:
        return max(self.latencies_s, default=float("inf"))

    def at(self, part: float) -> float:
        """Return the latency that this part of the probes kept to."""
        return sorted(self.latencies_s)[min(len(self.latencies_s) - 1, int(part * len(self.latencies_s)))]

    def __str__(self) -> str:
        if not self.latencies_s:
            return "/livez: no answer"
        kept = ", ".join(f"{name} {self.at(part) * 1000:.0f}" for name, part in (("p50", 0.5), ("p99", 0.99)))
        longest = f"longest {self.longest_s * 1000:.0f} ms"
        return f"/livez ({len(self.latencies_s)} probes): {kept}, {longest}; {self.num_failed} failed"


@contextlib.asynccontextmanager
async def watch(
    url: str, every_s: float = 0.02, timeout_s: float = 30.0, pid: int | None = None
) -> AsyncIterator[Watch]:
    """Ask /livez again and again, over one connection, until the block ends.

    Args:
        pid: the server's process, whose waits for a core don't count; None: this one.
    """
    seen = Watch()
    task = asyncio.create_task(_watch(url, seen, every_s, timeout_s, pid))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(url: str, seen: Watch, every_s: float, timeout_s: float, pid: int | None) -> None:
    probe = head("/livez", "GET")
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            try:
                while True:
                    began = scheduled_s(*(() if pid is None else (pid,)))
                    writer.write(probe)
                    async with asyncio.timeout(timeout_s):
                        answer = await reader.readuntil(b"\r\n\r\n")
                        await reader.readexactly(_length(answer))
                    seen.latencies_s.append(scheduled_s(*(() if pid is None else (pid,))) - began)
                    await asyncio.sleep(every_s)
            finally:
                writer.transport.abort()
        seen.num_failed += 1
        await asyncio.sleep(every_s)


def _length(answer: bytes) -> int:
    for line in answer.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def resident_bytes(pid: int) -> int:
    """Return how many bytes a process holds in memory (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    raise AssertionError(f"process {pid} has no VmRSS")


async def _campaign(arguments: argparse.Namespace) -> None:
    say = sys.stdout.write
    key = {"authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    before = resident_bytes(arguments.pid) if arguments.pid else 0
    async with watch(arguments.url) as seen:
        await asyncio.sleep(0.3)
        runs: Sequence[Iterable[bytes]]
        if arguments.attack in NAMES:
            runs = [endless(arguments.attack) for _ in range(arguments.count)]
        else:
            text = (arguments.text * (arguments.prompt_kib * KIB // len(arguments.text) + 1))[
                : arguments.prompt_kib * KIB
            ]
            bodies = {
                "prompts": ("/v1/completions", {"model": arguments.model, "prompt": text}),
                "tokenize": ("/tokenize", {"prompt": text}),
                "token-strs": ("/tokenize", {"prompt": text, "return_token_strs": True}),
                "chats": (
                    "/v1/chat/completions",
                    {"model": arguments.model, "messages": [{"role": "user", "content": text}]},
                ),
                "detokenize": ("/detokenize", {"tokens": [5] * (arguments.prompt_kib * KIB // 3)}),
            }
            runs = [[post(*bodies[arguments.attack], **key, connection="close")] for _ in range(arguments.count)]
        began = time.monotonic()
        outcomes = await asyncio.gather(
            *(
                send(
                    arguments.url, run, max_bytes=arguments.mib * MIB, max_s=arguments.seconds, rest_s=arguments.seconds
                )
                for run in runs
            )
        )
        seconds = time.monotonic() - began
        peak = resident_bytes(arguments.pid) if arguments.pid else 0
        await asyncio.sleep(0.3)
    for outcome in outcomes[:8]:
        say(
            f"{outcome.num_sent_bytes / MIB:.2f} MiB in {outcome.seconds:.2f} s, status {outcome.status}, "
            f"closed {outcome.is_closed}\n"
        )
    say(f"{len(outcomes)} × {arguments.attack} in {seconds:.2f} s\n{seen}\n")
    if arguments.pid:
        await asyncio.sleep(arguments.settle)
        after = resident_bytes(arguments.pid)
        say(
            f"memory: {before / MIB:.0f} MiB before, {peak / MIB:.0f} at the end, "
            f"{after / MIB:.0f} {arguments.settle:g} s later\n"
        )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("attack", choices=[*NAMES, "prompts", "tokenize", "token-strs", "chats", "detokenize"])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--mib", type=int, default=64, help="bytes that each connection sends at most")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt-kib", type=int, default=1023)
    parser.add_argument("--text", default="The quick brown fox jumps over the lazy dog. ")
    parser.add_argument("--key")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pid", type=int, help="the server's, for its memory")
    parser.add_argument("--settle", type=float, default=5.0)
    asyncio.run(_campaign(parser.parse_args()))


if __name__ == "__main__":
    _main()
