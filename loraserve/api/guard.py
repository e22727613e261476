"""The outermost middleware: bounds on headers and bodies, the request's id, the access log, and the last word on errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from loraserve.api.counters import Metrics
from loraserve.api.errors import MANAGEMENT_PREFIX, error_response, unforeseen
from loraserve.errors import HeadersTooLarge, LoraserveError, Overloaded, PayloadTooLarge, RequestTimeout
from loraserve.limits import LIMITS, MIB, Limits

access_log = structlog.stdlib.get_logger("loraserve.access")
logger = logging.getLogger(__name__)

_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health"})
_LINGER_S = 1.0
_LINGER_BYTES = 16 * MIB
_UPLOAD_PATH = re.compile(rf"{MANAGEMENT_PREFIX}/(adapters/[^/]+/versions|uploads/[^/]+)")
"""The routes whose body is streamed to disk, and so may be large."""


class _Refused(Exception):
    """Thrown into the application in place of the rest of a body that was refused."""


class Guard:
    """Pure ASGI, so that a stream is never buffered and a disconnect is seen by the route itself.

    Sets ``state["request_id"]``, answers every request with ``x-request-id``, and never lets an exception pass.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, route_names: Mapping[Any, str], limits: Limits = LIMITS) -> None:
        self._app = app
        self._route_names = route_names
        self._metrics = metrics
        self._limits = limits
        self._num_live = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        started = time.monotonic()
        self._num_live += 1
        self._metrics.live_requests.inc()
        try:
            try:
                exchange.check_headers()
                self._check_room(scope)
                await self._app(scope, exchange.receive, exchange.send)
                await exchange.finish()
            except asyncio.CancelledError:
                # The server was told to stop now; an open stream is cut without a word otherwise.
                raise
            except ClientDisconnect:
                pass  # nobody is there to be answered
            except Exception as error:
                await exchange.fail(error)
        finally:
            self._num_live -= 1
            self._metrics.live_requests.dec()
            admitted = scope.get("state", {}).get("admitted")
            if admitted is not None:
                admitted.release()
            self._record(scope, exchange, time.monotonic() - started)

    def _check_room(self, scope: Scope) -> None:
        """Raises:
        Overloaded: more requests are being answered than the server has memory for; probes always get through.
        """
        if self._num_live > self._limits.max_live_requests and scope["path"] not in _PROBES:
            raise Overloaded(f"{self._limits.max_live_requests} requests are being answered; no more are taken.")

    def _record(self, scope: Scope, exchange: _Exchange, duration_s: float) -> None:
        # 499: the client left before the answer began
        status = exchange.status or 499
        route = self._route_names.get(scope.get("endpoint"), "unmatched")
        self._metrics.requests.labels(route, scope["method"] if route != "unmatched" else "-", status).inc()
        self._metrics.request_s.labels(route).observe(duration_s)
        caller = scope.get("state", {}).get("caller")
        # Probes ask every second or so.
        log = access_log.debug if scope["path"] in _PROBES else access_log.info
        log(
            "request",
            method=scope["method"],
            path=quote(scope["path"][:200], safe="/:@"),
            status=status,
            duration_ms=round(duration_s * 1000, 1),
            request_id=exchange.request_id,
            key_id=getattr(caller, "key_id", None),
            tenant=getattr(caller, "tenant_name", None),
        )


class _Exchange:
    """One request and its answer, with the bounds around both."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.status: int | None = None
        self.request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._max_body_bytes = _max_body_bytes(scope["path"], limits)
        self._num_body_bytes = 0
        self._body_wait_s = 0.0
        self._has_whole_body = False
        self._refusal: LoraserveError | None = None
        self._is_refused = False

    def check_headers(self) -> None:
        """Raises:
        HeadersTooLarge, PayloadTooLarge: before a byte of the body is read.
        """
        headers = self._scope["headers"]
        num_bytes = sum(len(name) + len(value) + 4 for name, value in headers) + len(self._scope.get("raw_path") or b"")
        num_bytes += len(self._scope.get("query_string") or b"")
        if len(headers) > self._limits.max_headers or num_bytes > self._limits.max_header_bytes:
            raise HeadersTooLarge(
                f"The request's headers are over their bound of {self._limits.max_headers} headers and {self._limits.max_header_bytes} bytes."
            )
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request's body is over the bound of {self._max_body_bytes} bytes for this route.")

    async def receive(self) -> Message:
        if self._has_whole_body:
            return await self._receive()
        limits = self._limits
        patience_s = limits.stalled_reader_s + self._num_body_bytes / limits.min_body_bytes_per_s - self._body_wait_s
        started = time.monotonic()
        try:
            async with asyncio.timeout(min(limits.stalled_reader_s, patience_s)):
                message = await self._receive()
        except TimeoutError:
            self._refusal = RequestTimeout(
                f"The request's body stopped coming: nothing for {limits.stalled_reader_s:g} s, or too little in all."
            )
            raise _Refused from None
        # only what the client takes: our own writing of an upload isn't its fault
        self._body_wait_s += time.monotonic() - started
        if message["type"] == "http.request":
            self._num_body_bytes += len(message.get("body", b""))
            self._has_whole_body = not message.get("more_body", False)
            if self._num_body_bytes > self._max_body_bytes:
                self._refusal = self._too_large()
                raise _Refused
        else:
            self._has_whole_body = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._refusal is not None and not self._is_refused:
                # The application saw the refusal as some error of its own; ours names the reason.
                return
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            rate_headers = self._scope.get("state", {}).get("rate_headers")
            if rate_headers is not None:
                headers.update(rate_headers())
        elif self.status is None:
            return
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with the error, if nothing was answered yet; with an answer under way there is only the connection to close."""
        if self._refusal is not None:
            error = self._refusal
        if self.status is not None:
            if not isinstance(error, _Refused | LoraserveError):
                logger.error("request %s failed while it was answered", self.request_id, exc_info=error)
            raise _AnswerBroken from error
        await self._answer(error if isinstance(error, LoraserveError) else unforeseen(error))

    async def finish(self) -> None:
        """Send the refusal that the application swallowed."""
        if self._refusal is not None and self.status is None:
            await self._answer(self._refusal)

    async def _answer(self, error: LoraserveError) -> None:
        self._is_refused = True
        headers = {}
        if not self._has_whole_body and not await self._discard_body():
            # the rest would be taken for the next request
            headers["connection"] = "close"
        response = error_response(error, path=self._scope["path"], request_id=self.request_id, headers=headers)
        await response(self._scope, self._receive, self.send)

    async def _discard_body(self) -> bool:
        """Read on for a moment, keeping nothing: a client that still sends when the connection closes never sees the answer.

        Returns:
            Whether the body came to its end.
        """
        if any(name == b"expect" for name, _ in self._scope["headers"]):
            return False  # reading would ask for the body
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while num_bytes < _LINGER_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return bool(message["type"] == "http.request")
        return False


class _AnswerBroken(Exception):
    """An answer can't be completed; the server closes the connection."""


def _request_id(scope: Scope) -> str:
    """The client's own ``x-request-id`` when it is a plain word, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_REQUEST_ID.fullmatch(value):
            client_id: str = value.decode("ascii")
            return client_id
    return f"req_{ULID()}"


def _max_body_bytes(path: str, limits: Limits) -> int:
    if _UPLOAD_PATH.fullmatch(path):
        # the multipart's own framing, and the config beside the weights
        return limits.max_upload_bytes + limits.max_body_bytes
    return limits.max_body_bytes
