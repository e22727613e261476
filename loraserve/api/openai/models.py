"""/v1/models: the base, and the adapters that the key may use."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Request

from loraserve.api import scopes
from loraserve.api.services import Services, services_of
from loraserve.registry.model_name import parse_model
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_require_inference = scopes.require(scopes.INFERENCE)


@router.get("/models")
async def list_models(request: Request, caller: Caller = Depends(_require_inference)) -> dict[str, Any]:
    """The base first, then the tenant's adapters that a bare name reaches, then those that others granted to it, as ``OWNER/NAME``."""
    services = services_of(request)
    base = _base(services)
    adapters = await services.registry.list_servable(caller.tenant)
    data = [
        _adapter(services, item.owned_by, item.model, item.created_at, item.digest)
        for item in adapters
        # the base's id wins over a tenant and an adapter of its
        if item.model != base["id"]
    ]
    return {"object": "list", "data": [base, *data]}


@router.get("/models/{model:path}")
async def get_model(model: str, request: Request, caller: Caller = Depends(_require_inference)) -> dict[str, Any]:
    """One model, by any of its names. A sum of adapters isn't one: it is there for its request alone.

    Raises:
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
    """
    services = services_of(request)
    parsed = parse_model(model, services.engine.base.id)
    if parsed.is_base:
        return _base(services)
    target = await services.registry.describe(caller.tenant, parsed)
    return _adapter(services, parsed.owner or caller.tenant_name, model, target.created_at, target.ref.digest)


def _base(services: Services) -> dict[str, Any]:
    base = services.engine.base
    # Files don't tell when a model was made; clients want a number.
    return _entry(services, base.id, 0, owned_by="loraserve", root=base.id, parent=None)


def _adapter(services: Services, owned_by: str, model: str, created_at: datetime, digest: str) -> dict[str, Any]:
    created = int(created_at.timestamp())
    parent = services.engine.base.id
    return _entry(services, model, created, owned_by=owned_by, root=f"sha256:{digest}", parent=parent)


def _entry(
    services: Services, model: str, created: int, *, owned_by: str, root: str, parent: str | None
) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
        "root": root,
        "parent": parent,
        "max_model_len": services.engine.base.max_model_len,
    }
