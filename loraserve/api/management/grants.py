"""Grants: which other tenants may use an adapter. For its owner."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.resources import PageResource, Resource, page_of
from loraserve.api.management.payloads.responses import adapter_path, answer, rendered, respond
from loraserve.api.services import services_of
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix=f"/adapters/{NAME}/grants")

_owner = scopes.require(scopes.ADAPTERS_WRITE)


class GrantResource(Resource):
    adapter: str
    tenant: str
    """The name of the tenant that may use it."""
    created_at: datetime


@router.get("", response_model=PageResource[GrantResource])
async def list_grants(
    name: str, request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_owner)
) -> Response:
    """List the tenants that may use the adapter beside its owner, by name."""
    page = await services_of(request).registry.grants.list(caller.tenant, name, limit=limit, cursor=cursor)
    return answer(request, page_of(page, GrantResource.of))


@router.get("/{tenant}", response_model=GrantResource)
async def get_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Return the grant to one tenant."""
    record = await services_of(request).registry.grants.get(caller.tenant, name, tenant)
    return answer(request, GrantResource.of(record))


@router.put("/{tenant}", response_model=GrantResource)
async def put_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Let the tenant use the adapter, as ``OWNER/NAME``. 201 if the grant is new."""
    record, is_new = await services_of(request).registry.grants.create(caller.tenant, name, tenant, actor=caller.key_id)
    location = f"{adapter_path(record.adapter)}/grants/{record.tenant}"
    return respond(rendered(GrantResource.of(record), status=201 if is_new else 200, location=location))


@router.delete("/{tenant}", status_code=204)
async def delete_grant(name: str, tenant: str, request: Request, caller: Caller = Depends(_owner)) -> Response:
    """Revoke the grant: here at once, within seconds on every replica. Running requests go on."""
    await services_of(request).registry.grants.delete(caller.tenant, name, tenant, actor=caller.key_id)
    return Response(status_code=204)
