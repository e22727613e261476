"""Tenants. For admins."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import (
    ROOT,
    answer,
    answer_once,
    check_content_match,
    rendered,
    respond,
)
from loraserve.api.services import services_of
from loraserve.contract.result import Page
from loraserve.contract.tenant import Tenant
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.policy import LIMIT_NAMES, NO_POLICY
from loraserve.tenancy.identity.tenants import TenantChange, TenantRecord

router = APIRouter(prefix="/tenants")

_admin = scopes.require(scopes.ADMIN)
_operator = scopes.require(scopes.OPERATOR_READ)


class LimitsBody(Body):
    """Limits to change: absent ones stay as they are; null: no limit."""

    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_queued_requests: int | None = None
    max_kv_share: float | None = None
    max_cached_bytes: int | None = None


class PriceBody(Body):
    """Per million tokens, as decimal text."""

    prompt: str | None = None
    cached: str | None = None
    completion: str | None = None


class PricesBody(Body):
    currency: str
    prompt: str
    cached: str | None = None
    completion: str
    adapters: dict[str, PriceBody] = Field(default_factory=dict)


class TenantPatch(Body):
    """Policy to change: absent fields stay as they are; null resets one."""

    limits: LimitsBody | None = None
    weight: float | None = None
    prices: PricesBody | None = None

    def as_change(self) -> TenantChange:
        given = self.model_fields_set
        limits: dict[str, int | float | None] = {}
        if self.limits is not None:
            limits = self.limits.model_dump(exclude_unset=True)
        elif "limits" in given:
            limits = dict.fromkeys(LIMIT_NAMES)
        prices = None
        if "prices" in given:
            prices = {} if self.prices is None else self.prices.model_dump(exclude_none=True)
        weight = self.weight if "weight" in given else None
        return TenantChange(limits, NO_POLICY.weight if "weight" in given and weight is None else weight, prices)


class TenantCreate(TenantPatch):
    name: str


@router.post("", status_code=201, response_model=Tenant)
async def create_tenant(request: Request, caller: Caller = Depends(_admin)) -> Response:
    body = await read_body(request, TenantCreate)
    policy = body.as_change().apply(NO_POLICY)
    tenants = services_of(request).authenticator.tenants

    async def work(once: Once[TenantRecord] | None) -> TenantRecord:
        return await tenants.create(body.name, actor=caller.key_id, policy=policy, once=once)

    def render(record: TenantRecord) -> StoredResponse:
        return rendered(_tenant(record), status=201, location=f"{ROOT}/tenants/{record.name}")

    return await answer_once(request, caller, await request.body(), work, render)


@router.get("", response_model=Page[Tenant])
async def list_tenants(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_operator)
) -> Response:
    """List all tenants by name."""
    page = await services_of(request).authenticator.tenants.list(limit=limit, cursor=cursor)
    return answer(request, page_of(page, _tenant))


@router.get("/{tenant}", response_model=Tenant)
async def get_tenant(tenant: str, request: Request, caller: Caller = Depends(_operator)) -> Response:
    return answer(request, _tenant(await services_of(request).authenticator.tenants.get(tenant)))


@router.patch("/{tenant}", response_model=Tenant)
async def update_tenant(tenant: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Set the tenant's limits, weight and prices.

    They hold from now on here, within seconds on every replica. 412 if the tenant isn't what
    ``If-Match`` says.
    """
    body = await read_body(request, TenantPatch)
    record = await services_of(request).authenticator.tenants.update(
        tenant,
        body.as_change(),
        actor=caller.key_id,
        check=lambda before: check_content_match(request, _tenant(before)),
    )
    return respond(rendered(_tenant(record)))


@router.delete("/{tenant}", status_code=204)
async def delete_tenant(tenant: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Delete the tenant: its keys and models stop working. Its name is free for another tenant."""
    await services_of(request).authenticator.tenants.delete(tenant, actor=caller.key_id)
    return Response(status_code=204)


def _tenant(record: TenantRecord) -> Tenant:
    policy = record.policy
    return resource_of(
        Tenant,
        record,
        limits=asdict(policy.limits),
        weight=policy.weight,
        prices=None if policy.prices is None else policy.prices.as_json(),
    )
