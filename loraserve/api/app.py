"""Build the application: routers, error handlers, guard, metrics, and the check of scopes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from loraserve import __version__
from loraserve.api import (
    anthropic,
    comparison,
    console,
    errors,
    live_adapters,
    lorax,
    management,
    monitoring,
    ollama,
    openai,
    openapi,
    scopes,
)
from loraserve.api.http.guard import Guard
from loraserve.api.metrics import engine_tables, server_tables
from loraserve.api.metrics.table import TableCollector
from loraserve.api.services import Services
from loraserve.tenancy.limits.shares import Shares

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-loraserve-adapter", "x-loraserve-ignored", "server-timing"),
    *("x-loraserve-did-you-mean", "x-loraserve-cache"),
    *("retry-after", "retry-after-ms", "x-should-retry", "etag", "idempotent-replayed", "content-disposition"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)
"""Headers of answers that a web page may read, in addition to those that browsers always show."""


def create_app(services: Services) -> FastAPI:
    """Build the ASGI application over `services`.

    Raises:
        ConfigError: a route declares no scope.
    """
    app = FastAPI(
        title="loraserve",
        version=__version__,
        # Every route needs a key, and these would not.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would repeat the caller's path and query.
        redirect_slashes=False,
        # FastAPI's would record the messages of errors, and be a second trace next to ours.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        routes=list(
            _routes(has_console=services.settings.console, has_router_metrics=services.settings.router_metrics)
        ),
    )
    app.state.services = services
    for collector in _collectors(services):
        services.metrics.registry.register(collector)
    errors.install(app)
    scopes.audit(app)
    app.add_middleware(
        Guard,
        metrics=services.metrics,
        limits=services.limits,
        rooms=services.rooms,
        proxies=services.proxies,
        route_names=_route_names(app),
        has_access_log=lambda: services.settings.access_log,
        tracer=lambda: services.tracer,
    )
    app.add_middleware(_CrossOrigin, origins=lambda: services.settings.cors_allow_origins)
    return app


@functools.cache
def _routes(*, has_console: bool, has_router_metrics: bool) -> tuple[BaseRoute, ...]:
    """Build the routes of every application.

    They hold no state but what is built of their signatures, which takes longer than all else that
    `create_app` does.
    """
    router = APIRouter()
    router.include_router(monitoring.router)
    under_management, under_tenant = _Section(f"{errors.MANAGEMENT_PREFIX}/"), _Section("/t/")
    for part in (management.router, comparison.router):
        under_management.include_router(part, prefix=errors.MANAGEMENT_PREFIX)
    router.include_router(under_management)
    for group, prefix in ((under_tenant, "/t/{tenant}"), (router, "")):
        group.include_router(openai.router, prefix=prefix)
        group.include_router(anthropic.router, prefix=f"{prefix}/v1")
        group.include_router(lorax.router, prefix=prefix)
        group.include_router(ollama.router, prefix=f"{prefix}/api")
        group.include_router(live_adapters.router, prefix=prefix)
    router.include_router(under_tenant)
    if has_console:
        router.include_router(console.router)
    if has_router_metrics:
        router.include_router(monitoring.router_metrics_router)
    router.include_router(openapi.router)
    return tuple(router.routes)


class _Section(APIRouter):
    """Routes whose paths begin alike, which requests of other paths pass without being compared.

    Args:
        start: what the paths begin with.
    """

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not scope["path"].startswith(self._start):
            return Match.NONE, {}
        return super().matches(scope)


def _collectors(services: Services) -> tuple[Collector, ...]:
    """Build the collectors of what the services count.

    They look the services up again at every scrape.
    """

    def shares() -> tuple[Shares, ...]:
        return (*services.rooms.all(), *services.registry.uploads.shares(), *services.registry.ephemeral.shares())

    stats_tables = (
        *engine_tables.STEPS,
        *engine_tables.MEMORY,
        *engine_tables.GRAMMARS,
        *engine_tables.SPECULATION,
        *engine_tables.VLLM,
    )
    return (
        TableCollector(engine_tables.ENGINE, lambda: services.engine),
        TableCollector(stats_tables, lambda: services.engine.stats),
        TableCollector(server_tables.ROUTING, lambda: services.routing),
        TableCollector(server_tables.CHECKS, lambda: services.grammars),
        TableCollector(server_tables.TEMPLATES, lambda: services.templates),
        TableCollector(server_tables.VERSION_CHATS, lambda: services.version_chats),
        TableCollector(server_tables.RESULT_CACHE, lambda: services.result_cache),
        TableCollector(server_tables.ADMISSIONS, lambda: services.admissions),
        TableCollector(server_tables.BASE_PRECISIONS, lambda: services.registry.base_precisions),
        TableCollector(server_tables.PAUSES, lambda: services.pauses),
        TableCollector(server_tables.SHARES, shares),
        TableCollector(server_tables.REGISTRY, lambda: services.registry),
        TableCollector(server_tables.BILLING, lambda: services.usage),
        TableCollector(server_tables.RESPONSES, lambda: services.responses),
        TableCollector(server_tables.BATCHES, lambda: services.batch_runner),
    )


def _route_names(app: FastAPI) -> dict[Any, str]:
    """Map each endpoint to its whole path, for logs and metrics.

    The route in a request's scope has its router's part alone.
    """
    names: dict[Any, str] = {}
    for context in iter_route_contexts(app.routes):
        # what is there under /t/{tenant} too counts as the same
        names.setdefault(context.endpoint, context.path_format or "?")
    return names


class _CrossOrigin:
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
