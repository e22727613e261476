"""uvicorn's HTTP connection with an end to waiting: for a request's head that doesn't come, and for a reader that stopped reading."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraserve.limits import KIB, LIMITS

_WRITE_BUFFER_BYTES = 64 * KIB
_SEND_BUFFER_BYTES = 256 * KIB
_HEAD_SLACK = 2
"""The guard answers a head over its bound with words; here it is only kept from growing without end."""

_CAN_SEND = "loraserve.can_send"


async def can_send(scope: Scope) -> bool:
    """Wait until the connection takes what is sent at once; False: its client has left. What is sent in the same turn of the event loop is handed over."""
    wait = scope.get(_CAN_SEND)
    return True if wait is None else bool(await wait())


class BoundedConnection(HttpToolsProtocol):
    """Closes itself when a request's head is not complete after `LIMITS.stalled_reader_s` or is far too long, and when
    the peer takes nothing of a full buffer for as long. A closed connection cancels its request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # What a stalled reader can make the kernel hold: megabytes by default.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _HEAD_SLACK * LIMITS.max_header_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[_CAN_SEND] = self._can_send

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_reader_timer()
        self._reader_timer = self.loop.call_later(LIMITS.stalled_reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

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

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
