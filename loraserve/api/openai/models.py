"""GET /v1/models: the base, and the adapters that the key may use."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Depends, Request

from loraserve.api import scopes
from loraserve.api.http.request_path import MODEL
from loraserve.api.services import services_of
from loraserve.contract.server import Model, ModelList
from loraserve.registry.model_name import parse_model
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import BaseSpec

router = APIRouter()

_require_inference = scopes.require(scopes.INFERENCE)


@router.get("/models")
async def list_models(request: Request, caller: Caller = Depends(_require_inference)) -> ModelList:
    """List the base, then the tenant's adapters that a bare name reaches, then granted ones.

    Granted ones are named ``OWNER/NAME``.
    """
    services = services_of(request)
    base = services.engine.base
    adapters = [
        _adapter(item.model, base, owned_by=item.owned_by, created_at=item.created_at, digest=item.digest)
        for item in await services.registry.list_servable(caller.tenant)
        # the base's id wins over a tenant and an adapter of its
        if item.model != base.id
    ]
    return ModelList(object="list", data=[_base(base), *adapters])


@router.get(f"/models/{MODEL}")
async def get_model(model: str, request: Request, caller: Caller = Depends(_require_inference)) -> Model:
    """Return one model, by any of its names.

    A sum of adapters isn't one: it exists for its request alone.

    Raises:
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
    """
    services = services_of(request)
    base = services.engine.base
    parsed = parse_model(model, base.id)
    if parsed.is_base:
        return _base(base)
    target = await services.registry.describe(caller.tenant, parsed)
    ref = target.ref
    owner = None if ref.tenant == caller.tenant or parsed.granted is None else parsed.granted[0]
    return _adapter(
        parsed.as_written(model, ref.name, is_granted=owner is not None),
        base,
        owned_by=owner or caller.tenant_name,
        created_at=target.created_at,
        digest=ref.digest,
    )


def _base(base: BaseSpec) -> Model:
    # Files don't tell when a model was made; clients want a number.
    return Model(
        id=base.id,
        object="model",
        created=0,
        owned_by="loraserve",
        root=base.id,
        parent=None,
        max_model_len=base.max_model_len,
    )


def _adapter(name: str, base: BaseSpec, *, owned_by: str, created_at: datetime, digest: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=int(created_at.timestamp()),
        owned_by=owned_by,
        root=f"sha256:{digest}",
        parent=base.id,
        max_model_len=base.max_model_len,
    )
