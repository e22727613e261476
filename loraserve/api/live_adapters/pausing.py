"""GET /server_info, GET /is_paused, POST /pause and POST /resume, which vLLM's trainers call."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from loraserve.api import scopes
from loraserve.api.management.adapters import check_query
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_writer = scopes.require(scopes.ADAPTERS_WRITE)
_QUERY = ("mode", "wait_for_inflight_requests", "clear_cache")


class PauseStatus(BaseModel):
    status: Literal["paused", "resumed"]


class IsPaused(BaseModel):
    is_paused: bool


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


@router.get("/server_info", dependencies=[Depends(scopes.require(scopes.INFERENCE))])
async def server_info(request: Request) -> dict[str, Any]:
    """Return what trainers ask of vLLM's configuration.

    ``max_loras`` is how many adapters of the present mean size fit, and ``max_lora_rank`` the bound
    on an upload's ranks: nothing is padded to either.
    """
    check_query(request, "config_format")
    if request.query_params.get("config_format", "json") != "json":
        raise InvalidRequest("config_format should be json.", param="config_format")
    services = services_of(request)
    base = services.engine.base
    return {
        "vllm_config": {
            "model_config": {"model": base.id, "max_model_len": base.max_model_len, "dtype": f"torch.{base.dtype}"},
            "lora_config": {"max_loras": services.routing.max_lora, "max_lora_rank": LIMITS.max_rank},
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        }
    }
