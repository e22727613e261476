"""Uploads on their way in and downloads on their way out: how many are under way, and where bytes wait for their publish."""

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
    """Every tenant's uploads, until `Publisher` takes their bytes.

    `resumable` are those that come in pieces; complete, their blobs are published as staged ones are.

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
        """Paces of the uploads under way, by the identity of what is staged."""
        self.downloads = ConcurrencyLimiter(
            "downloads",
            max_in_all=LIMITS.max_concurrent_downloads,
            max_per_tenant=LIMITS.max_concurrent_downloads_per_tenant,
        )
        """Files on their way out."""
        self.resumable = ResumableUploads(database, store, self._slots, clock=clock, throttle=throttle)

    def shares(self) -> tuple[Shares, ...]:
        """Return how the places are divided, for metrics."""
        return self._slots.shares, self.downloads.shares

    async def stage(self, tenant: TenantId, sender: Sender | None = None) -> StagedBlob:
        """A place for an upload's weights; `Publisher.publish` takes it, or the caller discards it (`release`).

        Args:
            sender: of the bytes that come; None: they come from a source of the operator's.

        Raises:
            RateLimited: the tenant has as many as are free, or `LIMITS.max_concurrent_uploads_per_tenant`.
            Overloaded: `LIMITS.max_concurrent_uploads` are under way.
            StorageFull: no room.
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

    def slot(self, tenant: TenantId) -> AbstractAsyncContextManager[None]:
        """An upload's place, for what publishes bytes that are in the store already: it holds them in memory too.

        Raises:
            RateLimited, Overloaded: as `stage`.
        """
        return self._slots.slot(tenant)

    async def release(self, tenant: TenantId, staged: StagedBlob) -> None:
        """Ends what `stage` began: what isn't committed is removed."""
        self._slots.release(tenant, self._senders.pop(id(staged), None))
        await asyncio.to_thread(staged.discard)
