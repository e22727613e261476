"""A version's files, as they were uploaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from loraserve.api import scopes
from loraserve.api.management.payloads.responses import header_list, names_etag
from loraserve.api.services import services_of
from loraserve.errors import AdapterCorrupt, BlobCorrupt, BlobNotFound, NotFound
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix="/adapters")

_reader = scopes.require(scopes.ADAPTERS_READ)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MEDIA_TYPES = {CONFIG: "application/json", WEIGHTS: "application/octet-stream"}


@router.get("/{name}/versions/{number}/files/{file}", response_model=None)
async def download_file(
    name: str, number: int, file: str, request: Request, caller: Caller = Depends(_reader)
) -> Response:
    """Send the file's bytes; its ETag is their SHA-256.

    Bytes are verified while they are read: the last piece of a corrupt file is never sent.
    """
    services = services_of(request)
    slots = services.registry.uploads.downloads
    version = await services.registry.get_version(caller.tenant, name, number)
    if file not in _MEDIA_TYPES:
        raise NotFound("A version has no file of this name.", hint=f"Its files are {CONFIG} and {WEIGHTS}.")
    blob = version.config_blob if file == CONFIG else version.weights_blob
    etag = f'"{blob}"'
    if names_etag(header_list(request, "if-none-match") or "", etag):
        return Response(status_code=304, headers={"ETag": etag})

    def damaged() -> AdapterCorrupt:
        services.registry.corruption.report(version.digest, blob)
        return AdapterCorrupt(
            "The stored bytes of this adapter version are damaged or missing.",
            digest=version.digest,
            blob=blob,
            hint="Push the same files again.",
        )

    slots.acquire(caller.tenant)
    try:
        pieces, num_bytes = await asyncio.to_thread(
            lambda: (services.store.read_pieces(blob), services.store.num_bytes(blob))
        )
        first = await asyncio.to_thread(next, pieces, b"")
    except (BlobCorrupt, BlobNotFound) as error:
        slots.release(caller.tenant)
        raise damaged() from error
    except BaseException:
        slots.release(caller.tenant)
        raise
    headers = {
        "ETag": etag,
        "Content-Length": str(num_bytes),
        "Content-Disposition": f'attachment; filename="{file}"',
        "Cache-Control": "private",
    }
    return _Download(
        _stream(first, pieces, damaged),
        headers=headers,
        media_type=_MEDIA_TYPES[file],
        on_end=lambda: slots.release(caller.tenant),
    )


class _CutShort(Exception):
    """An answer under way can't be ended well; no handler may try to answer instead."""


class _Download(StreamingResponse):
    """Calls `on_end` once, however the answer ends: its generator may never be started."""

    def __init__(
        self, content: AsyncIterator[bytes], *, headers: dict[str, str], media_type: str, on_end: Callable[[], None]
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _stream(first: bytes, pieces: Iterator[bytes], damaged: Callable[[], AdapterCorrupt]) -> AsyncIterator[bytes]:
    """Give the bytes.

    Corrupt bytes break the response off, so that no client takes it for the file.
    """
    piece = first
    while piece:
        yield piece
        try:
            piece = await asyncio.to_thread(next, pieces, b"")
        except (BlobCorrupt, BlobNotFound) as error:
            raise _CutShort(str(damaged())) from error
