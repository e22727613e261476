"""Attacks of a client on a connection around its requests, with either of the two parsers: each has
an end, and none moves a request's bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from typing import Any
from urllib.parse import urlsplit

import attack
import pytest
from attack import KIB, MIB

from loraserve.api.http import connection
from loraserve.api.http.acceptor import _refusal
from loraserve.errors import Overloaded, RateLimited
from loraserve.limits import LIMITS, Limits

LIVE = attack.head("/livez", "GET")
TRAILER_NAMES = ("authorization", "x-tenant", "idempotency-key", "x-request-id", "cookie", "accept")


def chunked(body: bytes, trailers: bytes = b"", path: str = "/tokenize", **headers: str) -> bytes:
    head = attack.head(path, transfer_encoding="chunked", content_type="application/json", **headers)
    return head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


async def talk(url: str, *pieces: bytes, rest_s: float = 0.5, pause_s: float = 0.01) -> bytes:
    """Return what the server answers to `pieces`, up to when it falls silent or closes."""
    return (await attack.send(url, pieces, pause_s=pause_s, rest_s=rest_s)).answer


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "name", [name for name in attack.NAMES if name not in ("tiny-chunks", "pipelined", "unread-body")]
)
async def test_endless_input_is_refused_and_connection_closed(url: str, name: str) -> None:
    async with attack.watch(url) as seen:
        outcome = await attack.send(url, attack.endless(name), max_bytes=64 * MIB, max_s=10, rest_s=2)
    # What the kernel holds of both sides is sent before the sender can know.
    assert outcome.is_closed
    assert outcome.num_sent_bytes < 16 * MIB
    # A client that still sends may see the connection reset instead of the answer.
    # One without a key may be told that first.
    assert outcome.status in (None, 400, 401, 431) or name == "empty-lines-after"
    assert seen.longest_s < 1.0
    assert statuses(await talk(url, LIVE)) == [200]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"0\r\n" + b"a: b\r\n" * (LIMITS.max_headers + 1) + b"\r\n", "headers_too_large"),
        (b"0\r\na: " + b"y" * (LIMITS.max_trailer_bytes * 3), "headers_too_large"),
        (b"1;" + b"y" * (LIMITS.max_trailer_bytes * 3), "headers_too_large"),
        *[
            (b"0\r\n%b: x\r\n\r\n" % name, "invalid_value")
            for name in (b"Upgrade", b"Connection", b"Host", b"X-A: b\r\nConnection")
        ],
    ],
)
async def test_oversized_trailers_are_refused_with_error_message(url: str, acme: Any, sent: bytes, code: str) -> None:
    head = attack.head("/tokenize", transfer_encoding="chunked", authorization=f"Bearer {acme.key}")
    outcome = await attack.send(url, [head, sent], rest_s=3)
    assert outcome.is_closed
    _, _, body = outcome.answer.partition(b"\r\n\r\n")
    assert (outcome.status, json.loads(body)["error"]["code"]) == (431 if code == "headers_too_large" else 400, code)
    assert b"connection: close" in outcome.answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"no HTTP at all\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (LIMITS.max_headers + 1) + b"\r\n", 431),
    ],
)
async def test_refusal_by_connection_is_not_sniffed(url: str, sent: bytes, status: int) -> None:
    answer = await talk(url, sent)
    assert statuses(answer) == [status]
    assert answer.count(b"x-content-type-options: nosniff\r\n") == 1


@pytest.mark.parametrize("error", [RateLimited("Too many."), Overloaded("Full.")])
def test_refusal_at_acceptance_is_not_sniffed(error: RateLimited | Overloaded) -> None:
    head, _, rest = _refusal(error).partition(b"\r\n\r\n")
    assert rest == b""
    assert b"x-content-type-options: nosniff" in head.split(b"\r\n")
    assert b"content-length: 0" in head.split(b"\r\n")


@pytest.fixture
def seen_headers(services: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[bytes, bytes]]:
    """Every request's headers as the application has them once its answer begins."""
    from loraserve.api.http.guard import _Exchange

    seen: list[dict[bytes, bytes]] = []
    send = _Exchange.send

    async def recording(self: Any, message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(dict(self._scope["headers"]))
        await send(self, message)

    monkeypatch.setattr(_Exchange, "send", recording)
    return seen


@pytest.mark.parametrize("num_pieces", [1, 3, 1000])
async def test_trailer_becomes_header_of_no_request(
    url: str, acme: Any, seen_headers: list[dict[bytes, bytes]], num_pieces: int
) -> None:
    trailers = "".join(f"{name}: {acme.key}\r\n" for name in TRAILER_NAMES).encode()
    key = f"Bearer {acme.key}"
    data = chunked(b'{"prompt": "x"}', trailers, authorization=key) + chunked(b'{"prompt": "x"}') + LIVE
    step = max(1, len(data) // num_pieces)
    pieces = [data[i : i + step] for i in range(0, len(data), step)]
    assert statuses(await talk(url, *pieces, pause_s=0.001)) == [200, 401, 200]
    for headers in seen_headers:
        assert not headers.keys() & {name.encode() for name in TRAILER_NAMES[1:]}


async def test_key_in_trailer_does_not_authenticate(url: str, acme: Any) -> None:
    trailers = f"Authorization: Bearer {acme.key}\r\n".encode()
    assert statuses(await talk(url, chunked(b'{"prompt": "x"}', trailers))) == [401]
    assert statuses(await talk(url, chunked(b'{"prompt": "x"}', authorization=f"Bearer {acme.key}"))) == [200]


async def test_body_in_tiny_chunks_does_not_delay_clients(url: str, acme: Any) -> None:
    body = json.dumps({"prompt": "x" * 60_000}).encode()
    head = attack.head("/tokenize", transfer_encoding="chunked", authorization=f"Bearer {acme.key}", connection="close")
    data = head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with attack.watch(url) as seen:
        outcome = await attack.send(url, [data], rest_s=10)
    assert outcome.status == 200
    assert b'"count":60000' in outcome.answer
    assert seen.longest_s < 1.0


async def test_input_slow_to_parse_is_parsed_in_turns(url: str, acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TURN_S", -1.0)
    turns = 0
    pump = connection.BoundedProtocol._pump

    def counted(self: connection.BoundedProtocol) -> None:
        nonlocal turns
        turns += 1
        pump(self)

    monkeypatch.setattr(connection.BoundedProtocol, "_pump", counted)
    body = json.dumps({"prompt": "y" * 100_000}).encode()
    key = f"Bearer {acme.key}"
    data = attack.head("/tokenize", content_length=str(len(body)), content_type="application/json", authorization=key)
    answer = await talk(url, data + body + LIVE, rest_s=2)
    assert statuses(answer) == [200, 200]
    assert b'"count":100000' in answer
    assert turns > 10


async def test_requests_sent_ahead_wait_unparsed(url: str) -> None:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    flood = asyncio.create_task(attack.send(url, attack.endless("pipelined"), max_s=2, max_bytes=256 * MIB))
    async with attack.watch(url) as seen:
        most = 0
        while not flood.done():
            await asyncio.sleep(0.2)
            # answered ones may still lie about until they're collected; by type, since isinstance
            # asks every object for its __class__, and some of other libraries warn when they are
            # asked anything
            waiting = [
                each
                for each in gc.get_objects()
                if issubclass(type(each), RequestResponseCycle) and not each.response_complete
            ]
            most = max(most, len(waiting))
            del waiting
    outcome = await flood
    assert set(statuses(outcome.answer[: 64 * KIB].rpartition(b"HTTP/1.1 ")[0])) == {200}
    assert most < 1000
    assert seen.longest_s < 1.0


async def test_requests_sent_ahead_are_answered_in_order(url: str, acme: Any) -> None:
    asked = [attack.post("/tokenize", {"prompt": "z" * n}, authorization=f"Bearer {acme.key}") for n in range(1, 40)]
    answer = await talk(url, b"".join(asked), rest_s=2)
    assert [int(part.split(b",")[0]) for part in answer.split(b'"count":')[1:]] == list(range(1, 40))


async def test_unread_body_is_consumed_only_up_to_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = await attack.send(url, attack.endless("unread-body"), max_bytes=256 * MIB, max_s=20, rest_s=2)
    assert outcome.is_closed
    assert outcome.num_sent_bytes < 48 * MIB
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.3))
    head = attack.head("/livez", "GET", content_length="1000000")
    outcome = await attack.send(url, [head, *[b"x"] * 100], pause_s=0.05, rest_s=2)
    assert (outcome.status, outcome.is_closed) == (200, True)
    assert outcome.seconds < 3


@pytest.mark.parametrize("first", [b"", LIVE], ids=["the first", "a later"])
@pytest.mark.parametrize("drip", [b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"y" * 1000, b"\r\n" * 500])
async def test_dripping_head_is_closed(url: str, monkeypatch: pytest.MonkeyPatch, first: bytes, drip: bytes) -> None:
    monkeypatch.setattr(connection, "LIMITS", Limits(stalled_reader_s=0.3))
    pieces = [first] if first else []
    outcome = await attack.send(url, [*pieces, *attack.bytewise(drip)], pause_s=0.02, max_s=10)
    assert outcome.is_closed
    assert outcome.seconds < 5


async def test_upgrade_request_leaves_body_as_body(url: str, acme: Any) -> None:
    """A body read as the next request would be one that no proxy has seen."""
    smuggled = json.dumps({"prompt": "\r\n\r\n" + LIVE.decode()}).encode()
    wish = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "authorization": f"Bearer {acme.key}"}
    head = attack.head("/tokenize", content_length=str(len(smuggled)), content_type="application/json", **wish)
    for pieces in ([head + smuggled + LIVE], [head, smuggled, LIVE], [*attack.bytewise(head), smuggled, LIVE]):
        answer = await talk(url, *pieces, pause_s=0.002)
        assert statuses(answer) == [200, 200], answer
        assert b'"count"' in answer.partition(b"HTTP/1.1 200")[2]
    with_chunks = chunked(smuggled, **wish)
    assert statuses(await talk(url, with_chunks + LIVE)) == [200, 200]


