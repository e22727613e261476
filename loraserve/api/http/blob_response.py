"""Send a stored blob: in pieces, verified while they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from loraserve.errors import BlobCorrupt, BlobNotFound, LoraserveError

if TYPE_CHECKING:
    from adapters_store.base import BlobStore
    from loraserve.registry.uploads.concurrency_limiter import ConcurrencyLimiter
    from loraserve.types import Digest, TenantId


async def blob_response(
    store: BlobStore,
    slots: ConcurrencyLimiter,
    tenant: TenantId,
    blob: Digest,
    *,
    headers: dict[str, str],
    media_type: str,
    damaged: Callable[[], LoraserveError],
) -> Response:
    """Build the response that sends the blob and holds one of the tenant's slots meanwhile.

    Bytes are verified while they are read: the last piece of a corrupt blob is never sent.

    Args:
        damaged: called when the blob is corrupt or gone; returns the error to answer with.

    Raises:
        RateLimited, Overloaded: too many downloads are under way.
        LoraserveError: what `damaged` returns.
    """
    slots.acquire(tenant)
    try:
        pieces, num_bytes = await asyncio.to_thread(lambda: (store.read_pieces(blob), store.num_bytes(blob)))
        first = await asyncio.to_thread(next, pieces, b"")
    except (BlobCorrupt, BlobNotFound) as error:
        slots.release(tenant)
        raise damaged() from error
    except BaseException:
        slots.release(tenant)
        raise
    return _Download(
        _stream(first, pieces, damaged),
        headers={**headers, "Content-Length": str(num_bytes)},
        media_type=media_type,
        on_end=lambda: slots.release(tenant),
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


async def _stream(first: bytes, pieces: Iterator[bytes], damaged: Callable[[], LoraserveError]) -> AsyncIterator[bytes]:
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
