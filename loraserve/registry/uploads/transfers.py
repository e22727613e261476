"""Running uploads and downloads: their limits, and the staged bytes that wait to be published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from adapters_store.base import BlobStore
from loraserve.adapters.format.containers import CONTAINERS, Container
from loraserve.background import Throttle
from loraserve.db.session import Clock, Database
from loraserve.limits import LIMITS
from loraserve.registry.quota import room_bytes
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.uploads.concurrency_limiter import ConcurrencyLimiter, Sender
from loraserve.registry.uploads.resumable import ResumableUploads
from loraserve.registry.uploads.staging import BoundedBlob, StagingBudget, WeightsBeginning
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
        self._database, self._store, self._clock = database, store, clock
        self.throttle = throttle
        self.containers: tuple[Container, ...] = CONTAINERS
        """Formats of adapters that are read in addition to PEFT's safetensors."""
        self._staging = StagingBudget()
        self._slots = ConcurrencyLimiter(
            "uploads",
            max_in_all=LIMITS.max_concurrent_uploads,
            max_per_tenant=LIMITS.max_concurrent_uploads_per_tenant,
        )
        self._holding: dict[int, Sender | None] = {}
        """Senders of the uploads that hold a slot, by the identity of the staged blob."""
        self.downloads = ConcurrencyLimiter(
            "downloads",
            max_in_all=LIMITS.max_concurrent_downloads,
            max_per_tenant=LIMITS.max_concurrent_downloads_per_tenant,
        )
        """Slots for downloads."""
        self.resumable = ResumableUploads(database, store, self._slots, clock=clock, throttle=throttle)

    def shares(self) -> tuple[Shares, ...]:
        """List the shares of the upload and download slots, for metrics."""
        return self._slots.shares, self.downloads.shares, self._staging.shares

    async def stage(
        self,
        tenant: TenantId,
        sender: Sender | None = None,
        *,
        expected_bytes: int | None = None,
        is_adapter: bool = True,
        wait_s: float = 0.0,
    ) -> BoundedBlob:
        """Take a slot and stage a blob for an upload's weights, or for another file.

        Its bytes count against the tenant's quota as they come. The caller calls `release` after
        publishing or on failure.

        Args:
            sender: client that sends the bytes; None if they come from a pull's source.
            expected_bytes: bytes of the whole body, if they are known.
            is_adapter: whether the bytes are an adapter's weights, judged by their header.
            wait_s: seconds to wait for a slot, in place of a refusal.

        Raises:
            QuotaExceeded: the expected bytes are more than the tenant may store.
            RateLimited: the tenant has as many uploads as are free, or
                `LIMITS.max_concurrent_uploads_per_tenant`.
            Overloaded: `LIMITS.max_concurrent_uploads` are running.
            StorageFull: the disk is full.
        """
        await self._slots.acquire_or_displace(tenant, sender, wait_s=wait_s)
        try:
            async with self._database.read() as session:
                row = await AdapterRepository(session, tenant).tenant_row()
                room = await room_bytes(session, tenant, row.limits, self._clock(), is_adapter=is_adapter)
            self._staging.check(tenant, expected_bytes or 0, room)
            blob = await asyncio.to_thread(self._store.stage, is_looked_at=is_adapter)
            judge = WeightsBeginning(self.containers) if is_adapter else None
            staged = BoundedBlob(blob, self._staging, tenant, room, judge)
        except BaseException:
            self._slots.release(tenant, sender)
            raise
        self._holding[id(staged)] = sender
        return staged

    async def stage_converted(self, tenant: TenantId) -> BoundedBlob:
        """Stage a blob for what an upload is converted to, whose slot the caller holds.

        Its bytes count as the upload's own do, until it is discarded.

        Raises:
            StorageError: it can't be created.
        """
        async with self._database.read() as session:
            row = await AdapterRepository(session, tenant).tenant_row()
            room = await room_bytes(session, tenant, row.limits, self._clock(), is_adapter=True)
        blob = await asyncio.to_thread(self._store.stage, is_looked_at=True)
        return BoundedBlob(blob, self._staging, tenant, room, None)

    def end_arrival(self, tenant: TenantId, staged: BoundedBlob) -> None:
        """Release the slot that `stage` took, since no more bytes come; no-op if that was done.

        What follows, such as a certificate, has limits of its own.
        """
        if id(staged) in self._holding:
            self._slots.release(tenant, self._holding.pop(id(staged)))

    def slot(
        self, tenant: TenantId, sender: Sender | None = None, *, wait_s: float = 0.0
    ) -> AbstractAsyncContextManager[Callable[[], None]]:
        """Hold an upload's slot for bytes that occupy memory as an upload's do.

        The block gets a function that releases the slot before its end.

        Args:
            sender: client that sends them; None if they are here.
            wait_s: seconds to wait for one, in place of a refusal.

        Raises:
            RateLimited, Overloaded: as `stage`.
        """
        return self._slots.slot(tenant, sender, wait_s=wait_s)

    async def release(self, tenant: TenantId, staged: BoundedBlob) -> None:
        """Release the slot that `stage` took, and discard the blob if it isn't committed."""
        self.end_arrival(tenant, staged)
        await asyncio.to_thread(staged.discard)
