"""Describe the server: its base model, its limits, and its audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.resources import PageResource, Resource, page_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)


class BaseResource(Resource):
    id: str
    digest: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    modules: dict[str, tuple[int, int]]
    """Linear → (out_features, in_features): what an adapter's tensors must fit."""
    module_paths: dict[str, str]
    layers_path: str
    dtype: str
    quantization: str
    """Format of the linears' weights."""
    arithmetic: str
    """Arithmetic of the linears; several are joined by ``+``.

    Such as ``w8a8-row`` (int8 weights, activations rounded to int8 by row), ``w8a16``, ``w4a16``,
    ``fp32``.
    """
    kernels: str
    """Kernels that multiply so."""
    instructions: str
    """The widest instruction sets that those may use."""
    device: str
    """cpu or cuda."""
    num_parameters: int
    size_bytes: int


class LimitsResource(Resource):
    """Limits of the server, a field per bound, named as in `loraserve.limits`."""

    model_config = ConfigDict(extra="allow", frozen=True)


class AuditResource(Resource):
    id: int
    at: datetime
    tenant: str | None
    actor: str
    action: str
    target: str
    detail: dict[str, Any]


@router.get("/base", response_model=BaseResource)
async def get_base(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the resident base model, with the shapes that an adapter must have."""
    base = services_of(request).engine.base
    return answer(request, BaseResource.of(base))


@router.get("/limits", response_model=LimitsResource)
async def get_limits(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return every limit of this server."""
    return answer(request, LimitsResource.model_validate(services_of(request).limits.as_dict()))


@router.get("/audit", response_model=PageResource[AuditResource])
async def list_audit(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_reader)
) -> Response:
    """List the tenant's audit log, newest first.

    An admin key that names no tenant gets that of all.
    """
    tenant = None if caller.sees_all else caller.tenant
    page = await services_of(request).registry.list_audit(tenant, limit=limit, cursor=cursor)
    return answer(request, page_of(page, AuditResource.of))
