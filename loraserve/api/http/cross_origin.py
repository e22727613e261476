"""Outermost middleware: lets pages of other origins read answers, by the origins allowed now."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-loraserve-adapter", "x-loraserve-ignored", "server-timing"),
    *("x-loraserve-did-you-mean", "x-loraserve-cache"),
    *("retry-after", "retry-after-ms", "x-should-retry", "etag", "idempotent-replayed", "content-disposition"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)
"""Headers of answers that a web page may read, beside those that browsers always show."""


class CrossOrigin:
    """Adds the headers of CORS for the allowed origins; passes everything on where there are none.

    It is around the guard, whose refusals need these headers too; a preflight has no key.

    Args:
        origins: returns the origins that are allowed now.
    """

    def __init__(self, app: ASGIApp, origins: Callable[[], tuple[str, ...]]) -> None:
        self._app = app
        self._origins = origins
        self._known: tuple[str, ...] = ()
        self._allowing: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._origins()
        if origins != self._known:
            self._known, self._allowing = origins, self._allow(origins)
        await self._allowing(scope, receive, send)

    def _allow(self, origins: tuple[str, ...]) -> ASGIApp:
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
            # A key is sent as a header by the page itself; no cookie ever is one.
            allow_credentials=False,
        )
