"""Probes, the version and metrics.

Probes need no key, and say nothing about tenants or models; the version and metrics need a key, but
for those of routers, where an operator serves them.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from loraserve import __version__
from loraserve.api import scopes
from loraserve.api.metrics import engine_tables, server_tables
from loraserve.api.metrics.table import Source, Table, TableCollector
from loraserve.api.services import services_of
from loraserve.contract.server import ServerVersion

router = APIRouter()
router_metrics_router = APIRouter()

ROUTER_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)
"""Metrics by which routers score a server; none has a tenant."""


@router.get("/livez")
@scopes.open
async def livez(request: Request) -> JSONResponse:
    """Return 200 while the engine steps or restarts, 503 once it can't restart.

    An orchestrator then restarts the server.
    """
    engine = services_of(request).engine
    return _answer(engine.is_live, engine.status)


@router.get("/readyz")
@scopes.open
async def readyz(request: Request) -> JSONResponse:
    """Return 200 once the base is loaded and requests are computed, otherwise 503.

    Among others while the engine hangs or restarts, and from the start of a shutdown.

    With 503, `detail` says what is waited for, such as how far a load is. While the database is
    away, known keys and names are served on, so that is said beside a 200:
    ``"database": "unavailable"``.
    """
    services = services_of(request)
    if services.is_draining:
        return _answer(False, "The server is shutting down.")
    is_database_available = services.registry.is_database_available
    return _answer(services.engine.is_ready, services.engine.status, is_database_available=is_database_available)


@router.get("/health")
@scopes.open
async def health(request: Request) -> JSONResponse:
    """Answer as /readyz, for clients that ask here."""
    return await readyz(request)


@router.get("/ping")
@scopes.open
async def ping(request: Request) -> JSONResponse:
    """Answer as /readyz, for SageMaker and clients of vLLM, LoRAX and TGI."""
    return await readyz(request)


@router.post("/ping")
@scopes.open
async def post_ping(request: Request) -> JSONResponse:
    """Answer as /readyz, for clients that ask with a POST, as vLLM lets them."""
    return await readyz(request)


@router.head("/", include_in_schema=False)
@scopes.open
async def probe() -> Response:
    """Answer Ollama's clients that ask whether a server is there."""
    return Response()


@router.get("/version", dependencies=[Depends(scopes.require(scopes.INFERENCE))])
async def version() -> ServerVersion:
    """Return the server's version, in vLLM's form."""
    return ServerVersion(version=__version__)


@router.get("/metrics", dependencies=[Depends(scopes.require(scopes.METRICS_READ))])
async def metrics(request: Request) -> Response:
    """Return every metric in Prometheus's text format.

    It names all tenants' adapters: it needs an admin key, or one with this scope alone.
    """
    services = services_of(request)
    await services.routing.refresh()
    return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router_metrics_router.get("/metrics/router")
@scopes.open
async def router_metrics(request: Request) -> Response:
    """Return the metrics by which routers score this server, in Prometheus's text format."""
    # built again each time, for a scrape may come every 50 ms: nothing else is collected
    services = services_of(request)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector(_of_routers(engine_tables.VLLM), lambda: services.engine.stats))
    registry.register(TableCollector(_of_routers(server_tables.ROUTING), lambda: services.routing))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _of_routers(table: Table[Source]) -> Table[Source]:
    return [row for row in table if row.name in ROUTER_METRICS]


def _answer(is_fine: bool, detail: str | None, *, is_database_available: bool = True) -> JSONResponse:
    database = {} if is_database_available else {"database": "unavailable"}
    if is_fine:
        return JSONResponse({"status": "ok", **database})
    return JSONResponse(
        {"status": "unavailable", **({"detail": detail} if detail else {}), **database}, status_code=503
    )
