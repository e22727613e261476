"""Describe the server to its caller: who that is, the base model, limits, and the audit log."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.resources import PageResource, Resource, page_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.registry.health.base_precision import KnownPrecision
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)


class PrecisionResource(Resource):
    """What rounding costs the base: its next tokens on a text, compared with the float base's."""

    num_positions: int
    top1_agreement: float
    """The part of positions at which both have the same likeliest token."""
    mean_divergence: float
    """The mean Kullback-Leibler divergence from the float base, in nats."""
    perplexity_ratio: float
    """Perplexity of the text, in terms of the float base's."""
    measured_at: datetime
    advice: str
    """Flags that keep more of the base's answers; empty where rounding costs little."""

    @classmethod
    def of_known(cls, known: KnownPrecision | None) -> PrecisionResource | None:
        """Return what was measured; None where nothing is."""
        if known is None or known.measured is None:
            return None
        one = known.measured.precision
        return cls(
            num_positions=one.num_positions,
            top1_agreement=one.top1_agreement,
            mean_divergence=one.mean_divergence,
            perplexity_ratio=math.exp(one.served_loss - one.loss),
            measured_at=known.measured.at,
            advice=known.advice,
        )


class BaseResource(Resource):
    id: str
    digest: str
    architecture: str
    implementation: str = "native"
    """Code that computes the layers: native, or transformers."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    modules: dict[str, tuple[int, int]]
    """Linear → (out_features, in_features): what an adapter's tensors must fit."""
    module_paths: dict[str, str]
    module_layers: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Linear → the layers that have it, of those that only some have."""
    layers_path: str
    has_recurrent_state: bool = False
    """Whether layers keep a state of all tokens before: then prefixes aren't cached."""
    dtype: str
    quantization: str
    """Format of the linears' weights."""
    arithmetic: str
    """Arithmetic of the linears; several are joined by ``+``.

    Such as ``w8a8-row-h64`` (int8 weights, activations rounded to int8 by row, both rotated by
    Hadamard blocks of 64 inputs), ``w8a16``, ``w4a16``,
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
    precision: PrecisionResource | None = None
    """What rounding costs it; null: it isn't measured yet, or nothing is (`precision_note`)."""
    precision_note: str = ""
    """Reason why nothing is measured: it is served as it is stored, or there is no float base."""
    generation_defaults: dict[str, int | float] = Field(default_factory=dict)
    """Defaults of fields that requests don't send, out of its generation_config.json."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of chat templates that versions and requests may set otherwise."""


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


class WhoamiResource(Resource):
    """Caller, as the server sees it."""

    tenant: str
    """Name of the tenant that it acts for; an admin's, unless it names one: default."""
    key_id: str
    scopes: list[str]
    is_admin: bool
    sees_all: bool
    """Whether lists that can are of all tenants: an admin that names none."""
    limits: dict[str, int | float | None]
    """Limits of the tenant; null: only the server's own bounds."""
    weight: float
    has_console: bool
    """Whether this server has the web console."""


@router.get("/whoami", response_model=WhoamiResource)
async def get_whoami(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return whose key it is, what it may do, and the limits of its tenant."""
    resource = WhoamiResource(
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


@router.get("/base", response_model=BaseResource)
async def get_base(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the resident base model, with the shapes that an adapter must have."""
    services = services_of(request)
    base, known = services.engine.base, services.registry.base_precisions.current
    of_experts = {} if base.experts is None else base.experts.module_paths
    resource = BaseResource.of(base).model_copy(
        update={
            "modules": dict(base.module_shapes),
            "module_paths": {**base.module_paths, **of_experts},
            "precision": PrecisionResource.of_known(known),
            "precision_note": known.note if known else "",
            "generation_defaults": services.base_defaults.as_fields(),
            "chat_template_kwargs": dict(services.settings.default_chat_template_kwargs),
        }
    )
    return answer(request, resource)


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
