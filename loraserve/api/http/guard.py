"""Outermost middleware, but for the one that lets web pages in.

It bounds headers and bodies, gives request ids, writes the access log, hands requests to the tracer
and is the last resort for errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from loraserve.api.errors import MANAGEMENT_PREFIX, error_response, is_messages_path, unforeseen
from loraserve.api.http.client_address import TrustedProxies
from loraserve.api.http.connection import MAX_PIECE_BYTES, connection_slot, note_refusal
from loraserve.api.http.request_path import keep_encoded_slashes, respell_path
from loraserve.api.http.request_record import RequestRecord
from loraserve.api.metrics.counters import ServerMetrics
from loraserve.errors import (
    ContentEncodingUnsupported,
    HeadersTooLarge,
    InvalidRequest,
    LoraserveError,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RequestTimeout,
)
from loraserve.limits import LIMITS, MIB, Limits
from loraserve.tenancy.limits.shares import Claim, Rooms, address_holder

access_log = structlog.stdlib.get_logger("loraserve.access")
logger = logging.getLogger(__name__)

_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health", "/ping"})
_UNTRACED = _PROBES | {"/metrics"}
_LINGER_S = 1.0
_LINGER_BYTES = 16 * MIB
_UPLOAD_PATH = re.compile(
    rf"{MANAGEMENT_PREFIX}/(adapters/[^/]+/versions|uploads/[^/]+)"
    r"|(/t/[^/]+)?(/load_lora_adapter_from_tensors|/v1/files)"
)
"""Routes that stream their body to where it belongs, so that it may be large."""
_SINGLETONS = frozenset(
    {
        b"api-key",
        b"authorization",
        b"content-length",
        b"content-range",
        b"content-type",
        b"expect",
        b"host",
        b"idempotency-key",
        b"transfer-encoding",
        b"x-api-key",
        b"x-tenant",
    }
)
"""Headers that a request must not repeat: a proxy before this server may read the other one."""


class _Refused(Exception):
    """Thrown into the application in place of the rest of a body that was refused."""


class RequestTracer(Protocol):
    """Makes spans of requests that have ended."""

    def trace(self, record: RequestRecord, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Make the request's spans, without waiting for anything.

        Args:
            headers: of the request, which may name a trace that it is part of.

        Returns:
            The id of its trace; empty if it isn't sampled.
        """

    async def close(self) -> None:
        """Send what isn't sent yet, within a bound."""


