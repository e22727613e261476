"""Running uploads and downloads: their limits, and the staged bytes that wait to be published."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from adapters_store.base import BlobStore, StagedBlob
from loraserve.background import Throttle
from loraserve.db.session import Clock, Database
from loraserve.limits import LIMITS
from loraserve.registry.uploads.concurrency_limiter import ConcurrencyLimiter, Sender
from loraserve.registry.uploads.resumable import ResumableUploads
from loraserve.tenancy.limits.shares import Shares
from loraserve.types import TenantId


class Uploads:
    """Uploads and downloads of all tenants.

    `resumable` are the uploads that arrive in pieces. Completed, their blobs are published as
    staged ones are.

    Args:
        throttle: pauses work while an engine computes on this machine's processors.
    """

    def __init__(self, database: Database, store: BlobStore, *, clock: Clock, throttle: Throttle) -> None:
        self._store = store
        self.throttle = throttle
        self._slots = ConcurrencyLimiter(
            "uploads",
            max_in_all=LIMITS.max_concurrent_uploads,
            max_per_tenant=LIMITS.max_concurrent_uploads_per_tenant,
        )
        self._senders: dict[int, Sender] = {}
        """Senders of the running uploads, by the identity of the staged blob."""
        self.downloads = ConcurrencyLimiter(
            "downloads",
            max_in_all=LIMITS.max_concurrent_downloads,
            max_per_tenant=LIMITS.max_concurrent_downloads_per_tenant,
        )
        """Slots for downloads."""
        self.resumable = ResumableUploads(database, store, self._slots, clock=clock, throttle=throttle)

    def shares(self) -> tuple[Shares, ...]:
        """Return the shares of the upload and download slots, for metrics."""
        return self._slots.shares, self.downloads.shares

    async def stage(self, tenant: TenantId, sender: Sender | None = None) -> StagedBlob:
        """Take a slot and stage a blob for an upload's weights.

        The caller calls `release` after publishing or on failure.

        Args:
            sender: client that sends the bytes; None if they come from a pull's source.

        Raises:
            RateLimited: the tenant has as many uploads as are free, or
                `LIMITS.max_concurrent_uploads_per_tenant`.
            Overloaded: `LIMITS.max_concurrent_uploads` are running.
            StorageFull: the disk is full.
        """
        await self._slots.acquire_or_displace(tenant, sender)
        try:
            staged = await asyncio.to_thread(self._store.stage, is_looked_at=True)
        except BaseException:
            self._slots.release(tenant, sender)
            raise
        if sender is not None:
            self._senders[id(staged)] = sender
        return staged

    def slot(self, tenant: TenantId, sender: Sender | None = None) -> AbstractAsyncContextManager[None]:
        """Hold an upload's slot for bytes that occupy memory as an upload's do.

        Args:
            sender: client that sends them; None if they are here.

        Raises:
            RateLimited, Overloaded: as `stage`.
        """
        return self._slots.slot(tenant, sender)

    async def release(self, tenant: TenantId, staged: StagedBlob) -> None:
        """Release the slot that `stage` took, and discard the blob if it isn't committed."""
        self._slots.release(tenant, self._senders.pop(id(staged), None))
        await asyncio.to_thread(staged.discard)
