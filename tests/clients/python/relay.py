"""A relay in front of the server that notes what a program sends and which headers it gets.

For programs that show neither.
"""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_DROPPED = {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}


@dataclass(frozen=True)
class Exchange:
    path: str
    request: dict[str, Any]
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""

    def events(self) -> list[dict[str, Any]]:
        """Return the JSON of a stream's events."""
        lines = [line.removeprefix("data: ") for line in self.answer.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@contextmanager
def relayed(url: str, added: dict[str, Any] | None = None) -> Iterator[tuple[str, list[Exchange]]]:
    """Listen on a free port; yield its address and the exchanges so far.

    Args:
        added: fields to add to the first request.
    """
    target, noted = urlsplit(url), list[Exchange]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if added and not noted:
                body = json.dumps(json.loads(body) | added).encode()
            status, headers, answer = self._forward(body)
            noted.append(Exchange(self.path, json.loads(body), status, headers, answer))
            self._answer(status, headers, answer)

        def do_GET(self) -> None:
            self._answer(*self._forward(None))

        def _forward(self, body: bytes | None) -> tuple[int, dict[str, str], bytes]:
            sent = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
            connection = http.client.HTTPConnection(target.netloc, timeout=120)
            try:
                connection.request(self.command, self.path, body, sent)
                answer = connection.getresponse()
                return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            finally:
                connection.close()

        def _answer(self, status: int, headers: dict[str, str], answer: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name not in _DROPPED:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", noted
    finally:
        server.shutdown()
        server.server_close()
