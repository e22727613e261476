"""/v1/files: inputs of batches, and what came of them."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.blob_response import blob_response
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.multipart import Form, ReadForm, multipart_boundary, read_form
from loraserve.api.management.uploads import declared_bytes, sender_of
from loraserve.api.services import services_of
from loraserve.batches.records import INPUT, FileRecord
from loraserve.contract.batch import DeletedFile, File
from loraserve.contract.result import IdPage
from loraserve.errors import BlobCorrupt, InvalidRequest
from loraserve.limits import KIB, LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_user = scopes.require(scopes.INFERENCE)

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FORM = Form(
    "file",
    LIMITS.max_batch_file_bytes,
    {"purpose": KIB, _ANCHOR: KIB, _SECONDS: KIB},
    ("file", "purpose"),
    "Send multipart/form-data with the parts file and purpose.",
)
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of what a file name may not have: controls, such as those that turn the
direction of writing, and what no reader can see.
"""
MAX_PAGE = 10_000


@router.post("/files")
async def create_file(request: Request, caller: Caller = Depends(_user)) -> File:
    """Store a batch's input: the parts ``file`` and ``purpose``, which is ``batch``.

    It is durable once this is answered.

    Raises:
        InvalidRequest: the form isn't one of these; `param` names the part.
        PayloadTooLarge: the file exceeds `LIMITS.max_batch_file_bytes`.
        QuotaExceeded: the tenant may not store more.
        StorageFull: the disk is full.
    """
    services = services_of(request)
    services.check_open()
    boundary = multipart_boundary(request, _FORM)
    async with services.files.stage(
        caller.tenant, sender_of(request), expected_bytes=declared_bytes(request)
    ) as staged:
        form = await read_form(request, boundary, _FORM, staged, services.registry.uploads.throttle)
        ttl_s = _read_fields(form)
        if not staged.num_bytes:
            raise InvalidRequest("The file is empty.", param="file")
        record = await services.files.add(
            caller.tenant, staged, _plain_name(form.filename), ttl_s=ttl_s, actor=caller.key_id
        )
    return _file(record)


@router.get("/files")
async def list_files(
    request: Request,
    caller: Caller = Depends(_user),
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> IdPage[File]:
    """List the tenant's files, the newest first."""
    check_query(request, "purpose", "limit", "order", "after")
    found = await services_of(request).files.list(
        caller.tenant, purpose=purpose, limit=limit, after=after, is_ascending=order == "asc"
    )
    data = [_file(record) for record in found.items]
    return IdPage[File](
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=found.has_more,
    )


@router.get("/files/{file_id}")
async def get_file(file_id: str, request: Request, caller: Caller = Depends(_user)) -> File:
    """Return what is known of the file."""
    return _file(await services_of(request).files.get(caller.tenant, file_id))


@router.delete("/files/{file_id}")
async def delete_file(file_id: str, request: Request, caller: Caller = Depends(_user)) -> DeletedFile:
    """Delete the file. A batch that was made of it goes on."""
    await services_of(request).files.delete(caller.tenant, file_id, actor=caller.key_id)
    return DeletedFile(id=file_id, object="file", deleted=True)


@router.get("/files/{file_id}/content", response_model=None)
async def get_file_content(file_id: str, request: Request, caller: Caller = Depends(_user)) -> Response:
    """Send the file's bytes, verified while they are read."""
    services = services_of(request)
    record = await services.files.get(caller.tenant, file_id)
    return await blob_response(
        services.store,
        services.registry.uploads.downloads,
        caller.tenant,
        record.blob,
        headers={"Content-Disposition": f'attachment; filename="{record.id}.jsonl"', "Cache-Control": "private"},
        media_type="application/jsonl",
        damaged=lambda: BlobCorrupt("The stored bytes of this file are damaged or missing.", hint="Upload it again."),
    )


def _file(record: FileRecord) -> File:
    return File(
        id=record.id,
        object="file",
        bytes=record.size,
        created_at=int(record.created_at.timestamp()),
        expires_at=None if record.expires_at is None else int(record.expires_at.timestamp()),
        filename=record.filename,
        purpose=record.purpose,
        status="processed",
    )


def _read_fields(form: ReadForm) -> int | None:
    """Return the seconds for which the file is kept, if the form says so.

    Raises:
        InvalidRequest: a part is wrong.
    """
    if form.short["purpose"] != INPUT.encode():
        raise InvalidRequest(f'purpose should be "{INPUT}".', param="purpose")
    anchor, seconds = form.short.get(_ANCHOR), form.short.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != b"created_at":
        raise InvalidRequest('expires_after.anchor should be "created_at".', param="expires_after.anchor")
    text = b"" if seconds is None else seconds
    return check_ttl(int(text) if text.isdigit() and len(text) <= 9 else -1, "expires_after.seconds")


def check_ttl(seconds: int, param: str) -> int:
    """Return `seconds` if files can be kept for so long.

    Raises:
        InvalidRequest
    """
    if not LIMITS.min_file_ttl_s <= seconds <= LIMITS.max_file_ttl_s:
        raise InvalidRequest(
            f"{param} should be a number of seconds from {LIMITS.min_file_ttl_s} to {LIMITS.max_file_ttl_s}.",
            param=param,
        )
    return seconds


def _plain_name(given: bytes) -> str:
    """Return the last part of the client's file name, in plain characters; it never is a path."""
    name = re.split(r"[/\\]", given.decode("utf-8", "replace"))[-1]
    name = "".join(letter for letter in name if letter != '"' and unicodedata.category(letter) not in _UNPRINTABLE)
    name = name.strip()[: LIMITS.max_file_name_length]
    return "file" if name in ("", ".", "..") else name
