"""Aliases: names that people move between versions, by compare-and-swap."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import (
    answer,
    answer_once,
    read_precondition,
    rendered,
    respond,
    revision_etag,
)
from loraserve.api.services import services_of
from loraserve.contract.alias import Alias
from loraserve.contract.result import Page
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.registry.records import AliasRecord, AliasTarget, ShadowPart, SplitPart
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix=f"/adapters/{NAME}/aliases")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)


class SplitBody(Body):
    version: int
    weight: float


class ShadowBody(Body):
    version: int
    share: float


class AliasChange(Body):
    """The whole of it: what isn't said isn't there any more."""

    version: int | None = None
    split: list[SplitBody] | None = Field(default=None, max_length=LIMITS.max_split_versions)
    shadow: ShadowBody | None = None
    if_better: str | None = Field(default=None, max_length=LIMITS.max_name_length)
    """Condition and no part of the alias: metric by which the version must be better than now's."""


@router.get("", response_model=Page[Alias])
async def list_aliases(
    name: str, request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_reader)
) -> Response:
    """List the adapter's aliases by name."""
    page = await services_of(request).registry.aliases.list(caller.tenant, name, limit=limit, cursor=cursor)
    return answer(request, page_of(page, _alias))


@router.get("/{alias}", response_model=Alias)
async def get_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the alias. ``If-Match`` takes its ETag."""
    record = await services_of(request).registry.aliases.get(caller.tenant, name, alias)
    return answer(request, _alias(record), etag=revision_etag(record.revision))


@router.put("/{alias}", response_model=Alias)
async def put_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Move the alias to another version, or split it over several.

    201 if it is new; 412 if it isn't what ``If-Match`` says, or if the version isn't better than
    the present one by the metric ``if_better``: by their evaluations on the same data.
    """
    condition = read_precondition(request)
    body = await read_body(request, AliasChange)
    shadow = None if body.shadow is None else ShadowPart(body.shadow.version, body.shadow.share)
    record, is_new = await services_of(request).registry.aliases.set(
        caller.tenant,
        name,
        alias,
        _target(body),
        shadow,
        actor=caller.key_id,
        condition=condition,
        if_better=body.if_better,
    )
    return respond(_rendered(record, status=201 if is_new else 200))


@router.post("/{alias}/rollback", response_model=Alias)
async def rollback_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Move the alias back to its previous target.

    409 if there was none; 412 if it isn't what ``If-Match`` says.
    """
    condition = read_precondition(request)

    async def work(once: Once[AliasRecord] | None) -> AliasRecord:
        return await services_of(request).registry.aliases.rollback(
            caller.tenant, name, alias, actor=caller.key_id, condition=condition, once=once
        )

    return await answer_once(request, caller, b"", work, _rendered)


@router.delete("/{alias}", status_code=204)
async def delete_alias(name: str, alias: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Delete the alias. The version that it named stays."""
    condition = read_precondition(request)
    await services_of(request).registry.aliases.delete(
        caller.tenant, name, alias, actor=caller.key_id, condition=condition
    )
    return Response(status_code=204)


def _target(body: AliasChange) -> AliasTarget:
    """Return the target that the body gives.

    Raises:
        InvalidRequest: the body says neither a version nor a split, or both.
    """
    if body.split is not None and body.version is None:
        return AliasTarget.over([SplitPart(part.version, part.weight) for part in body.split])
    if body.version is None:
        raise InvalidRequest(
            "version is missing.", param="version", hint="Send version, or split for several versions."
        )
    if body.split is not None:
        raise InvalidRequest("The body has both version and split; send only one.", param="split")
    return AliasTarget(body.version)


def _alias(record: AliasRecord) -> Alias:
    return resource_of(Alias, record, split=record.target.split or None)


def _rendered(record: AliasRecord, *, status: int = 200) -> StoredResponse:
    return rendered(_alias(record), status=status, etag=revision_etag(record.revision))
