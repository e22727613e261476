"""The bounded connection over httptools (llhttp)."""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraserve.api.http.connection import BoundedProtocol, MessagePart, PieceWriter
from loraserve.errors import MethodNotAllowed


class HttptoolsConnection(BoundedProtocol, HttpToolsProtocol):
    """llhttp's connection. It keeps trailers and requests to change the protocol from uvicorn.

    A wish for another protocol is answered in HTTP/1.1, as RFC 9110 (7.8) allows, with its body
    read as it says. Left to uvicorn, that body would be read as the next request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unchanged_head: bytes | None = None
        """The head of a request to change the protocol, without that wish."""

    def _parse(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(piece)
        except httptools.HttpParserError:
            if self._refusal is None:
                self.logger.warning("Invalid HTTP request received.")
            self.refuse()

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            head, self._unchanged_head = self._unchanged_head, None
            if head is None:
                self.refuse()
                return
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            self._feed(piece[upgrade.args[0] :])

    def _piece_writer(self, scope: Any) -> PieceWriter:
        return _ChunkWriter(self, scope)

    def _has_requests_ahead(self) -> bool:
        return bool(self.pipeline)

    def on_message_begin(self) -> None:
        self.begin_head()
        super().on_message_begin()
        self._announce(self.scope)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is MessagePart.BODY:
            self.count_trailer(name)
            return
        self.count_header(len(self.headers))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refuse_message(MethodNotAllowed("CONNECT isn't supported: this server isn't a proxy."))
            self._unchanged_head = self._head_without_upgrade()
            return
        self.end_head()
        super().on_headers_complete()

    def _head_without_upgrade(self) -> bytes:
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode()))
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((line, *kept, b"", b""))

    def on_body(self, body: bytes) -> None:
        self.count_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._unchanged_head is not None:
            return
        self.end_message()
        super().on_message_complete()


class _ChunkWriter:
    """Write pieces as uvicorn's `send` does, where it waits for nothing."""

    def __init__(self, protocol: HttptoolsConnection, scope: Any) -> None:
        self._protocol = protocol
        self._scope = scope

    def is_free(self) -> bool:
        cycle = self._protocol.cycle
        return (
            cycle is not None
            and cycle.scope is self._scope
            and bool(cycle.chunked_encoding)
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not cycle.transport.is_closing()
        )

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
