"""Which blobs are referred to, and the list of those that aren't: what the collector deletes from, and what publishing takes blobs off.

The order that keeps both safe: who is about to refer to a blob takes it off the list first (`keep`), then writes its bytes or looks
that they are there, then refers to it in a transaction. The collector deletes nothing that hasn't been on the list for
`LIMITS.gc_grace_s`, and looks for references again in the transaction in which it deletes: what was taken off the list is safe for
longer than any publish takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from adapters_store.base import BlobStore
from loraserve.db.models import Adapter, AdapterVersion, DoomedBlob, Tenant, Upload, UploadChunk
from loraserve.db.session import Database
from loraserve.errors import Overloaded
from loraserve.types import Digest


async def referenced(
    session: AsyncSession, digests: Collection[Digest], now: datetime, retention: timedelta
) -> set[Digest]:
    """Those of `digests` that something needs: a version that is live or may be restored, a complete upload, a piece of one.

    Of a tenant that is deleted nothing is needed any more, once the retention is over.
    """
    since = now - retention
    tenant = select(Tenant.id).join(Adapter, Adapter.tenant_id == Tenant.id)
    tenant = tenant.where(Adapter.id == AdapterVersion.adapter_id, _is_kept(Tenant.deleted_at, since))
    kept = _is_kept(AdapterVersion.deleted_at, since) & tenant.exists()
    queries = (
        select(AdapterVersion.config_blob).where(AdapterVersion.config_blob.in_(digests), kept),
        select(AdapterVersion.weights_blob).where(AdapterVersion.weights_blob.in_(digests), kept),
        select(Upload.sha256).where(Upload.sha256.in_(digests), Upload.is_complete),
        select(UploadChunk.digest).where(UploadChunk.digest.in_(digests)),
    )
    found: set[Digest] = set()
    for query in queries:
        found.update(map(Digest, (await session.scalars(query.distinct())).all()))
    return found


def _is_kept(deleted_at: InstrumentedAttribute[datetime | None], since: datetime) -> ColumnElement[bool]:
    return or_(deleted_at.is_(None), deleted_at > since)


async def doom(session: AsyncSession, digests: Iterable[Digest], now: datetime) -> int:
    """The blobs are on the list, from `now` on if they weren't yet; returns how many weren't."""
    rows = [{"digest": digest, "doomed_at": now} for digest in sorted(set(digests))]
    if not rows:
        return 0
    insert: Any = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    added = await session.execute(insert(DoomedBlob).values(rows).on_conflict_do_nothing().returning(DoomedBlob.digest))
    return len(added.all())


async def keep(database: Database, digests: Collection[Digest]) -> None:
    """The blobs aren't on the list, and nobody is deleting them. Durable.

    Raises:
        DatabaseUnavailable
    """
    async with database.read() as session:
        if (await session.scalar(select(DoomedBlob.digest).where(DoomedBlob.digest.in_(digests)).limit(1))) is None:
            return
    async with database.write() as session:
        # Waits for a collector that is deleting one of them: afterwards it is gone, and the caller finds out.
        await session.execute(delete(DoomedBlob).where(DoomedBlob.digest.in_(digests)))


async def keep_stored(database: Database, store: BlobStore, digests: Collection[Digest]) -> None:
    """As `keep`, and the blobs are there. To be called right before the transaction that refers to them.

    Raises:
        Overloaded: one was deleted meanwhile; the same request works when it is sent again.
        DatabaseUnavailable, StorageError
    """
    await keep(database, digests)
    for digest in digests:
        if not await asyncio.to_thread(store.exists, digest):
            raise Overloaded("The stored bytes were removed meanwhile.", hint="Send the same request again.")
