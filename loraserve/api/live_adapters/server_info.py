"""GET /server_info, by which vLLM's trainers read its configuration."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from loraserve.api import scopes
from loraserve.api.management.adapters import check_query
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

router = APIRouter()


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
