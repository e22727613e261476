"""GET /is_paused, POST /pause and POST /resume, which vLLM's trainers call."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

from loraserve.api import scopes
from loraserve.api.management.adapters import check_query
from loraserve.api.services import services_of
from loraserve.contract.server import IsPaused, PauseStatus
from loraserve.errors import UnsupportedParameter
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_writer = scopes.require(scopes.ADAPTERS_WRITE)
_QUERY = ("mode", "wait_for_inflight_requests", "clear_cache")


@router.post("/pause")
async def pause(request: Request, caller: Caller = Depends(_writer)) -> PauseStatus:
    """Let the tenant's new requests wait until /resume, or for `limits.max_pause_s`.

    Running requests go on, each on the version that it began with, so that none has to stop for a
    load. Only ``mode=keep`` is supported, and caches need no clearing: they know the version.
    """
    check_query(request, *_QUERY)
    query = request.query_params
    if query.get("mode", "abort") != "keep" or query.get("wait_for_inflight_requests", "false") != "false":
        raise UnsupportedParameter(
            "mode should be keep: running requests are neither ended nor waited for, since each keeps its version.",
            param="mode",
            hint="Send /pause?mode=keep.",
        )
    services_of(request).pauses.begin(caller.tenant)
    return PauseStatus(status="paused")


@router.post("/resume")
async def resume(request: Request, caller: Caller = Depends(_writer)) -> PauseStatus:
    """Let the tenant's waiting requests go on."""
    services_of(request).pauses.end(caller.tenant)
    return PauseStatus(status="resumed")


@router.get("/is_paused")
async def is_paused(request: Request, caller: Caller = Depends(scopes.require(scopes.INFERENCE))) -> IsPaused:
    """Return whether the tenant's new requests wait on this server."""
    return IsPaused(is_paused=services_of(request).pauses.is_paused(caller.tenant))
