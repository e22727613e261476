"""Files of tenants: a row each, and a blob in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from adapters_store.base import BlobStore, StagedBlob
from loraserve import faults
from loraserve.background import BackgroundTask
from loraserve.batches.records import INPUT, FileRecord, Listing
from loraserve.db import audit
from loraserve.db.models import OBJECT_ID_LENGTH, FileRow
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import FileNotFound, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.blob_references import add_gc_candidates, retain
from loraserve.registry.quota import check_stored_bytes
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.uploads.concurrency_limiter import Sender
from loraserve.registry.uploads.transfers import Uploads
from loraserve.types import Digest, TenantId

logger = logging.getLogger(__name__)
_EXPIRED_AT_ONCE = 100


class StoredFiles:
    """Files of all tenants; each call acts for one.

    Args:
        uploads: slots, which files share with adapters' weights.
    """

    def __init__(self, database: Database, store: BlobStore, uploads: Uploads, *, clock: Clock = utc_now) -> None:
        self._database = database
        self._store = store
        self._uploads = uploads
        self._clock = clock
        self._task = BackgroundTask(
            "expired files",
            self.delete_expired,
            lambda: LIMITS.file_sweep_s,
            failure="expired files can't be deleted",
            logger=logger,
            level=logging.INFO,
        )

    def start(self) -> None:
        """Delete files whose time is over from now on, until `close`."""
        self._task.start()

    async def close(self) -> None:
        await self._task.close()

    @asynccontextmanager
    async def stage(
        self, tenant: TenantId, sender: Sender | None, *, expected_bytes: int | None = None
    ) -> AsyncIterator[StagedBlob]:
        """Hold an upload's slot and a blob to write to; it is discarded unless `add` commits it.

        Args:
            expected_bytes: bytes of the whole body, if they are known.

        Raises:
            QuotaExceeded: the tenant has as many files as it may, or may not store that many bytes.
            RateLimited, Overloaded: too many uploads are under way.
            StorageFull, StorageError
        """
        async with self._database.read() as session:
            await self._check_number(session, tenant, self._clock())
        staged = await self._uploads.stage(tenant, sender, expected_bytes=expected_bytes, is_adapter=False)
        try:
            yield staged
        finally:
            await self._uploads.release(tenant, staged)

    async def add(
        self, tenant: TenantId, staged: StagedBlob, filename: str, *, ttl_s: int | None, actor: str
    ) -> FileRecord:
        """Make the staged bytes a durable input file, and return it.

        Args:
            ttl_s: seconds for which it is kept; None: `LIMITS.batch_file_ttl_s`.

        Raises:
            QuotaExceeded: the tenant may not store that much, or that many files.
            StorageFull, StorageError, DatabaseUnavailable: nothing is stored.
        """
        digest, size = staged.digest, staged.num_bytes
        await retain(self._database, [digest])
        await asyncio.to_thread(staged.commit)
        faults.hit("file.after_commit")
        now = self._clock()
        ttl_s = LIMITS.batch_file_ttl_s if ttl_s is None else ttl_s
        async with self._database.write() as session:
            limits = (await AdapterRepository(session, tenant).lock_tenant()).limits
            await self._check_number(session, tenant, now)
            await check_stored_bytes(session, tenant, limits, size, now)
            row = insert_file(session, tenant, INPUT, filename, size, digest, ttl_s=ttl_s, actor=actor, now=now)
            audit.record(
                session,
                "file.create",
                row.id,
                actor=actor,
                tenant=tenant,
                at=now,
                detail={"size": size, "sha256": digest},
            )
        return FileRecord.of(row)

    async def get(self, tenant: TenantId, file_id: str) -> FileRecord:
        """Read the tenant's file.

        Raises:
            FileNotFound: it is absent, expired, or another tenant's; the text is the same.
        """
        async with self._database.read() as session:
            return FileRecord.of(await find_file(session, tenant, file_id, self._clock()))

    async def list(
        self, tenant: TenantId, *, purpose: str | None, limit: int, after: str | None, is_ascending: bool
    ) -> Listing[FileRecord]:
        """List some of the tenant's files in the order of their creation.

        Args:
            after: id of the last file of the page before.
        """
        query = select(FileRow).where(*_visible(tenant, self._clock()))
        if purpose is not None:
            query = query.where(FileRow.purpose == purpose)
        if after is not None:
            query = query.where(FileRow.id > after if is_ascending else FileRow.id < after)
        query = query.order_by(FileRow.id if is_ascending else FileRow.id.desc()).limit(limit + 1)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return Listing(tuple(map(FileRecord.of, rows[:limit])), len(rows) > limit)

    async def delete(self, tenant: TenantId, file_id: str, *, actor: str) -> None:
        """Delete the file. A batch made of it continues: it keeps the bytes until it ends.

        Raises:
            FileNotFound
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            row = await find_file(session, tenant, file_id, now, is_locking=True)
            await session.delete(row)
            await add_gc_candidates(session, [Digest(row.blob)], now)
            audit.record(session, "file.delete", row.id, actor=actor, tenant=tenant, at=now, detail={"size": row.size})

    async def delete_expired(self) -> int:
        """Delete the files of all tenants whose time is over, and return their number.

        Raises:
            DatabaseUnavailable
        """
        num_deleted = 0
        while True:
            now = self._clock()
            async with self._database.write(frees_space=True) as session:
                query = select(FileRow).where(FileRow.expires_at <= now).limit(_EXPIRED_AT_ONCE)
                rows = (await session.scalars(query.with_for_update(skip_locked=True))).all()
                await session.execute(delete(FileRow).where(FileRow.id.in_([row.id for row in rows])))
                await add_gc_candidates(session, [Digest(row.blob) for row in rows], now)
            num_deleted += len(rows)
            if len(rows) < _EXPIRED_AT_ONCE:
                return num_deleted

    async def _check_number(self, session: AsyncSession, tenant: TenantId, now: datetime) -> None:
        query = select(func.count()).select_from(FileRow).where(*_visible(tenant, now))
        found = await session.scalar(query) or 0
        if found >= LIMITS.max_files_per_tenant:
            raise QuotaExceeded(
                f"The tenant has {found} files; at most {LIMITS.max_files_per_tenant} are allowed.",
                hint="Delete some with DELETE /v1/files/ID.",
            )


