"""HTTP connections that can't be held or flooded: bounds on bytes around requests, and on time.

`httptools_connection` describes how the parser counts.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

from loraserve.api.errors import error_response
from loraserve.errors import HeadersTooLarge, InvalidRequest, LoraserveError
from loraserve.limits import KIB, LIMITS, MIB
from loraserve.tenancy.limits.shares import ConnectionSlot

_WRITE_BUFFER_BYTES = 64 * KIB
_DRAINED_BYTES = _WRITE_BUFFER_BYTES - _WRITE_BUFFER_BYTES // 4
"""Fewest bytes that a reader takes of a full buffer until it is written to again."""
MAX_PIECE_BYTES = _WRITE_BUFFER_BYTES // 4
"""Maximum that is written of an answer at once: the connection sees the pace of its reader by
pieces that it takes, not by an answer's end.
"""
_SEND_BUFFER_BYTES = 256 * KIB
HEAD_SLACK = 2
"""Factor over the bound of a head here.

The guard, which answers a head over the bound in words, sees heads up to this one.
"""
_PIECE_BYTES = 8 * KIB
"""Bounds are checked after that many bytes: a read of the socket may bring 256 KiB."""
_TURN_S = 0.005
"""Longest time that one connection's bytes are parsed before other connections have their turn."""
_TCP_INFO_BYTES, _ACKED_OFFSET = 128, 120
"""Bytes of Linux's struct tcp_info up to tcpi_bytes_acked, and that field's place."""
_OF_REFUSALS = ((b"x-content-type-options", b"nosniff"), (b"connection", b"close"))
"""Headers of answers that the connection writes itself: no application has added any."""
_FRAMING_RATIO = 8
"""Bytes of chunk framing per byte of a body. A chunk of one byte has five around it."""
_UNREAD_BYTES = 16 * MIB
"""The most of a body that is read on after its request was answered."""
_REFUSED_UNREAD_S = 2.0
"""Seconds for which it is read on if the answer is an error: its client should send no more."""

_FORBIDDEN_IN_TRAILERS = frozenset({b"connection", b"content-length", b"host", b"transfer-encoding", b"upgrade"})
"""Header fields that decide how and where a message ends (RFC 9110, 6.5.1)."""

CAN_SEND = "loraserve.can_send"
"""Entry of a request's scope that waits until its connection takes more, for `can_send`."""
_PIECES = "loraserve.pieces"
_SLOT = "loraserve.slot"
_REFUSED = "loraserve.refused"


async def can_send(scope: Scope) -> bool:
    """Wait until the connection takes what is sent at once; False: its client has left.

    What is sent in the same turn of the event loop is handed over.
    """
    wait = scope.get(CAN_SEND)
    return True if wait is None else bool(await wait())


class PieceWriter(Protocol):
    """Writes pieces of a stream into its connection, past every middleware's `send`.

    None of them looks at a piece.
    """

    def is_free(self) -> bool:
        """Check whether the client is there and the connection takes a piece at once."""
        ...

    def write(self, data: bytes) -> None:
        """Write a piece that isn't empty, which goes out now that the connection is free."""
        ...


def piece_writer(scope: Scope) -> PieceWriter | None:
    """Look up the writer of the answer to the scope's request; None: pieces are sent alone."""
    writer: PieceWriter | None = scope.get(_PIECES)
    return writer


def connection_slot(scope: Scope) -> ConnectionSlot | None:
    """Look up the slot of the connection that the scope's request came on; None: it has none."""
    slot: ConnectionSlot | None = scope.get(_SLOT)
    return slot


def note_refusal(scope: Scope) -> None:
    """Note that the answer to the scope's request is an error."""
    scope[_REFUSED] = True


class MessageRefused(Exception):
    """Thrown inside a parser's callback: the rest of what was read isn't parsed."""


class MessagePart(Enum):
    """Part of a message that the next byte belongs to."""

    NONE = auto()
    HEAD = auto()
    BODY = auto()


class _Flow(FlowControl):
    """uvicorn's, which hands on what was read but not yet parsed before more is read."""

    def __init__(self, transport: asyncio.Transport, has_backlog: Callable[[], bool], pump: Callable[[], None]) -> None:
        super().__init__(transport)
        self._has_backlog = has_backlog
        self._pump = pump

    def resume_reading(self) -> None:
        if self.read_paused and self._has_backlog():
            self.read_paused = False
            self._pump()
        else:
            super().resume_reading()