@pytest.mark.parametrize(
    "sent",
    [
        attack.head("x:443", "CONNECT") + LIVE,
        attack.head("/livez", content_length="5", transfer_encoding="chunked") + b"0\r\n\r\n" + LIVE,
        attack.head("/livez", transfer_encoding="chunked") + b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + LIVE,
        attack.head("/livez", transfer_encoding="chunked") + b"0\r\nContent-Length: 60\r\n\r\n" + LIVE,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + LIVE,
        b"\x16\x03\x01\x02\x00" * 10,
    ],
    ids=["connect", "two lengths", "a trailer of framing", "a trailer of length", "http2", "tls"],
)
async def test_ambiguously_framed_request_ends_connection(url: str, sent: bytes) -> None:
    outcome = await attack.send(url, [sent], rest_s=3)
    assert outcome.is_closed
    # the route may have answered before the body's end came
    assert all(status in (400, 404, 405) for status in statuses(outcome.answer)[-1:])
    assert statuses(outcome.answer).count(200) == 0


async def test_client_expecting_100_continue_gets_response(url: str, acme: Any) -> None:
    body = b'{"prompt": "x"}'
    head = attack.head(
        "/tokenize", content_length=str(len(body)), expect="100-continue", authorization=f"Bearer {acme.key}"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(head)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 100")
    writer.write(body)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 200")
    writer.close()
    # and no other client: a trailer asks for nothing
    assert b" 100 " not in await talk(url, chunked(body, b"Expect: 100-continue\r\n"))


@pytest.mark.parametrize("path", ["/tokenize", "/nowhere"])
async def test_unrequested_body_is_not_awaited(url: str, path: str) -> None:
    """The client may go on with its next request, whose bytes aren't this one's body."""
    outcome = await attack.send(
        url, [attack.head(path, content_length="50", expect="100-continue"), LIVE], pause_s=0.2, rest_s=2
    )
    assert statuses(outcome.answer) in ([401], [404])
    assert b"connection: close" in outcome.answer.lower()
    assert outcome.is_closed


async def test_garbage_after_request_never_enters_answer(client: Any, url: str, acme: Any, engine: Any) -> None:
    engine.step_s, engine.script = 0.01, "word " * 40
    body = {"model": "sql", "prompt": "x", "stream": True, "max_tokens": 200}
    ask = attack.post("/v1/completions", body, authorization=f"Bearer {acme.key}")
    outcome = await attack.send(url, [ask, b"\x00rubbish\r\n\r\n"], pause_s=0.1, rest_s=5)
    stream, _, behind = outcome.answer.partition(b"0\r\n\r\n")
    assert statuses(stream) == [200]
    assert b"HTTP/1.1" not in stream[10:]
    assert statuses(behind) in ([], [400])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            while engine.live:
                await asyncio.sleep(0.01)
    assert not engine.live
