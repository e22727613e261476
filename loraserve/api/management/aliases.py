"""Aliases: names that people move between versions, by compare-and-swap."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.answers import answer, encode, read_precondition, revision_etag
from loraserve.api.management.bodies import AliasChange, read_body
from loraserve.api.management.resources import AliasResource
from loraserve.api.services import services_of
from loraserve.tenancy.auth import Caller

router = APIRouter(prefix="/adapters/{name}/aliases")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)


@router.get("/{alias}", response_model=AliasResource)
async def get_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    """The alias; its ETag is what ``If-Match`` takes."""
    record = await services_of(request).registry.get_alias(caller.tenant, name, alias)
    return answer(request, AliasResource.of(record), etag=revision_etag(record.revision))


@router.put("/{alias}", response_model=AliasResource)
async def put_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The alias names another version from now on. 201 if it is new; 412 if it isn't what ``If-Match`` says."""
    condition = read_precondition(request)
    body = await read_body(request, AliasChange)
    record, is_new = await services_of(request).registry.set_alias(
        caller.tenant, name, alias, body.version, actor=caller.key_id, condition=condition
    )
    headers = {"ETag": revision_etag(record.revision)}
    content = encode(AliasResource.of(record))
    return Response(content, 201 if is_new else 200, headers, media_type="application/json")


@router.delete("/{alias}", status_code=204)
async def delete_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The alias is gone; the version that it named stays."""
    condition = read_precondition(request)
    await services_of(request).registry.delete_alias(
        caller.tenant, name, alias, actor=caller.key_id, condition=condition
    )
    return Response(status_code=204)
