"""Whether the server lives, and whether it should be sent requests. Open to anyone, and says nothing else."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from loraserve.api import scopes
from loraserve.api.services import services_of

router = APIRouter()


@router.get("/livez")
@scopes.open
async def livez(request: Request) -> JSONResponse:
    """200 while the engine steps or is being brought back; 503 once it can't be, so that an orchestrator restarts the server."""
    return _answer(services_of(request).engine.is_live)


@router.get("/readyz")
@scopes.open
async def readyz(request: Request) -> JSONResponse:
    """200 once the base is loaded and requests are computed; 503 before, between engines, and from the start of a shutdown."""
    services = services_of(request)
    return _answer(services.engine.is_ready and not services.is_draining)


@router.get("/health")
@scopes.open
async def health(request: Request) -> JSONResponse:
    """As /readyz, for clients that ask here."""
    return await readyz(request)


def _answer(is_fine: bool) -> JSONResponse:
    return JSONResponse({"status": "ok" if is_fine else "unavailable"}, status_code=200 if is_fine else 503)
