"""What is written on adapters and versions, and what brings deleted ones back."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.answers import answer, answer_once, content_etag, encode
from loraserve.api.management.payloads.bodies import AdapterEdit, VersionEdit, read_body
from loraserve.api.management.payloads.resources import AdapterResource, Resource, VersionResource
from loraserve.api.services import services_of
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.records import AdapterRecord, VersionRecord
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix="/adapters/{name}")

_writer = scopes.require(scopes.ADAPTERS_WRITE)


@router.patch("", response_model=AdapterResource)
async def edit_adapter(name: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The adapter's notes, tags and fallback are these; what the body doesn't say stays."""
    body = await read_body(request, AdapterEdit)
    edit = Edit(
        notes=body.notes or "" if "notes" in body.model_fields_set else None,
        tags=body.tags or {} if "tags" in body.model_fields_set else None,
        fallback=_fallback(body) if "fallback" in body.model_fields_set else None,
    )
    registry = services_of(request).registry
    record = await registry.metadata.edit(caller.tenant, name, edit, actor=caller.key_id)
    return answer(request, AdapterResource.of(record, registry.served_base.digest))


@router.patch("/versions/{number}", response_model=VersionResource)
async def edit_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The version's notes and tags are these; what the body doesn't say stays."""
    body = await read_body(request, VersionEdit)
    edit = Edit(
        notes=body.notes or "" if "notes" in body.model_fields_set else None,
        tags=body.tags or {} if "tags" in body.model_fields_set else None,
    )
    registry = services_of(request).registry
    record = await registry.metadata.edit_version(caller.tenant, name, number, edit, actor=caller.key_id)
    return answer(request, VersionResource.of(record, registry.served_base.digest))


@router.post("/restore", response_model=AdapterResource)
async def restore_adapter(name: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The deleted adapter is as it was: the versions that went with it, its aliases. 404 once the retention is over; 409 if it isn't deleted."""
    registry = services_of(request).registry

    async def work(once: Once[AdapterRecord] | None) -> AdapterRecord:
        return await registry.restorer.restore(caller.tenant, name, actor=caller.key_id, once=once)

    def render(record: AdapterRecord) -> StoredResponse:
        return _stored(AdapterResource.of(record, registry.served_base.digest))

    return await answer_once(request, caller, b"", work, render)


@router.post("/versions/{number}/restore", response_model=VersionResource)
async def restore_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """The deleted version is there again, under its number. 404 once the retention is over; 409 if it isn't deleted, or its bytes are another version's."""
    registry = services_of(request).registry

    async def work(once: Once[VersionRecord] | None) -> VersionRecord:
        return await registry.restorer.restore_version(caller.tenant, name, number, actor=caller.key_id, once=once)

    def render(record: VersionRecord) -> StoredResponse:
        return _stored(VersionResource.of(record, registry.served_base.digest))

    return await answer_once(request, caller, b"", work, render)


def _fallback(body: AdapterEdit) -> str:
    return "" if body.fallback is None else str(body.fallback)


def _stored(resource: Resource) -> StoredResponse:
    body = encode(resource)
    return StoredResponse(200, {"ETag": content_etag(body)}, body)
