"""Backup of a registry and its blobs, while its servers run.

Rows first, of one consistent state of the database; then the blobs that they refer to. A blob is
durable before the row that refers to it, so that all of them exist when the rows are read. What is
deleted meanwhile stays: the collector deletes a blob `LIMITS.gc_grace_s` after it finds it
unreferenced, at the earliest, and within that time the backup takes the collectors' lease and holds
it. The other order would miss the blobs that are published between the two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from adapters_store.base import BlobStore
from loraserve import __version__, faults
from loraserve.backups.blob_index import write_index
from loraserve.backups.copying import BlobCopies
from loraserve.backups.folder import BackupFolder
from loraserve.backups.manifest import BaseVersions, Manifest, TableRows
from loraserve.backups.table_rows import write_tables
from loraserve.db import audit, migrate
from loraserve.db.leases import LeaseHolder
from loraserve.db.models import BLOB_COLUMNS, Adapter, AdapterVersion, RegistryIdentity, Tenant
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import LoraserveError
from loraserve.registry.blob_references import all_referenced
from loraserve.registry.storage_gc.collector import LEASE
from loraserve.types import Digest

logger = logging.getLogger(__name__)

_LEASE_LENGTH, _RENEWAL_S = timedelta(seconds=120), 20.0
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Made:
    """Backup that was made."""

    manifest: Manifest
    num_copied: int
    """Blobs that the folder didn't have yet."""
    num_copied_bytes: int
    num_removed: int
    """Older backups that were removed."""
    damaged: list[str]
    """First versions of blobs that the store hasn't, or has with other bytes: TENANT/NAME@N."""


@dataclass(frozen=True, slots=True)
class _State:
    """State of the registry, as one read of the database found it."""

    registry: str | None
    tables: list[TableRows]
    blobs: set[Digest]
    bases: list[BaseVersions]


class Backup:
    """Makes one backup to a folder.

    Args:
        retention: time for which the blobs of deleted versions are kept, as the servers have it.
        keep: newest backups that are kept; None: all.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        folder: BackupFolder,
        *,
        retention: timedelta,
        keep: int | None = None,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._store = store
        self._folder = folder
        self._retention = retention
        self._keep = keep
        self._clock = clock

    async def make(self, *, actor: str) -> Made:
        """Make the backup.

        Blobs that are damaged in the store are listed, and don't end it.

        Raises:
            ConfigError: another backup to the folder is running.
            DatabaseUnavailable, StorageFull, StorageError: nothing but unused blobs is left in the
                folder, which the next backup takes over.
        """
        with self._folder.locked():
            self._folder.sweep()
            now = self._clock()
            backup = str(ULID.from_datetime(now))
            # in the backup too: a restored registry records what it was restored from
            async with self._database.write() as session:
                audit.record(session, "backup.create", backup, actor=actor, tenant=None, at=now)
            state = await self._read()
            faults.hit("backup.after_rows")
            copies = BlobCopies(self._store, self._folder.store)
            async with self._collection_held():
                await copies.copy(sorted(state.blobs))
            manifest = Manifest(
                id=backup,
                made_at=now.isoformat(timespec="seconds"),
                program=__version__,
                revision=migrate.head(),
                registry=state.registry,
                tables=state.tables,
                index=write_index(self._folder.store, copies.sizes, copies.damaged),
                num_blobs=len(state.blobs),
                num_bytes=sum(copies.sizes.values()),
                num_damaged=len(copies.damaged),
                bases=state.bases,
            )
            self._folder.add(manifest)
            num_removed = 0 if self._keep is None else self._folder.keep(self._keep)
            damaged = await self._versions_of(copies.damaged) if copies.damaged else []
        return Made(manifest, copies.num_copied, copies.num_copied_bytes, num_removed, damaged)

    async def _read(self) -> _State:
        # One transaction for all of it. It is open while rows are written to the folder: this
        # process has no other use for its connections.
        async with self._database.read() as session:
            registry = await session.scalar(select(RegistryIdentity.id))
            tables = await write_tables(session, self._folder.store)
            blobs = await all_referenced(session, self._clock(), self._retention)
            return _State(registry, tables, blobs, await _bases(session))

    @asynccontextmanager
    async def _collection_held(self) -> AsyncIterator[None]:
        """Hold the collectors' lease for the length of a with block."""
        lease = LeaseHolder(self._database, _LEASE_LENGTH, clock=self._clock)

        async def hold() -> None:
            while True:
                try:
                    # a collector that has it now ends its pass long before the grace does
                    await lease.acquire(LEASE)
                except LoraserveError as error:
                    logger.warning("the collectors' lease can't be had now: %s", error)
                await asyncio.sleep(_RENEWAL_S)

        holding = asyncio.create_task(hold())
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            try:
                await lease.release(LEASE)
            except LoraserveError as error:
                # it ends by itself
                logger.warning("the collectors' lease can't be given back now: %s", error)

    async def _versions_of(self, blobs: Collection[Digest]) -> list[str]:
        """List some of the versions that have these blobs."""
        some = sorted(blobs)[:1000]
        query = (
            select(Tenant.name, Adapter.name, AdapterVersion.number)
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .join(Tenant, Tenant.id == Adapter.tenant_id)
            .where(or_(*(column.in_(some) for column in BLOB_COLUMNS)))
            .order_by(Tenant.name, Adapter.name, AdapterVersion.number)
            .limit(_MAX_NAMED)
        )
        async with self._database.read() as session:
            return _named((await session.execute(query)).all())


def _named(rows: Iterable[tuple[str, str, int]]) -> list[str]:
    return [f"{tenant}/{name}@{number}" for tenant, name, number in rows]


async def _bases(session: AsyncSession) -> list[BaseVersions]:
    query = (
        select(AdapterVersion.base_digest, func.count())
        .where(AdapterVersion.deleted_at.is_(None))
        .group_by(AdapterVersion.base_digest)
        .order_by(AdapterVersion.base_digest)
    )
    return [BaseVersions(digest, count) for digest, count in (await session.execute(query)).all()]