class Guard:
    """Pure ASGI, so that a stream is never buffered and a disconnect is seen by the route itself.

    Sets ``state["request_id"]`` and ``state["record"]``, answers every request with
    ``x-request-id``, and never lets an exception pass.

    Args:
        has_access_log: returns whether each request is a line in the log now.
        tracer: returns what gets each request but probes and scrapes, once it has ended; None:
            nothing does.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        route_names: Mapping[Any, str],
        limits: Limits = LIMITS,
        rooms: Rooms | None = None,
        *,
        proxies: TrustedProxies | None = None,
        has_access_log: Callable[[], bool] = lambda: True,
        tracer: Callable[[], RequestTracer | None] = lambda: None,
    ) -> None:
        self._app = app
        self._route_names = route_names
        self._metrics = metrics
        self._limits = limits
        self._rooms = rooms or Rooms(limits)
        self._proxies = proxies or TrustedProxies()
        self._has_access_log = has_access_log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        keep_encoded_slashes(scope)
        respell_path(scope)
        exchange = _Exchange(scope, receive, send, self._limits, self._rooms, self._proxies)
        self._metrics.live_requests.inc()
        try:
            try:
                # Probes get through when nothing else does.
                if scope["path"] not in _PROBES:
                    exchange.claim.begin()
                exchange.check_headers()
                await self._app(scope, exchange.receive, exchange.send)
                await exchange.finish()
            except asyncio.CancelledError:
                # The server has to stop now; an open stream is cut without a word otherwise.
                raise
            except ClientDisconnect:
                pass  # there is no client to answer
            except Exception as error:
                await exchange.fail(error)
        finally:
            exchange.claim.release()
            self._metrics.live_requests.dec()
            admitted = scope.get("state", {}).get("admitted")
            if admitted is not None:
                admitted.release()
            self._record(scope, exchange.record)

    def _record(self, scope: Scope, record: RequestRecord) -> None:
        record.ended_s = time.monotonic()
        # 499: the client left before the answer began
        record.status = record.status or 499
        route = record.route = self._route_names.get(scope.get("endpoint"), "unmatched")
        self._metrics.requests.labels(route, record.method if route != "unmatched" else "-", record.status).inc()
        self._metrics.request_s.labels(route).observe(record.ended_s - record.started_s)
        caller = scope.get("state", {}).get("caller")
        record.key_id, record.tenant = getattr(caller, "key_id", None), getattr(caller, "tenant_name", None)
        trace_id = ""
        tracer = self._tracer()
        if tracer is not None and scope["path"] not in _UNTRACED:
            trace_id = tracer.trace(record, scope["headers"])
        if not self._has_access_log():
            return
        # Probes ask every second or so.
        log = access_log.debug if scope["path"] in _PROBES else access_log.info
        log(
            "request",
            method=record.method,
            path=quote(scope["path"][:200], safe="/:@%"),
            **record.as_line(),
            **({"trace_id": trace_id} if trace_id else {}),
        )


class _Exchange:
    """Exchange of one request and its response, with the bounds around both."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: Limits, rooms: Rooms, proxies: TrustedProxies
    ) -> None:
        self.request_id = _request_id(scope)
        self.record = RequestRecord(scope["method"], self.request_id)
        client = scope.get("client")
        host = proxies.client_host(client[0] if client else "", scope["headers"])
        self.claim = Claim(
            rooms, address_holder(host), slot=connection_slot(scope), max_body_bytes=limits.max_body_bytes
        )
        scope.setdefault("state", {}).update(
            request_id=self.request_id, claim=self.claim, sender=self, record=self.record
        )
        self._rooms = rooms
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._max_body_bytes = _max_body_bytes(scope["path"], limits)
        self._num_body_bytes = 0
        self._patience_s = limits.stalled_reader_s
        """Time by which the body may fall further behind `limits.min_body_bytes_per_s`.

        A fast start saves no more.
        """
        self._waiting: asyncio.Timeout | None = None
        """Wait for the client to send more."""
        self._waiting_since_s = 0.0
        self._has_whole_body = False
        self._is_unasked = any(name == b"expect" for name, _ in scope["headers"])
        """Whether the client keeps its body back until it is asked for it, and wasn't yet."""
        self._refusal: LoraserveError | None = None
        self._is_refused = False

    @property
    def behind_s(self) -> float:
        """Seconds by which the body is behind its least rate, while more of it is waited for."""
        if self._waiting is None:
            return 0.0
        waited_s = time.monotonic() - self._waiting_since_s
        return self._limits.stalled_reader_s - self._patience_s + waited_s

    def cut(self) -> None:
        """Wait for no more of the body: another tenant needs the place that is held for it."""
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def check_headers(self) -> None:
        """Check the headers before a byte of the body is read.

        Raises:
            HeadersTooLarge, InvalidRequest, PayloadTooLarge: a header is too large, odd, or
                announces too much.
            ContentEncodingUnsupported: the body is compressed.
        """
        headers = self._scope["headers"]
        num_bytes = sum(len(name) + len(value) + 4 for name, value in headers) + len(self._scope.get("raw_path") or b"")
        num_bytes += len(self._scope.get("query_string") or b"")
        if len(headers) > self._limits.max_headers or num_bytes > self._limits.max_header_bytes:
            raise HeadersTooLarge(
                f"The request's headers exceed the limit of {self._limits.max_headers} headers and "
                f"{self._limits.max_header_bytes} bytes."
            )
        seen = set()
        for name, value in headers:
            if name in _SINGLETONS:
                if name in seen:
                    raise InvalidRequest(
                        f"The request has the header {name.decode().title()} twice.", hint="Send each header once."
                    )
                seen.add(name)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ContentEncodingUnsupported(
                    f"The request's body has the Content-Encoding {value[:32].decode('latin-1')!r}; this server reads "
                    "bodies as they are.",
                    hint="Send the body without compression and without the header Content-Encoding.",
                )
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request's body exceeds this route's limit of {self._max_body_bytes} bytes.")

    async def receive(self) -> Message:
        self._is_unasked = False
        if self._has_whole_body:
            return await self._receive()
        limits = self._limits
        started = self._waiting_since_s = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_s) as self._waiting:
                message = await self._receive()
        except TimeoutError:
            raise self._refuse(
                RequestTimeout(
                    f"The request's body arrives too slowly: it is {self.behind_s:.0f} s behind the least rate of "
                    f"{limits.min_body_bytes_per_s} bytes per second."
                )
            ) from None
        finally:
            self._waiting = None
        # only what the client takes: our own writing of an upload isn't its fault
        waited_s = time.monotonic() - started
        if message["type"] != "http.request":
            self._has_whole_body = True
            return message
        num_bytes = len(message.get("body", b""))
        patience_s = self._patience_s - waited_s + num_bytes / limits.min_body_bytes_per_s
        self._patience_s = min(limits.stalled_reader_s, patience_s)
        self._num_body_bytes += num_bytes
        self._has_whole_body = not message.get("more_body", False)
        if self._num_body_bytes > self._max_body_bytes:
            raise self._refuse(self._too_large())
        try:
            self.claim.hold_body(num_bytes)
        except (RateLimited, Overloaded) as error:
            raise self._refuse(error) from None
        return message

    def _refuse(self, error: LoraserveError) -> _Refused:
        self._refusal = error
        return _Refused()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._refusal is not None and not self._is_refused:
                # The application saw the refusal as some error of its own; ours names the reason.
                return
            self.record.status = message["status"]
            if message["status"] >= 400:
                note_refusal(self._scope)
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["x-content-type-options"] = "nosniff"
            if is_messages_path(self._scope["path"]):
                headers["request-id"] = self.request_id
            state = self._scope.get("state", {})
            admitted = state.get("admitted")
            if message["status"] >= 500 and admitted is not None:
                admitted.uncount()
            rate_headers = state.get("rate_headers")
            if rate_headers is not None:
                headers.update(rate_headers())
            if self._is_unasked or self.claim.is_slot_refused:
                # The body may never come: the next request's bytes would be taken for it.
                headers["connection"] = "close"
        elif not self.record.status:
            return
        else:
            body = message.get("body", b"")
            self.record.note_piece(body)
            if len(body) > MAX_PIECE_BYTES:
                await self._send_in_pieces(body, message)
                return
        await self._send(message)

    async def _send_in_pieces(self, body: bytes, message: Message) -> None:
        """Send a message's body in pieces, each once the connection takes more."""
        end = len(body)
        for begin in range(0, end, MAX_PIECE_BYTES):
            more_body = begin + MAX_PIECE_BYTES < end or message.get("more_body", False)
            await self._send(
                {"type": message["type"], "body": body[begin : begin + MAX_PIECE_BYTES], "more_body": more_body}
            )

    async def fail(self, error: Exception) -> None:
        """Answer with the error if nothing was answered yet, otherwise close the connection."""
        if self._refusal is not None:
            # The frames that were reading hold what came of the body.
            traceback.clear_frames(error.__traceback__)
            error = self._refusal
        if self.record.status:
            if not isinstance(error, _Refused | LoraserveError):
                logger.error("request %s failed while it was answered", self.request_id, exc_info=error)
            raise _AnswerBroken from error
        await self._answer(error if isinstance(error, LoraserveError) else unforeseen(error))

    async def finish(self) -> None:
        """Send the refusal that the application swallowed."""
        if self._refusal is not None and not self.record.status:
            await self._answer(self._refusal)

    async def _answer(self, error: LoraserveError) -> None:
        self._is_refused = True
        self.record.code = error.code
        # What it held is others' before the client takes notice.
        self.claim.release()
        headers = {}
        if not self._has_whole_body and not self.claim.is_slot_refused and not await self._linger():
            # the rest would be taken for the next request
            headers["connection"] = "close"
        response = error_response(error, path=self._scope["path"], request_id=self.request_id, headers=headers)
        await response(self._scope, self._receive, self.send)

    async def _linger(self) -> bool:
        """Discard the body, as long as not too many others' are.

        Return whether it came to its end.
        """
        lingering, holder = self._rooms.lingering, self.claim.holder
        if not lingering.has_room(holder):
            return False
        lingering.take(holder)
        try:
            return await self._discard_body()
        finally:
            lingering.give_back(holder)

    async def _discard_body(self) -> bool:
        """Discard the body for a moment.

        A client that still sends when the connection closes never sees the answer.

        Returns:
            Whether the body came to its end.
        """
        if self._is_unasked:
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
    """Take the client's own ``x-request-id`` if it is a plain word, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_REQUEST_ID.fullmatch(value):
            client_id: str = value.decode("ascii")
            return client_id
    return f"req_{ULID()}"


def _max_body_bytes(path: str, limits: Limits) -> int:
    if _UPLOAD_PATH.fullmatch(path):
        # the multipart's own framing, and the config with the weights
        return limits.max_upload_bytes + limits.max_body_bytes
    return limits.max_body_bytes
