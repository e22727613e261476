"""Grants: which other tenants may use an adapter. For its owner."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import adapter_path, answer, rendered, respond
from loraserve.api.services import services_of
from loraserve.contract.alias import Grant
from loraserve.contract.result import Page
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix=f"/adapters/{NAME}/grants")

_owner = scopes.require(scopes.ADAPTERS_WRITE)


@router.get("", response_model=Page[Grant])
async def list_grants(
    name: str, request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_owner)
) -> Response:
    """List the tenants that may use the adapter beside its owner, by name."""
    page = await services_of(request).registry.grants.list(caller.tenant, name, limit=limit, cursor=cursor)
    return answer(request, page_of(page, partial(resource_of, Grant)))


@router.get("/{tenant}", response_model=Grant)
async def get_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Return the grant to one tenant."""
    record = await services_of(request).registry.grants.get(caller.tenant, name, tenant)
    return answer(request, resource_of(Grant, record))


@router.put("/{tenant}", response_model=Grant)
async def put_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Let the tenant use the adapter, as ``OWNER/NAME``. 201 if the grant is new."""
    record, is_new = await services_of(request).registry.grants.create(caller.tenant, name, tenant, actor=caller.key_id)
    location = f"{adapter_path(record.adapter)}/grants/{record.tenant}"
    return respond(rendered(resource_of(Grant, record), status=201 if is_new else 200, location=location))


@router.delete("/{tenant}", status_code=204)
async def delete_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Revoke the grant: here at once, within seconds on every replica. Running requests go on."""
    await services_of(request).registry.grants.delete(caller.tenant, name, tenant, actor=caller.key_id)
    return Response(status_code=204)
