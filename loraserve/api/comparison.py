"""Answer several requests side by side in one stream, such as one prompt for several models.

A browser keeps six connections to a server, so that nine streams over it would wait for each other.
Each request goes to the application itself, with the caller's key: it is admitted, limited and
billed as if the client had sent it. All are in the engine at once, which computes them in one
batch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import Message, Scope

from loraserve.api import scopes
from loraserve.api.errors import problem
from loraserve.api.http.connection import CAN_SEND
from loraserve.api.http.sse import EventSource, EventStream, named_event
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_SET_HERE = ("stream", "stream_options")
_COPIED = frozenset({b"api-key", b"authorization", b"x-api-key", b"x-tenant"})
_SHARED = (scopes.GIVEN_CALLER, scopes.COLLECTED_USAGE, CAN_SEND)
_SHOWN = ("server-timing", "x-loraserve-adapter", "x-loraserve-ignored", "x-loraserve-cache")
_QUEUE_SIZE = 1
"""Events that wait for the connection: what is in it counts as delivered, and is billed."""
_DATA, _DONE = b"data: ", b"[DONE]"


class Comparison(Body):
    """Requests that are answered side by side."""

    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    requests: list[dict[str, Any]] = Field(min_length=1, max_length=LIMITS.max_compared_requests)
    """Bodies of requests to `endpoint`, without `stream` and `stream_options`."""


@router.post("/compare")
async def compare(request: Request, caller: Caller = Depends(scopes.require(scopes.INFERENCE))) -> Response:
    """Answer up to nine requests side by side in one stream, such as one prompt for nine models.

    The events of the stream name the request by its index: ``start`` has the status and headers of
    its answer, ``chunk`` a chunk as `endpoint` streams it, ``error`` an error in OpenAI's form, and
    ``done`` ends it. ``end`` follows the last. An error ends its own answer alone.
    """
    comparison = await read_body(request, Comparison)
    for index, body in enumerate(comparison.requests):
        for name in _SET_HERE:
            if name in body:
                param = f"requests.{index}.{name}"
                raise InvalidRequest(f"{param} is set by the comparison.", param=param, hint="Leave it out.")
    answers = [
        _ComparedAnswer(request, index, comparison.endpoint, body) for index, body in enumerate(comparison.requests)
    ]
    return EventStream(_Running(answers, request.state.request_id), {})


class _Running(EventSource):
    """Merged answers of one comparison, in the order in which their events come."""

    ending = named_event("end", {})

    def __init__(self, answers: list[_ComparedAnswer], request_id: str) -> None:
        self._request_id = request_id
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_SIZE)
        self._answers = answers
        self._tasks: list[asyncio.Task[None]] = []

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._tasks = [asyncio.create_task(answer.run(self._queue)) for answer in self._answers]
        num_open = len(self._tasks)
        while num_open:
            event = await self._queue.get()
            if event is None:
                num_open -= 1
            else:
                yield event

    def failure(self, error: LoraserveError) -> bytes:
        return named_event("error", {"error": problem(error, self._request_id)})

    async def close(self) -> None:
        for answer in self._answers:
            answer.leave()
        # What still waits for the reader isn't read any more: the answers end once they may
        # continue.
        while any(not task.done() for task in self._tasks):
            while not self._queue.empty():
                self._queue.get_nowait()
            await asyncio.wait(self._tasks, timeout=0.05)
        # an answer that broke off was reported by its end
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _ComparedAnswer:
    """Answer to a request to the application itself, of which it is client and connection."""

    def __init__(self, request: Request, index: int, endpoint: str, body: Mapping[str, Any]) -> None:
        self._app = request.app
        self._index = index
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._body: bytes | None = json.dumps(streamed, ensure_ascii=False).encode()
        self._scope = _scope_of(request, endpoint, len(self._body))
        self._left = asyncio.Event()
        self._status = 500
        self._is_stream = False
        self._received = bytearray()
        self._queue: asyncio.Queue[bytes | None] | None = None

    async def run(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Send the request, and put the answer's events into the queue, then None."""
        self._queue = queue
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            for event in (self._event("done"), None):
                await queue.put(event)

    def leave(self) -> None:
        """End the answer, as a client that disconnects."""
        self._left.set()

    async def _receive(self) -> Message:
        if self._body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._status = message["status"]
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            shown = {name: headers[name] for name in _SHOWN if name in headers}
            await self._put(self._event("start", status=self._status, headers=shown))
            return
        self._received += message.get("body", b"")
        if not self._is_stream:
            if not message.get("more_body", False):
                await self._put(self._event("error", status=self._status, error=_error_in(bytes(self._received))))
            return
        while (end := self._received.find(b"\n\n")) >= 0:
            frame = bytes(self._received[:end])
            del self._received[: end + 2]
            if frame.startswith(_DATA) and frame[len(_DATA) :] != _DONE:
                await self._put(self._frame(frame[len(_DATA) :]))

    def _frame(self, data: bytes) -> bytes:
        if data.startswith(b'{"error"'):
            return self._event("error", status=self._status, error=_error_in(data))
        # as it came: no token is parsed and written again
        return b'event: chunk\ndata: {"type":"chunk","index":%d,"chunk":%s}\n\n' % (self._index, data)

    async def _put(self, event: bytes) -> None:
        if self._queue is not None:
            await self._queue.put(event)

    def _event(self, name: str, **payload: Any) -> bytes:
        return named_event(name, {"index": self._index, **payload})


def _scope_of(request: Request, path: str, num_bytes: int) -> Scope:
    """Build the scope of a request on the same connection, with the same key."""
    outer: Mapping[str, Any] = request.scope
    headers = [(name, value) for name, value in outer["headers"] if name in _COPIED]
    given = {name: outer[name] for name in _SHARED if name in outer}
    return {
        **given,
        "type": "http",
        "asgi": outer["asgi"],
        "http_version": outer["http_version"],
        "method": "POST",
        "scheme": outer.get("scheme", "http"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            *headers,
            (b"x-request-id", request.state.request_id.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
        ],
        "client": outer.get("client"),
        "server": outer.get("server"),
    }


def _error_in(body: bytes) -> Any:
    try:
        return orjson.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return None