class BoundedProtocol(asyncio.Protocol):
    """Bounds on a connection, mixed in before one of uvicorn's protocols.

    - A head is complete after `LIMITS.stalled_reader_s` and isn't far over its bound.
    - Chunk framing is in proportion to the body, with at most `LIMITS.max_trailer_bytes` between
      two bytes of a body, and after the last.
    - Trailers are counted and dropped: they are never headers. Those that decide where a message
      ends are refused.
    - A body whose request was answered comes to its end within `LIMITS.stalled_reader_s` and 16
      MiB; after an error, within 2 s.
    - Pipelined requests wait unparsed; parsing yields to other connections every 5 ms.
    - A reader that falls `LIMITS.stalled_reader_s` behind `LIMITS.min_read_bytes_per_s` is cut.

    A message over a bound is answered with an error where HTTP allows an answer, and its connection
    is closed. A closed connection cancels its request.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    scope: Any
    cycle: Any
    config: Any
    client: tuple[str, int] | None

    def __init__(self, *args: Any, slot: ConnectionSlot | None = None, **kwargs: Any) -> None:
        """Make the protocol of a connection that has `slot`, until the connection ends."""
        super().__init__(*args, **kwargs)
        self._slot = slot
        self._part = MessagePart.NONE
        self._num_framing_bytes = 0
        """Bytes of the head, or of what stands around the body's own bytes."""
        self._num_gap_bytes = 0
        """Bytes since the last byte of the body."""
        self._num_body_bytes = 0
        self._num_unread_bytes = 0
        self._num_trailers = 0
        self._refusal: LoraserveError | None = None
        self._backlog = bytearray()
        """Bytes that were read and aren't parsed."""
        self._is_paused_for_backlog = False
        """Whether nothing is read for the backlog's sake."""
        self._pump_handle: asyncio.Handle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._paused_at = 0.0
        self._num_acked_bytes = 0
        """Bytes that the client's system had taken at `_paused_at`."""
        self._patience_s = LIMITS.stalled_reader_s
        """Time by which the reader may fall further behind."""

    # implemented by the two parsers

    def _parse(self, piece: bytes) -> None:
        """Give `piece` to uvicorn's protocol."""
        super().data_received(piece)

    def _piece_writer(self, scope: Any) -> PieceWriter | None:
        """Look up the writer of the answer to the scope's request."""
        return None

    def _has_requests_ahead(self) -> bool:
        """Check whether requests are parsed already that wait for the answers before theirs."""
        return False

    # the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.flow = _Flow(self.transport, lambda: bool(self._backlog), self._pump_soon)
        self.transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            # What a stalled reader can make the kernel hold: megabytes by default.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if self._slot is not None and self.client is not None:
            # a proxy's own, before it sent the client's
            self.client = (self._slot.host, self.client[1])
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._slot is not None:
            self._slot.release()
        self._backlog.clear()
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._stop_head_timer()
        self._stop_unread_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._backlog += data
        self._pump()

    def _pump(self) -> None:
        """Parse what was read, piece by piece, for a turn at most; read on once it is parsed."""
        self._pump_handle = None
        ends_at = time.monotonic() + _TURN_S
        while self._backlog and not self.flow.read_paused and not self._has_requests_ahead():
            if self.transport.is_closing():
                self._backlog.clear()
                return
            piece = bytes(self._backlog[:_PIECE_BYTES])
            del self._backlog[: len(piece)]
            self._parse_bounded(piece)
            if self._backlog and time.monotonic() > ends_at:
                self._pump_soon()
                break
        if self.transport.is_closing():
            return
        if self._backlog:
            self._is_paused_for_backlog = True
            self.transport.pause_reading()
        elif self._is_paused_for_backlog and not self.flow.read_paused:
            self._is_paused_for_backlog = False
            self.transport.resume_reading()

    def _pump_soon(self) -> None:
        if self._pump_handle is None:
            self._pump_handle = self.loop.call_soon(self._pump)

    def _parse_bounded(self, piece: bytes) -> None:
        if self._part is MessagePart.NONE and not self._is_answering():
            self.begin_head()
        self._num_framing_bytes += len(piece)
        self._num_gap_bytes += len(piece)
        self._parse(piece)
        if self.transport.is_closing():
            return
        try:
            self._check()
        except MessageRefused:
            self.refuse()

    def _check(self) -> None:
        if self._part is not MessagePart.BODY:
            # also what stands between two requests: empty lines
            if self._num_framing_bytes > HEAD_SLACK * LIMITS.max_header_bytes:
                self._refuse_message(_head_too_large())
        elif self._num_gap_bytes > LIMITS.max_trailer_bytes + _PIECE_BYTES:
            self._refuse_message(_trailers_too_large())
        elif self._num_framing_bytes > LIMITS.max_trailer_bytes + _PIECE_BYTES + _FRAMING_RATIO * self._num_body_bytes:
            self._refuse_message(
                InvalidRequest(
                    "The body's chunks are mostly framing (extensions, or zeros before their sizes); send plain chunks."
                )
            )

    def _refuse_message(self, error: LoraserveError) -> None:
        self._refusal = error
        raise MessageRefused(str(error))

    # called by the parsers

    def begin_head(self) -> None:
        """Note that the first byte of a head was parsed, or is about to be."""
        self._part = MessagePart.HEAD
        self._num_framing_bytes = 0
        self._start_head_timer()

    def count_header(self, num_before: int) -> None:
        """Bound the headers of a head, of which one more was parsed.

        Raises:
            MessageRefused: there are too many.
        """
        if num_before >= LIMITS.max_headers:
            self._refuse_message(_head_too_large())

    def count_trailer(self, name: bytes) -> None:
        """Bound the trailers, of which one more was parsed; it is dropped.

        Raises:
            MessageRefused: it is one too many, or isn't allowed to be one.
        """
        self._num_trailers += 1
        if self._num_trailers > LIMITS.max_headers:
            self._refuse_message(_trailers_too_large())
        if name.lower() in _FORBIDDEN_IN_TRAILERS:
            self._refuse_message(
                InvalidRequest(f"{name[:64].decode('latin-1')} isn't allowed as a trailer; send it as a header.")
            )

    def end_head(self) -> None:
        """Note that the head was parsed."""
        self._part = MessagePart.BODY
        self._num_framing_bytes = self._num_gap_bytes = self._num_body_bytes = self._num_trailers = 0
        self._num_unread_bytes = 0
        self._stop_head_timer()

    def count_body(self, num_bytes: int) -> None:
        """Count bytes of the body that were parsed."""
        self._num_gap_bytes = 0
        self._num_body_bytes += num_bytes
        self._num_framing_bytes = max(0, self._num_framing_bytes - num_bytes)
        if self._unread_timer is not None:
            self._num_unread_bytes += num_bytes
            if self._num_unread_bytes > _UNREAD_BYTES:
                self.transport.abort()

    def end_message(self) -> None:
        """Note that the message came to its end."""
        self._part = MessagePart.NONE
        self._num_framing_bytes = 0
        self._stop_unread_timer()

    def on_response_complete(self) -> None:
        if self._part is MessagePart.BODY and not self._has_requests_ahead():
            is_refused = self.cycle is not None and _REFUSED in self.cycle.scope
            seconds = min(_REFUSED_UNREAD_S if is_refused else math.inf, LIMITS.stalled_reader_s)
            self._unread_timer = self.loop.call_later(seconds, self.transport.abort)
        # uvicorn's own, which asyncio.Protocol lacks
        super().on_response_complete()  # type: ignore[misc]
        self._pump_soon()

    # refusals

    def send_400_response(self, _: str) -> None:
        """uvicorn's, for what can't be parsed."""
        self.refuse()

    def refuse(self) -> None:
        """Answer with the refusal and close.

        It is given only if this message's answer is the next on the connection.
        """
        error = self._refusal or InvalidRequest("The request is not valid HTTP/1.1.")
        self._backlog.clear()
        if not self._can_answer():
            self.transport.abort()
            return
        scope = self.scope if self.scope is not None and self._part is MessagePart.BODY else {}
        request_id = scope.get("state", {}).get("request_id")
        response = error_response(error, path=scope.get("path", ""), request_id=request_id)
        lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in (*response.raw_headers, *_OF_REFUSALS)]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()
        if self.cycle is not None:
            # its request ends now, without another word on this connection
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _can_answer(self) -> bool:
        if not self._is_answering():
            return True
        return self._part is MessagePart.BODY and not self._has_requests_ahead() and not self.cycle.response_started

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # time

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_reader_timer()
        self._num_acked_bytes = self._count_acked()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        if self._reader_timer is not None:
            self._credit_reader(_DRAINED_BYTES)
        self._stop_reader_timer()
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        self._paused_at = time.monotonic()
        self._reader_timer = self.loop.call_later(max(0.0, self._patience_s), self._check_reader)

    def _check_reader(self) -> None:
        """Cut a reader that is behind: the system reports free space in large parts only."""
        self._credit_reader()
        if self._patience_s > 0:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _credit_reader(self, fewest_bytes: int = 0) -> None:
        """Charge the time since writing paused, and credit what the client took meanwhile."""
        num_before, self._num_acked_bytes = self._num_acked_bytes, self._count_acked()
        num_taken = max(fewest_bytes, self._num_acked_bytes - num_before)
        patience_s = self._patience_s - (time.monotonic() - self._paused_at)
        self._patience_s = min(LIMITS.stalled_reader_s, patience_s + num_taken / LIMITS.min_read_bytes_per_s)

    def _count_acked(self) -> int:
        """Count the bytes that the client's system has taken; 0 where this system has no count."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or not hasattr(socket, "TCP_INFO"):
            return 0
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return 0
        count: int = struct.unpack_from("Q", info, _ACKED_OFFSET)[0] if len(info) == _TCP_INFO_BYTES else 0
        return count

    def _announce(self, scope: Any) -> None:
        """Let the functions above find this connection by a request's scope."""
        scope[_SLOT] = self._slot
        scope[CAN_SEND] = self._can_send
        scope[_PIECES] = self._piece_writer(scope)

    async def _can_send(self) -> bool:
        await self.flow.drain()
        return not self.transport.is_closing()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(LIMITS.stalled_reader_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The request's headers exceed the limit of {LIMITS.max_headers} headers and {LIMITS.max_header_bytes} bytes."
    )


def _trailers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The request's trailers exceed the limit of {LIMITS.max_headers} trailers and "
        f"{LIMITS.max_trailer_bytes} bytes."
    )
