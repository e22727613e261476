"""Which blobs are referred to, and the list of those that aren't: what the collector deletes from, and what publishing takes blobs off.

The order that keeps both safe: who is about to refer to a blob takes it off the list first (`keep`), then writes its bytes or looks
that they are there, then refers to it in a transaction. The collector deletes nothing that hasn't been on the list for
`LIMITS.gc_grace_s`, and looks for references again in the transaction in which it marks what it deletes next: what was taken off the
list is safe for longer than any publish takes. What is marked can't be taken off the list until its deletion has come to its end
(`loraserve.registry.storage_gc.deletion_locks`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from adapters_store.base import BlobStore
from loraserve.db.models import Adapter, AdapterVersion, GcCandidate, Tenant, Upload, UploadChunk
from loraserve.db.session import Database
from loraserve.db.upsert import upsert
from loraserve.errors import Overloaded
from loraserve.types import Digest

_AT_ONCE = 1000
"""Digests in a statement: an adapter's versions may have more than a database takes parameters."""
_PATIENCE_S, _LOOK_S = 8.0, 0.1
"""For so long, and so often, a collector is looked at that is deleting what somebody wants."""


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
    found: set[Digest] = set()
    for some in _parts(digests):
        queries = (
            select(AdapterVersion.config_blob).where(AdapterVersion.config_blob.in_(some), kept),
            select(AdapterVersion.weights_blob).where(AdapterVersion.weights_blob.in_(some), kept),
            select(Upload.sha256).where(Upload.sha256.in_(some), Upload.is_complete),
            select(UploadChunk.digest).where(UploadChunk.digest.in_(some)),
        )
        for query in queries:
            found.update(map(Digest, (await session.scalars(query.distinct())).all()))
    return found


async def published(session: AsyncSession, digests: Collection[Digest] | None) -> set[Digest]:
    """Return those of `digests` that versions have or had, deleted ones too; of None, one such blob if there is any."""
    found: set[Digest] = set()
    for column in (AdapterVersion.config_blob, AdapterVersion.weights_blob):
        if digests is None:
            return set(map(Digest, (await session.scalars(select(column).limit(1))).all()))
        for some in _parts(digests):
            found.update(map(Digest, (await session.scalars(select(column).where(column.in_(some)).distinct())).all()))
    return found


async def listed(session: AsyncSession, digests: Collection[Digest]) -> set[Digest]:
    """Return those of `digests` that an upload has, or that are on the list of what goes."""
    found: set[Digest] = set()
    for column in (Upload.sha256, UploadChunk.digest, GcCandidate.digest):
        for some in _parts(digests):
            found.update(map(Digest, (await session.scalars(select(column).where(column.in_(some)).distinct())).all()))
    return found


def _parts(digests: Iterable[Digest]) -> Iterator[list[Digest]]:
    """The digests, each once and always in the same order, as many at a time as a statement takes."""
    ordered = sorted(set(digests))
    for start in range(0, len(ordered), _AT_ONCE):
        yield ordered[start : start + _AT_ONCE]


def _is_kept(deleted_at: InstrumentedAttribute[datetime | None], since: datetime) -> ColumnElement[bool]:
    return or_(deleted_at.is_(None), deleted_at > since)


async def add_gc_candidates(session: AsyncSession, digests: Iterable[Digest], now: datetime) -> int:
    """The blobs are on the list, from `now` on if they weren't yet; returns how many weren't."""
    return await upsert(session, GcCandidate, [{"digest": one, "listed_at": now} for one in sorted(set(digests))])


async def retain(database: Database, digests: Collection[Digest]) -> None:
    """The blobs aren't on the list, and nobody is deleting them. Durable. A collector that is deleting one of them is waited for.

    Raises:
        Overloaded: one is still being deleted; the same request works later.
        DatabaseUnavailable
    """
    candidates: list[Digest] = []
    async with database.read() as session:
        for some in _parts(digests):
            query = select(GcCandidate.digest).where(GcCandidate.digest.in_(some))
            candidates += map(Digest, (await session.scalars(query)).all())
    if not candidates:
        return
    end = time.monotonic() + _PATIENCE_S
    # Once a collector has come to its end the blob is gone, and the caller finds out.
    while await _is_any_marked(database, candidates) or not await _take_off(database, candidates):
        if time.monotonic() >= end:
            # It says nothing of bytes that others had.
            raise Overloaded(
                "These bytes can't be stored or restored for now: the store is being tidied up.",
                hint="Send the same request again later; it takes minutes at most.",
                retry_after_s=10,
            )
        await asyncio.sleep(_LOOK_S)


async def _is_any_marked(database: Database, digests: Collection[Digest]) -> bool:
    """Looks without a lock: who waits must not keep SQLite's other writers waiting."""
    async with database.read() as session:
        for some in _parts(digests):
            query = select(GcCandidate.digest).where(GcCandidate.digest.in_(some), GcCandidate.deleting_at.is_not(None))
            if (await session.scalars(query.limit(1))).first() is not None:
                return True
    return False


async def _take_off(database: Database, digests: Collection[Digest]) -> bool:
    """Whether none of the blobs is on the list any more. False: one is being deleted, and all are as they were."""
    async with database.write() as session:
        for some in _parts(digests):
            listed = select(GcCandidate.deleting_at).where(GcCandidate.digest.in_(some)).order_by(GcCandidate.digest)
            if any((await session.scalars(listed.with_for_update())).all()):
                return False
        for some in _parts(digests):
            await session.execute(delete(GcCandidate).where(GcCandidate.digest.in_(some)))
    return True


async def retain_stored(database: Database, store: BlobStore, digests: Collection[Digest]) -> None:
    """As `keep`, and the blobs are there. To be called right before the transaction that refers to them.

    Raises:
        Overloaded: one was deleted meanwhile; the same request works when it is sent again.
        DatabaseUnavailable, StorageError
    """
    await retain(database, digests)
    for digest in digests:
        if not await asyncio.to_thread(store.exists, digest):
            raise Overloaded("The stored bytes were removed meanwhile.", hint="Send the same request again.")
