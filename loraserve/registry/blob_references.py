"""References to blobs, and the list of unreferenced blobs: the candidates for garbage collection.

Publishing first removes a blob from the candidates (`retain`), then writes its bytes or checks that
they exist, then refers to it in a transaction. The collector deletes only blobs that have been
candidates for `LIMITS.gc_grace_s`, and looks for references again in the transaction that locks
them for deletion. So a retained blob is safe for longer than any publish takes. A locked blob can't
be retained until its deletion has ended (`loraserve.registry.storage_gc.deletion_locks`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Select, String, bindparam, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from adapters_store.base import BlobStore
from loraserve.db.models import (
    BLOB_COLUMNS,
    Adapter,
    AdapterVersion,
    BatchChunk,
    BatchRow,
    FileRow,
    GcCandidate,
    Tenant,
    Upload,
    UploadChunk,
)
from loraserve.db.session import Database
from loraserve.db.upsert import upsert
from loraserve.errors import Overloaded
from loraserve.types import Digest

ENDED_BATCH_STATES = ("completed", "failed", "expired", "cancelled")
"""States of batches that keep no blob but their files'."""
_AT_ONCE = 1000
"""Digests in one statement; databases bound the number of parameters."""
_PATIENCE_S, _LOOK_S = 8.0, 0.1
"""Timeout and polling interval, in seconds,
when waiting for a concurrent deletion of the same blob.
"""


async def referenced(
    session: AsyncSession, digests: Collection[Digest], now: datetime, retention: timedelta
) -> set[Digest]:
    """Find the digests that are in use.

    A live or restorable version uses them, a complete upload, or a chunk of one; or a file, or a
    batch that hasn't ended: its input, and its results so far. Nothing of a deleted tenant is in
    use once the retention is over.
    """
    found: set[Digest] = set()
    for some in _parts(digests):
        for column, query in _references(now, retention):
            found.update(await _those_in(session, some, column, query))
    return found


async def all_referenced(session: AsyncSession, now: datetime, retention: timedelta) -> set[Digest]:
    """Find all digests that are in use, as `referenced` means it."""
    found: set[Digest] = set()
    for _, query in _references(now, retention):
        found.update(await _digests(session, query))
    return found


def _references(now: datetime, retention: timedelta) -> Iterator[tuple[InstrumentedAttribute[Any], Select[Any]]]:
    """Yield each column that refers to blobs, with the query of those in use."""
    since = now - retention
    kept = _is_kept(AdapterVersion.deleted_at, since) & _is_kept(Tenant.deleted_at, since)
    of_files = select(Tenant.id).where(Tenant.id == FileRow.tenant_id, _is_kept(Tenant.deleted_at, since)).exists()
    of_batches = select(Tenant.id).where(Tenant.id == BatchRow.tenant_id, _is_kept(Tenant.deleted_at, since)).exists()
    for column in BLOB_COLUMNS:
        versions = select(column).join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        yield column, versions.join(Tenant, Tenant.id == Adapter.tenant_id).where(kept)
    yield Upload.sha256, select(Upload.sha256).where(Upload.is_complete)
    yield UploadChunk.digest, select(UploadChunk.digest)
    yield FileRow.blob, select(FileRow.blob).where(of_files)
    has_ended = BatchRow.state.in_(ENDED_BATCH_STATES)
    yield BatchRow.input_blob, select(BatchRow.input_blob).where(~has_ended, of_batches)
    yield BatchChunk.digest, select(BatchChunk.digest)


async def _those_in(
    session: AsyncSession, digests: Sequence[Digest], column: InstrumentedAttribute[Any], query: Select[Any]
) -> set[Digest]:
    """Find those of the digests for which the query has a row with that column."""
    if not any(column is one for one in BLOB_COLUMNS):
        return await _digests(session, query.where(column.in_(digests)))
    # One row of each digest is looked for, in the index's order. A million versions may share one
    # config: a condition that the column is one of the digests reads all their rows; and where many
    # share one, PostgreSQL expects it of all, and reads the whole table even for unknown digests.
    # One parameter: to compile a statement with hundreds takes longer than to run it.
    if session.get_bind().dialect.name == "sqlite":
        wanted = func.json_each(bindparam("wanted", json.dumps(digests))).table_valued("value", name="wanted")
    else:
        array = bindparam("wanted", digests, ARRAY(String))
        wanted = func.unnest(array).table_valued("value", name="wanted").render_derived()
    found = query.where(column >= wanted.c.value, column <= wanted.c.value).order_by(column).limit(1)
    having = select(wanted.c.value).where(found.scalar_subquery().is_not(None))
    return set(map(Digest, (await session.scalars(having)).all()))


