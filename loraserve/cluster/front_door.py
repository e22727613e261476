"""An ingress' own HTTP server, as `serve` has it."""

from __future__ import annotations

import asyncio
import socket
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraserve.api.server import make_http_server
from loraserve.api.services import Services

_QUIET_S = 5.0
"""Seconds without a request after which idle connections are closed, when the server ends."""
_LOOK_S = 0.1


class FrontDoor:
    """Answers clients at a listener that other ingresses share."""

    def __init__(self, app: ASGIApp, services: Services, listener: socket.socket) -> None:
        """Begin to accept connections."""
        self._last_answers = _LastAnswers(app)
        self._server = make_http_server(self._last_answers, services)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")

    async def close(self, grace_s: float) -> None:
        """Accept no more, and end the connections that there are, each after a last answer.

        An answer announces that its connection ends with it, so that a client begins another one,
        at another ingress. Those that are open after `grace_s` are cut off.
        """
        for one in self._server.servers:
            one.close()
        self._last_answers.are_last = True
        state = self._server.server_state
        now_s = quiet_since_s = time.monotonic()
        ends_s = now_s + grace_s
        while state.connections and now_s < ends_s and now_s - quiet_since_s < _QUIET_S:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            if state.tasks:
                quiet_since_s = now_s
        self._server.should_exit = True
        await self._serving


class _LastAnswers:
    """Ends each connection with its next answer, once `are_last`."""

    def __init__(self, app: ASGIApp) -> None:
        self.are_last = False
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, send_last if self.are_last else send)
