"""Describe the server to its caller: who that is, the base model, limits, and the audit log."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.contract.result import Page
from loraserve.contract.server import AuditEntry, Base, BasePrecision, Limits
from loraserve.contract.tenant import Whoami
from loraserve.registry.health.base_precision import KnownPrecision
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)


@router.get("/whoami", response_model=Whoami)
async def get_whoami(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return whose key it is, what it may do, and the limits of its tenant."""
    resource = Whoami(
        tenant=caller.tenant_name,
        key_id=caller.key_id,
        scopes=sorted(caller.scopes),
        is_admin=caller.is_admin,
        sees_all=caller.sees_all,
        limits=asdict(caller.policy.limits),
        weight=caller.policy.weight,
        has_console=services_of(request).settings.console,
    )
    return answer(request, resource)


@router.get("/base", response_model=Base)
async def get_base(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the resident base model, with the shapes that an adapter must have."""
    services = services_of(request)
    base, known = services.engine.base, services.registry.base_precisions.current
    template = services.settings.chat_template
    of_experts = {} if base.experts is None else base.experts.module_paths
    resource = resource_of(
        Base,
        base,
        modules=dict(base.module_shapes),
        module_paths={**base.module_paths, **of_experts},
        precision=_precision(known),
        precision_note=known.note if known else "",
        has_chat_template=bool(services.chat_format.template.source),
        generation_defaults=services.base_defaults.as_fields(),
        chat_template_file=None if template is None else template.name,
        chat_template_kwargs=dict(services.settings.default_chat_template_kwargs),
    )
    return answer(request, resource)


@router.get("/limits", response_model=Limits)
async def get_limits(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return every limit of this server."""
    return answer(request, Limits.model_validate(services_of(request).limits.as_dict()))


@router.get("/audit", response_model=Page[AuditEntry])
async def list_audit(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_reader)
) -> Response:
    """List the tenant's audit log, newest first.

    An admin key that names no tenant gets that of all.
    """
    tenant = None if caller.sees_all else caller.tenant
    page = await services_of(request).registry.list_audit(tenant, limit=limit, cursor=cursor)
    return answer(request, page_of(page, partial(resource_of, AuditEntry)))


def _precision(known: KnownPrecision | None) -> BasePrecision | None:
    """Show what was measured; None where nothing is."""
    if known is None or known.measured is None:
        return None
    one = known.measured.precision
    return BasePrecision(
        num_positions=one.num_positions,
        top1_agreement=one.top1_agreement,
        mean_divergence=one.mean_divergence,
        perplexity_ratio=math.exp(one.served_loss - one.loss),
        measured_at=known.measured.at,
        advice=known.advice,
    )
