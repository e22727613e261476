"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.services import services_of

router = APIRouter()


@router.get("/metrics", dependencies=[Depends(scopes.require(scopes.METRICS_READ))])
async def metrics(request: Request) -> Response:
    """Every metric in Prometheus's text format. It names all tenants' adapters: it takes an admin key, or one with this scope alone."""
    return Response(generate_latest(services_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)
