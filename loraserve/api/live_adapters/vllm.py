"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from loraserve.api import scopes
from loraserve.api.live_adapters.loading import LiveLoad, LiveLoader, PathLoadBody
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_writer = scopes.require(scopes.ADAPTERS_WRITE)


class LoadLoraAdapter(PathLoadBody):
    load_inplace: bool | None = None
    """The adapter may be loaded already: then it gets another version."""
    is_3d_lora_weight: bool | None = None
    base_model_name: str | None = None
    """Name of the base that the sidecar expects here."""


class UnloadLoraAdapter(Body):
    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
    """vLLM's own number of the adapter, which vLLM ignores too."""


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: Request, caller: Caller = Depends(_writer)) -> str:
    """Load a PEFT adapter from a folder that the operator allows (``--lora-dir``).

    It becomes a version of the adapter, as an upload would, or an ephemeral one.
    """
    body = await read_body(request, LoadLoraAdapter)
    services = services_of(request)
    if body.is_3d_lora_weight:
        raise UnsupportedParameter(
            "is_3d_lora_weight isn't supported: the tensors' own shapes say what they are.",
            param="is_3d_lora_weight",
            hint="Leave it out.",
        )
    if body.base_model_name is not None and not services.registry.inspector.names_base(body.base_model_name):
        raise InvalidRequest(
            f"base_model_name isn't a name of this server's base, {services.engine.base.id}.", param="base_model_name"
        )
    loader = LiveLoader(services, caller, LiveLoad.of(body, services, is_in_place=bool(body.load_inplace)))
    await loader.load_path(body.lora_path)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(request: Request, caller: Caller = Depends(_writer)) -> str:
    """Unload an ephemeral adapter, or delete the adapter, which can be restored for a while.

    Running requests finish on the version they began with.
    """
    body = await read_body(request, UnloadLoraAdapter)
    await services_of(request).registry.unload(caller.tenant, body.lora_name, actor=caller.key_id)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