async def _digests(session: AsyncSession, query: Select[Any]) -> set[Digest]:
    return {Digest(one) for one in (await session.scalars(query.distinct())).all() if one}


async def published(session: AsyncSession, digests: Collection[Digest] | None) -> set[Digest]:
    """Find the digests that any version has, deleted or not.

    With None, return one such digest if there is any.
    """
    found: set[Digest] = set()
    if digests is None:
        return set(map(Digest, (await session.scalars(select(AdapterVersion.config_blob).limit(1))).all()))
    for column in BLOB_COLUMNS:
        for some in _parts(digests):
            found.update(await _those_in(session, some, column, select(column)))
    return found


async def listed(session: AsyncSession, digests: Collection[Digest]) -> set[Digest]:
    """Find the digests of uploads, files and batches, and of candidates for collection."""
    found: set[Digest] = set()
    columns = (Upload.sha256, UploadChunk.digest, FileRow.blob, BatchRow.input_blob, BatchChunk.digest)
    for column in (*columns, GcCandidate.digest):
        for some in _parts(digests):
            found.update(await _those_in(session, some, column, select(column)))
    return found


def _parts(digests: Iterable[Digest]) -> Iterator[list[Digest]]:
    """Split the digests into batches for one statement each; sorted and without duplicates."""
    ordered = sorted(set(digests))
    for start in range(0, len(ordered), _AT_ONCE):
        yield ordered[start : start + _AT_ONCE]


def _is_kept(deleted_at: InstrumentedAttribute[datetime | None], since: datetime) -> ColumnElement[bool]:
    return or_(deleted_at.is_(None), deleted_at > since)


async def add_gc_candidates(session: AsyncSession, digests: Iterable[Digest], now: datetime) -> int:
    """Add the blobs to the candidates for collection, and return how many are new."""
    return await upsert(session, GcCandidate, [{"digest": one, "listed_at": now} for one in sorted(set(digests))])


async def retain(database: Database, digests: Collection[Digest]) -> None:
    """Remove the blobs durably from the candidates for collection.

    A collector that deletes one of them is waited for first.

    Raises:
        Overloaded: a blob is still being deleted; the same request works later.
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
    # After the deletion the blob is gone, and the caller finds out.
    while await _is_any_locked(database, candidates) or not await _take_off(database, candidates):
        if time.monotonic() >= end:
            # The message doesn't reveal that other tenants had these bytes.
            raise Overloaded(
                "These bytes can't be stored or restored now: the store's garbage is being collected.",
                hint="Send the same request again later; collection takes minutes at most.",
                retry_after_s=10,
            )
        await asyncio.sleep(_LOOK_S)


async def _is_any_locked(database: Database, digests: Collection[Digest]) -> bool:
    """Check whether a blob is being deleted.

    This reads without a lock, so that polling doesn't block SQLite's writers.
    """
    async with database.read() as session:
        for some in _parts(digests):
            query = select(GcCandidate.digest).where(GcCandidate.digest.in_(some), GcCandidate.deleting_at.is_not(None))
            if (await session.scalars(query.limit(1))).first() is not None:
                return True
    return False


async def _take_off(database: Database, digests: Collection[Digest]) -> bool:
    """Remove the blobs from the candidates and return True.

    Return False, changing nothing, if one is being deleted.
    """
    async with database.write() as session:
        for some in _parts(digests):
            listed = select(GcCandidate.deleting_at).where(GcCandidate.digest.in_(some)).order_by(GcCandidate.digest)
            if any((await session.scalars(listed.with_for_update())).all()):
                return False
        for some in _parts(digests):
            await session.execute(delete(GcCandidate).where(GcCandidate.digest.in_(some)))
    return True


async def retain_stored(database: Database, store: BlobStore, digests: Collection[Digest]) -> None:
    """Retain the blobs as `retain` does, and check that they exist.

    Call it right before the transaction that refers to them.

    Raises:
        Overloaded: a blob was deleted meanwhile; the same request works when it is sent again.
        DatabaseUnavailable, StorageError
    """
    await retain(database, digests)
    for digest in digests:
        if not await asyncio.to_thread(store.exists, digest):
            raise Overloaded(
                "The stored bytes were removed while the request ran.", hint="Send the same request again."
            )
