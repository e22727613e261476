"""Edit the metadata of adapters and versions, and restore deleted ones."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import adapter_of, version_of
from loraserve.api.management.payloads.responses import answer, answer_once, rendered
from loraserve.api.services import services_of
from loraserve.contract.adapter import Adapter, Version
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.records import AdapterRecord, VersionRecord
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix=f"/adapters/{NAME}")

_writer = scopes.require(scopes.ADAPTERS_WRITE)


class VersionEdit(Body):
    """Metadata to change: absent fields stay as they are; null clears one."""

    notes: str | None = None
    tags: dict[str, str] | None = None

    def as_edit(self) -> Edit:
        return Edit(
            notes=self.notes or "" if "notes" in self.model_fields_set else None,
            tags=self.tags or {} if "tags" in self.model_fields_set else None,
        )


class AdapterEdit(VersionEdit):
    fallback: int | str | None = Field(default=None, union_mode="left_to_right")

    def as_edit(self) -> Edit:
        fallback = "" if self.fallback is None else str(self.fallback)
        return replace(super().as_edit(), fallback=fallback if "fallback" in self.model_fields_set else None)


@router.patch("", response_model=Adapter)
async def edit_adapter(name: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Set the adapter's notes, tags and fallback. Absent fields stay as they are."""
    body = await read_body(request, AdapterEdit)
    registry = services_of(request).registry
    record = await registry.metadata.edit(caller.tenant, name, body.as_edit(), actor=caller.key_id)
    return answer(request, adapter_of(record, registry.served_base.digest))


@router.patch("/versions/{number}", response_model=Version)
async def edit_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Set the version's notes and tags. Absent fields stay as they are."""
    body = await read_body(request, VersionEdit)
    registry = services_of(request).registry
    record = await registry.metadata.edit_version(caller.tenant, name, number, body.as_edit(), actor=caller.key_id)
    return answer(request, version_of(record, registry.served_base.digest))


@router.post("/restore", response_model=Adapter)
async def restore_adapter(name: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Restore the deleted adapter with the versions deleted with it, and its aliases.

    404 after the retention; 409 if it isn't deleted.
    """
    registry = services_of(request).registry

    async def work(once: Once[AdapterRecord] | None) -> AdapterRecord:
        return await registry.restorer.restore(caller.tenant, name, actor=caller.key_id, once=once)

    def render(record: AdapterRecord) -> StoredResponse:
        return rendered(adapter_of(record, registry.served_base.digest))

    return await answer_once(request, caller, b"", work, render)


@router.post("/versions/{number}/restore", response_model=Version)
async def restore_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Restore the deleted version under its number.

    404 after the retention; 409 if it isn't deleted, or if another version has its bytes.
    """
    registry = services_of(request).registry

    async def work(once: Once[VersionRecord] | None) -> VersionRecord:
        return await registry.restorer.restore_version(caller.tenant, name, number, actor=caller.key_id, once=once)

    def render(record: VersionRecord) -> StoredResponse:
        return rendered(version_of(record, registry.served_base.digest))

    return await answer_once(request, caller, b"", work, render)
