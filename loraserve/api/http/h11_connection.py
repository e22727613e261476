"""The bounded connection over h11, for interpreters without httptools."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraserve.api.http.connection import HEAD_SLACK, BoundedProtocol, MessageRefused
from loraserve.errors import InvalidRequest, MethodNotAllowed
from loraserve.limits import LIMITS


class H11Connection(BoundedProtocol, H11Protocol):
    """h11's connection.

    h11 drops trailers, and gives its events one by one: they are counted before uvicorn sees them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Watched(self)

    def see(self, event: object) -> None:
        """Count what was parsed.

        Raises:
            MessageRefused: it is over a bound, or isn't what this server takes.
        """
        if isinstance(event, h11.Request):
            self.begin_head()
            self.count_header(len(event.headers) - 1)
            self._check_request(event)
            self.end_head()
        elif isinstance(event, h11.Data):
            self.count_body(len(event.data))
        elif isinstance(event, h11.EndOfMessage):
            for name, _ in event.headers:
                self.count_trailer(name)
            self.end_message()

    def _check_request(self, request: h11.Request) -> None:
        names = {name.lower() for name, _ in request.headers}
        if request.method == b"CONNECT":
            self._refuse_message(MethodNotAllowed("CONNECT isn't supported: this server isn't a proxy."))
        if {b"transfer-encoding", b"content-length"} <= names:
            # two proxies that take different ones see different requests
            self._refuse_message(
                InvalidRequest("The request has both Content-Length and Transfer-Encoding; send only one.")
            )

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self._announce(self.scope)


class _Watched(h11.Connection):
    """h11's connection, which shows its protocol each event first."""

    def __init__(self, protocol: H11Connection) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=HEAD_SLACK * LIMITS.max_header_bytes)
        self._protocol = protocol

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        try:
            self._protocol.see(event)
        except MessageRefused as refusal:
            raise h11.RemoteProtocolError(str(refusal)) from refusal
        return event