def insert_file(
    session: AsyncSession,
    tenant: TenantId,
    purpose: str,
    filename: str,
    size: int,
    blob: Digest,
    *,
    ttl_s: int | None,
    actor: str,
    now: datetime,
) -> FileRow:
    """Insert the row of a file whose blob is durable, in the session's transaction."""
    row = FileRow(
        id=f"file-{ULID.from_datetime(now)}",
        tenant_id=tenant,
        purpose=purpose,
        filename=filename,
        size=size,
        blob=blob,
        created_at=now,
        created_by=actor,
        expires_at=None if ttl_s is None else now + timedelta(seconds=ttl_s),
    )
    session.add(row)
    return row


async def find_file(
    session: AsyncSession, tenant: TenantId, file_id: str, now: datetime, *, is_locking: bool = False
) -> FileRow:
    """Find the row of the tenant's file.

    Raises:
        FileNotFound
    """
    query = select(FileRow).where(FileRow.id == file_id, *_visible(tenant, now))
    row = None
    if is_object_id(file_id):
        row = (await session.scalars(query.with_for_update() if is_locking else query)).one_or_none()
    if row is None:
        raise FileNotFound("There is no such file.", hint="GET /v1/files lists the files.")
    return row


def is_object_id(text: str) -> bool:
    """Check whether `text` could be an id of ours: a database rejects none of them."""
    return len(text) <= OBJECT_ID_LENGTH and text.isascii() and text.isprintable()


def _visible(tenant: TenantId, now: datetime) -> tuple[ColumnElement[bool], ...]:
    return FileRow.tenant_id == tenant, (FileRow.expires_at.is_(None)) | (FileRow.expires_at > now)
