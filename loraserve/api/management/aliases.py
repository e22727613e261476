"""Aliases: names that people move between versions, by compare-and-swap."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.answers import answer, answer_once, encode, read_precondition, revision_etag
from loraserve.api.management.payloads.bodies import AliasChange, read_body
from loraserve.api.management.payloads.resources import AliasResource, PageResource, page_of
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.registry.records import AliasRecord, AliasTarget, ShadowPart, SplitPart
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix="/adapters/{name}/aliases")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)


@router.get("", response_model=PageResource[AliasResource])
async def list_aliases(
    name: str, request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_reader)
) -> Response:
    """The adapter's aliases by name."""
    page = await services_of(request).registry.aliases.list(caller.tenant, name, limit=limit, cursor=cursor)
    return answer(request, page_of(page.items, page.next_cursor, AliasResource.of))


@router.get("/{alias}", response_model=AliasResource)
async def get_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    """The alias; its ETag is what ``If-Match`` takes."""
    record = await services_of(request).registry.aliases.get(caller.tenant, name, alias)
    return answer(request, AliasResource.of(record), etag=revision_etag(record.revision))


@router.put("/{alias}", response_model=AliasResource)
async def put_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The alias leads to another version, or is split over several, from now on. 201 if it is new; 412 if it isn't what ``If-Match`` says."""
    condition = read_precondition(request)
    body = await read_body(request, AliasChange)
    shadow = None if body.shadow is None else ShadowPart(body.shadow.version, body.shadow.share)
    record, is_new = await services_of(request).registry.aliases.set(
        caller.tenant, name, alias, _target(body), shadow, actor=caller.key_id, condition=condition
    )
    stored = _rendered(record)
    return Response(stored.body, 201 if is_new else 200, stored.headers, media_type="application/json")


@router.post("/{alias}/rollback", response_model=AliasResource)
async def rollback_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The alias leads to where it led before its last move. 409 where there was none; 412 if it isn't what ``If-Match`` says."""
    condition = read_precondition(request)

    async def work(once: Once[AliasRecord] | None) -> AliasRecord:
        return await services_of(request).registry.aliases.rollback(
            caller.tenant, name, alias, actor=caller.key_id, condition=condition, once=once
        )

    return await answer_once(request, caller, b"", work, _rendered)


@router.delete("/{alias}", status_code=204)
async def delete_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The alias is gone; the version that it named stays."""
    condition = read_precondition(request)
    await services_of(request).registry.aliases.delete(
        caller.tenant, name, alias, actor=caller.key_id, condition=condition
    )
    return Response(status_code=204)


def _target(body: AliasChange) -> AliasTarget:
    """Raises:
    InvalidRequest: the body says neither a version nor a split, or both.
    """
    if body.split is not None and body.version is None:
        return AliasTarget.over([SplitPart(part.version, part.weight) for part in body.split])
    if body.version is None:
        raise InvalidRequest("version is missing.", param="version", hint="Or send split, for several versions.")
    if body.split is not None:
        raise InvalidRequest("version and split are two answers to one question; send one of them.", param="split")
    return AliasTarget(body.version)


def _rendered(record: AliasRecord) -> StoredResponse:
    return StoredResponse(200, {"ETag": revision_etag(record.revision)}, encode(AliasResource.of(record)))
