"""Restoring of deleted adapters and versions while their bytes are retained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from adapters_store.base import BlobStore
from loraserve.db.idempotency import Once
from loraserve.db.models import AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import AlreadyExists, Conflict
from loraserve.registry.blob_references import retain
from loraserve.registry.changes import record_change
from loraserve.registry.quota import check_quota
from loraserve.registry.records import AdapterRecord, VersionRecord, blobs_of
from loraserve.registry.repository import AdapterRepository, instant_of
from loraserve.types import Digest, TenantId


class Restorer:
    """Restores deleted adapters and versions of all tenants.

    Args:
        on_change: called with tenant and adapter name after a restore is durable.
        retention_s: time after the deletion for which bytes are retained and a restore is possible.
        check_free: raises `Conflict` if the tenant has something else of an adapter's name.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        on_change: Callable[[TenantId, str], None],
        *,
        retention_s: float,
        clock: Clock,
        check_free: Callable[[TenantId, str], None] = lambda tenant, name: None,
    ) -> None:
        self._check_free = check_free
        self._database = database
        self._store = store
        self._on_change = on_change
        self.retention = timedelta(seconds=retention_s)
        """Time for which the bytes of deleted versions are retained, from the next use on."""
        self._clock = clock

    async def restore(
        self, tenant: TenantId, name: str, *, actor: str, once: Once[AdapterRecord] | None = None
    ) -> AdapterRecord:
        """Restore the adapter durably, with the versions that were deleted with it.

        Its aliases, notes and fallback come back too.

        Raises:
            AdapterNotFound: there was none, or the retention is over.
            AlreadyExists: the adapter isn't deleted.
            QuotaExceeded: the restore would exceed the tenant's quota.
            Conflict: stored bytes are gone, or the name is an ephemeral adapter's.
            Overloaded: stored bytes are being deleted; try again.
            Replay: `once` was used before.
        """
        now = self._clock()
        async with self._database.read() as session:
            if once is not None:
                await once.check(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.deleted_adapter(name, since=now - self.retention)
            name = adapter.name
            blobs = _blobs(await repository.versions_deleted_at(adapter, instant_of(adapter)))
        await self._retain(name, blobs)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            limits = (await repository.lock_tenant()).limits
            adapter = await repository.deleted_adapter(name, since=now - self.retention, is_locking=True)
            name = adapter.name
            self._check_free(tenant, name)
            rows = await repository.versions_deleted_at(adapter, instant_of(adapter))
            size_bytes = sum(row.size_bytes for row in rows)
            await check_quota(
                session, repository, limits, now, is_new_adapter=True, size_bytes=size_bytes, is_counted=False
            )
            await repository.restore_adapter(adapter, rows, now)
            record_change(session, repository, "adapter.restore", name, actor=actor, now=now, versions=len(rows))
            await session.flush()
            record = (await repository.adapter_records([adapter]))[0]
            if once is not None:
                await once.finish(session, record)
        self._on_change(tenant, name)
        return record

    async def restore_version(
        self, tenant: TenantId, name: str, number: int, *, actor: str, once: Once[VersionRecord] | None = None
    ) -> VersionRecord:
        """Restore a version of a live adapter durably, under its number and without aliases.

        Raises:
            AdapterNotFound
            VersionNotFound: there was none, or the retention is over.
            AlreadyExists: the version isn't deleted, or another version has the same bytes.
            QuotaExceeded: the restore would exceed the tenant's quota.
            Conflict: stored bytes are gone.
            Overloaded: stored bytes are being deleted; try again.
            Replay: `once` was used before.
        """
        now = self._clock()
        async with self._database.read() as session:
            if once is not None:
                await once.check(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            name = adapter.name
            row = await repository.deleted_version(adapter, number, since=now - self.retention)
            blobs = _blobs([row])
        await self._retain(f"{name}@{number}", blobs)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            limits = (await repository.lock_tenant()).limits
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            row = await repository.deleted_version(adapter, number, since=now - self.retention)
            same = await repository.version_of_digest(name, Digest(row.digest))
            if same is not None:
                raise AlreadyExists(
                    f"{name}@{same[1].number} has the same bytes as the deleted version {number}.",
                    hint=f"Use {name}@{same[1].number}.",
                )
            await check_quota(session, repository, limits, now, is_new_adapter=False, size_bytes=row.size_bytes)
            await repository.restore_version(adapter, row, now)
            target = f"{name}@{number}"
            record_change(session, repository, "version.restore", target, actor=actor, now=now, digest=row.digest)
            await session.flush()
            record = await repository.version_record(adapter, row)
            if once is not None:
                await once.finish(session, record)
        self._on_change(tenant, name)
        return record

    async def _retain(self, shown: str, blobs: Collection[Digest]) -> None:
        """Retain the blobs and check that they exist.

        Raises:
            Conflict: a blob is gone.
            Overloaded: a blob is being deleted.
        """
        if not blobs:
            return
        await retain(self._database, blobs)

        def has_all() -> bool:
            return all(self._store.exists(blob) for blob in blobs)

        if not await asyncio.to_thread(has_all):
            raise Conflict(f"{shown} can't be restored: its stored bytes are missing.", hint="Push its files again.")


def _blobs(rows: Sequence[AdapterVersion]) -> list[Digest]:
    return sorted({blob for row in rows for blob in blobs_of(row)})
