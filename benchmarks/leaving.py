"""Clients that leave: each knows, to the token, what it was given before it did."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

RECEIVE_BYTES = 1 << 16


class Way(StrEnum):
    """How a request ends."""

    STAYS = "stays"
    CLOSES_ITS_HALF = "closes its half"
    """The client says that it's done and reads what is on its way: it knows what it was given."""
    BREAKS_OFF = "breaks off"
    """Reset the connection; what was on its way is lost, and its size is unknown."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a tenant."""

    tenant: int
    model: str
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    is_stream: bool
    way: Way
    leave_after: float
    """As a part of the answer's tokens, for streams; otherwise seconds."""

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(self.prompt),
            "n": self.n,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.is_stream,
        }
        return body | ({"stream_options": {"include_usage": True}} if self.is_stream else {})


@dataclass(frozen=True, slots=True)
class Given:
    """Answer as a client got it."""

    request: Request
    num_tokens: int
    has_something: bool
    """Anything of an answer: its prompt is billed then."""
    usage: dict[str, Any] | None
    """Usage that the answer stated at its end."""
    error: str | None


def draw(count: int, num_tenants: int, models: Sequence[str], vocab: int, seed: int, *, breaking: int) -> list[Request]:
    """Requests of all kinds.

    Args:
        breaking: the number of the tenant whose clients break off; the others' close their half.
    """
    rng = random.Random(seed)
    # prompts that begin alike are found in the prefix cache
    heads = [tuple(rng.randrange(10, vocab) for _ in range(32)) for _ in range(8)]
    requests = []
    for _ in range(count):
        tenant = rng.randrange(num_tenants)
        leaves = Way.BREAKS_OFF if tenant == breaking else Way.CLOSES_ITS_HALF
        is_stream = rng.random() < 0.75
        tail = tuple(rng.randrange(10, vocab) for _ in range(rng.randint(1, 16)))
        requests.append(
            Request(
                tenant=tenant,
                model=rng.choice(models),
                prompt=(rng.choice(heads) if rng.random() < 0.5 else ()) + tail,
                n=rng.choice((1, 1, 1, 2)),
                max_tokens=rng.randint(1, 24),
                is_stream=is_stream,
                way=leaves if rng.random() < 0.5 else Way.STAYS,
                leave_after=rng.random() if is_stream else rng.uniform(0.0, 0.4),
            )
        )
    return requests


async def send(url: str, key: str, request: Request) -> Given:
    """Send it, and leave as it says."""
    data = json.dumps(request.body()).encode()
    host = urlsplit(url).netloc
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    received = bytearray()
    try:
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        if request.way is not Way.STAYS:
            await _read_a_part(reader, request, received)
            if request.way is Way.BREAKS_OFF:
                writer.transport.abort()
                return _parse(request, bytes(received))
            writer.write_eof()
        while more := await reader.read(RECEIVE_BYTES):
            received += more
    except ConnectionError as error:
        return Given(request, 0, False, None, str(error))
    finally:
        writer.close()
    return _parse(request, bytes(received))


async def _read_a_part(reader: asyncio.StreamReader, request: Request, received: bytearray) -> None:
    if not request.is_stream:
        try:
            async with asyncio.timeout(request.leave_after):
                while more := await reader.read(RECEIVE_BYTES):
                    received += more
        except TimeoutError:
            pass
        return
    wanted = int(request.leave_after * request.n * request.max_tokens)
    while received.count(b"\ndata: {") < wanted:
        more = await reader.read(RECEIVE_BYTES)
        if not more:
            return
        received += more


def _parse(request: Request, received: bytes) -> Given:
    head, _, rest = received.partition(b"\r\n\r\n")
    if not received:
        return Given(request, 0, False, None, None)
    if not head.startswith(b"HTTP/1.1 200"):
        return Given(request, 0, False, None, rest.decode(errors="replace")[:200])
    if not request.is_stream:
        try:
            whole = json.loads(rest)
        except ValueError:
            return Given(request, 0, False, None, None)
        return Given(request, sum(len(one["token_ids"]) for one in whole["choices"]), True, whole["usage"], None)
    num_tokens, usage, error = 0, None, None
    has_something = False
    # a broken-off stream may end within a line
    for line in rest.split(b"\n")[:-1]:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            error = event["error"]["message"]
            continue
        has_something = True
        num_tokens += sum(len(one["token_ids"]) for one in event["choices"])
        usage = event.get("usage") or usage
    return Given(request, num_tokens, has_something, usage, error)
