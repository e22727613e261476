"""Resumable uploads: a blob's bytes in pieces, over any number of connections, to any server.

The bytes become durable chunk by chunk, each chunk a blob of its own. Any replica can receive the
next piece, and a broken connection loses one chunk at most. The last piece assembles them into one
blob under the announced digest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from adapters_store.base import BlobStore, StagedBlob
from loraserve import faults
from loraserve.background import Throttle
from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import Upload, UploadChunk
from loraserve.db.session import Clock, Database
from loraserve.errors import (
    InvalidRequest,
    PayloadTooLarge,
    UploadDigestMismatch,
    UploadNotFound,
    UploadOffsetMismatch,
)
from loraserve.limits import KIB, LIMITS, MIB
from loraserve.registry.blob_references import add_gc_candidates, retain, retain_stored
from loraserve.registry.quota import check_upload_quota
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.uploads.chunks import StoredChunk, StoredWeights, assemble, chunks_of, remove_upload
from loraserve.registry.uploads.concurrency_limiter import ConcurrencyLimiter, Sender
from loraserve.types import Digest, TenantId

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = LIMITS.upload_chunk_bytes
_FLUSH_BYTES = 1 * MIB
_WORTH_KEEPING_BYTES = 64 * KIB
"""Minimum size of the chunk that is stored when a connection breaks."""


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """State of a resumable upload."""

    id: str
    sha256: Digest
    size: int
    received: int
    """Number of durable bytes; the next piece starts at this offset."""
    is_complete: bool
    expires_at: datetime


class ResumableUploads:
    """Announced uploads of all tenants.

    Args:
        slots: limiter that pieces and whole uploads share.
        throttle: pauses work while an engine computes on this machine's processors.
    """

    def __init__(
        self, database: Database, store: BlobStore, slots: ConcurrencyLimiter, *, clock: Clock, throttle: Throttle
    ) -> None:
        self._database = database
        self._store = store
        self._slots = slots
        self._clock = clock
        self._throttle = throttle

    async def create(
        self,
        tenant: TenantId,
        sha256: str,
        size: int,
        *,
        actor: str,
        once: Once[tuple[UploadRecord, bool]] | None = None,
    ) -> tuple[UploadRecord, bool]:
        """Announce an upload, or resume the one that the tenant began.

        Return it, and whether it is new. The bytes must be sent even if another tenant's are equal:
        the answer doesn't reveal what others hold.

        Raises:
            InvalidRequest: `sha256` or `size` isn't valid.
            PayloadTooLarge: `size` is over `LIMITS.max_upload_bytes`.
            QuotaExceeded: the tenant has `LIMITS.max_open_uploads_per_tenant`, or may not store as
                many bytes.
            Replay: `once` was used before.
        """
        if not _DIGEST.fullmatch(sha256):
            raise InvalidRequest("sha256 should be 64 lower-case hex digits.", param="sha256")
        if size < 1:
            raise InvalidRequest("size should be the number of bytes, at least 1.", param="size")
        if size > LIMITS.max_upload_bytes:
            raise PayloadTooLarge(f"size exceeds the limit of {LIMITS.max_upload_bytes} bytes.", param="size")
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            limits = (await AdapterRepository(session, tenant).lock_tenant()).limits
            row = await self._resume(session, tenant, sha256, size, now)
            is_new = row is None
            if row is None:
                await check_upload_quota(session, tenant, limits, size, now)
                row = Upload(
                    id=str(ULID.from_datetime(now)),
                    tenant_id=tenant,
                    sha256=sha256,
                    size=size,
                    received=0,
                    is_complete=False,
                    created_at=now,
                    expires_at=_expiry(now),
                )
                session.add(row)
                _record(session, "upload.create", row, actor, now)
            result = _to_record(row), is_new
            if once is not None:
                await once.finish(session, result)
        return result

    async def get(self, tenant: TenantId, upload_id: str) -> UploadRecord:
        """Read the tenant's upload.

        Raises:
            UploadNotFound: the upload is absent, expired, or another tenant's; the text is the
                same.
        """
        async with self._database.read() as session:
            return _to_record(await self._row(session, tenant, upload_id))

    async def finish(self, tenant: TenantId, upload_id: str) -> UploadRecord:
        """Complete the upload if every byte has arrived; return it.

        It is completed now if its server ended right after the last byte arrived.

        Raises:
            UploadNotFound
            UploadDigestMismatch, UploadOffsetMismatch, RateLimited, Overloaded, StorageFull,
                StorageError: as `receive`.
        """
        record = await self.get(tenant, upload_id)
        if record.received < record.size or record.is_complete:
            return record
        async with self._slots.slot(tenant):
            return await self._complete(tenant, record)

    async def delete(self, tenant: TenantId, upload_id: str, *, actor: str) -> None:
        """Delete the upload; its bytes are collected later.

        Raises:
            UploadNotFound
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            row = await self._row(session, tenant, upload_id, is_locking=True)
            _record(session, "upload.delete", row, actor, now)
            await remove_upload(session, row, now)

    async def receive(
        self,
        tenant: TenantId,
        upload_id: str,
        start: int,
        end: int,
        size: int,
        body: AsyncIterator[bytes],
        sender: Sender | None = None,
    ) -> UploadRecord:
        """Receive the bytes [start, end) of `size` durably.

        The last of them complete the blob. Return the upload.

        A piece that is stored already is read and dropped. If a piece ends early, the bytes that
        arrived are stored.

        Raises:
            UploadNotFound
            UploadOffsetMismatch: the piece doesn't start where the last one ended, or another one
                came at the same time.
            UploadDigestMismatch: the bytes hash to another digest; they are dropped, and the upload
                starts again.
            InvalidRequest: the range doesn't fit the upload, or the body's length doesn't fit the
                range.
            RateLimited, Overloaded: too many uploads are running.
            StorageFull, StorageError
        """
        found = await self.get(tenant, upload_id)
        if size != found.size:
            raise InvalidRequest(
                f"The upload has {found.size} bytes in all; the Content-Range has another size.", param="Content-Range"
            )
        async with self._slots.slot(tenant, sender):
            if start != found.received:
                if end > found.received:
                    raise _offset_mismatch(found.received)
                async for _ in body:
                    # stored already; read to its end, for the connection's next request
                    pass
            else:
                await self._receive_chunks(tenant, upload_id, start, end, body)
            record = await self.get(tenant, upload_id)
            if record.received == record.size and not record.is_complete:
                record = await self._complete(tenant, record)
        return record

    async def _receive_chunks(
        self, tenant: TenantId, upload_id: str, start: int, end: int, body: AsyncIterator[bytes]
    ) -> None:
        position = start
        pending = bytearray()
        broken: Exception | None = None
        pieces = aiter(body)
        staged = await asyncio.to_thread(self._store.stage)
        try:
            while True:
                try:
                    data = await anext(pieces, None)
                except Exception as error:
                    # The connection broke or the client is too slow: store what has arrived.
                    broken = error
                    break
                if data is None:
                    break
                if position + staged.num_bytes + len(pending) + len(data) > end:
                    raise InvalidRequest("The body is longer than its Content-Range.", param="Content-Range")
                pending += data
                if len(pending) >= _FLUSH_BYTES:
                    await self._throttle.run(partial(staged.write, pending))
                    pending = bytearray()
                if staged.num_bytes >= _CHUNK_BYTES:
                    position += await self._commit_chunk(tenant, upload_id, position, staged)
                    staged = await asyncio.to_thread(self._store.stage)
            await asyncio.to_thread(staged.write, pending)
            if staged.num_bytes and (broken is None or staged.num_bytes >= _WORTH_KEEPING_BYTES):
                position += await self._commit_chunk(tenant, upload_id, position, staged)
        finally:
            await asyncio.to_thread(staged.discard)
        if broken is not None:
            raise broken
        if position != end:
            raise InvalidRequest(
                "The body is shorter than its Content-Range; the bytes received are kept.", param="Content-Range"
            )

    async def _commit_chunk(self, tenant: TenantId, upload_id: str, start: int, staged: StagedBlob) -> int:
        """Store the staged bytes as the upload's next chunk, and return their number."""
        digest, size = staged.digest, staged.num_bytes
        await retain(self._database, [digest])
        await asyncio.to_thread(staged.commit)
        faults.hit("upload.after_chunk")
        now = self._clock()
        async with self._database.write() as session:
            row = await self._row(session, tenant, upload_id, is_locking=True)
            if row.received != start:
                raise _offset_mismatch(row.received)
            query = select(func.count()).select_from(UploadChunk).where(UploadChunk.upload_id == upload_id)
            if (await session.scalar(query) or 0) >= LIMITS.max_upload_chunks:
                raise InvalidRequest(
                    f"The upload came in {LIMITS.max_upload_chunks} pieces, the maximum.",
                    hint="Delete it, and send larger pieces.",
                )
            session.add(UploadChunk(upload_id=upload_id, start=start, size=size, digest=digest))
            row.received = start + size
            row.expires_at = _expiry(now)
        faults.hit("upload.after_chunk_commit")
        return size

    async def _complete(self, tenant: TenantId, upload: UploadRecord) -> UploadRecord:
        """Assemble the chunks into one durable blob, if they hash to the announced digest."""
        async with self._database.read() as session:
            chunks = await chunks_of(session, upload.id)
        await retain(self._database, [upload.sha256])
        broken: StoredChunk | None = None
        # a single chunk is the blob, which is in the store already
        is_right = len(chunks) == 1 and chunks[0].digest == upload.sha256
        if is_right and not await asyncio.to_thread(self._store.exists, upload.sha256):
            is_right, broken = False, chunks[0]
        if len(chunks) > 1:
            is_right, broken = await self._throttle.run_in_pieces(partial(assemble, self._store, chunks, upload.sha256))
        if is_right:
            await retain_stored(self._database, self._store, [upload.sha256])
        now = self._clock()
        async with self._database.write() as session:
            row = await self._row(session, tenant, upload.id, is_locking=True)
            if row.is_complete or row.received != upload.received or await chunks_of(session, upload.id) != chunks:
                # another request completed or restarted the upload: this result is about bytes that
                # are gone
                return _to_record(row)
            if is_right:
                row.is_complete = True
                row.expires_at = _expiry(now)
                _record(session, "upload.complete", row, "server", now)
            else:
                row.received = 0 if broken is None else broken.start
            gone = [chunk for chunk in chunks if chunk.start >= row.received or is_right]
            await session.execute(
                delete(UploadChunk).where(
                    UploadChunk.upload_id == upload.id, UploadChunk.start >= (0 if is_right else row.received)
                )
            )
            await add_gc_candidates(session, (chunk.digest for chunk in gone if chunk.digest != upload.sha256), now)
            record = _to_record(row)
        faults.hit("upload.after_complete")
        if broken is not None:
            raise _offset_mismatch(record.received)
        if not is_right:
            raise UploadDigestMismatch(
                "The uploaded bytes don't hash to the upload's sha256; they were discarded.",
                hint="Send them again from the first, or create another upload.",
            )
        return record

    async def stored(self, tenant: TenantId, sha256: str) -> StoredWeights:
        """Find the blob of the tenant's complete upload, as weights for `Publisher.publish`.

        Raises:
            UploadNotFound: the tenant has no complete upload of this blob.
        """
        query = select(Upload).where(
            Upload.tenant_id == tenant, Upload.sha256 == sha256, Upload.expires_at > self._clock()
        )
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all() if _DIGEST.fullmatch(sha256) else []
        row = next((row for row in rows if row.is_complete), None)
        if row is None:
            raise UploadNotFound(
                "There is no complete upload of this blob.",
                hint="Create one with POST /api/v1/uploads, and send its bytes.",
            )
        return StoredWeights(self._store, Digest(row.sha256), row.size)

    async def forget(self, tenant: TenantId, sha256: Digest) -> None:
        """Delete the tenant's complete uploads of a blob that is corrupt or gone.

        So it must be uploaded again.
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            query = select(Upload).where(Upload.tenant_id == tenant, Upload.sha256 == sha256).with_for_update()
            for row in (await session.scalars(query)).all():
                await remove_upload(session, row, now)

    async def _row(
        self, session: AsyncSession, tenant: TenantId, upload_id: str, *, is_locking: bool = False
    ) -> Upload:
        query = select(Upload).where(
            Upload.id == upload_id[:64], Upload.tenant_id == tenant, Upload.expires_at > self._clock()
        )
        # we never issued an id that a database would reject
        is_plain = upload_id.isascii() and upload_id.isalnum()
        found = await session.scalars(query.with_for_update() if is_locking else query) if is_plain else None
        row = None if found is None else found.one_or_none()
        if row is None:
            raise UploadNotFound("There is no such upload.", hint="Create one with POST /api/v1/uploads.")
        return row

    async def _resume(
        self, session: AsyncSession, tenant: TenantId, sha256: str, size: int, now: datetime
    ) -> Upload | None:
        query = (
            select(Upload)
            .where(Upload.tenant_id == tenant, Upload.sha256 == sha256, Upload.size == size, Upload.expires_at > now)
            .order_by(Upload.id.desc())
            .limit(1)
        )
        row = (await session.scalars(query)).one_or_none()
        if row is not None:
            row.expires_at = _expiry(now)
        return row


def _offset_mismatch(received: int) -> UploadOffsetMismatch:
    return UploadOffsetMismatch(
        f"The upload has {received} bytes; the next piece should begin at byte {received}.", received=received
    )


def _expiry(now: datetime) -> datetime:
    return now + timedelta(seconds=LIMITS.upload_ttl_s)


def _record(session: AsyncSession, action: str, row: Upload, actor: str, now: datetime) -> None:
    detail = {"sha256": row.sha256, "size": row.size}
    audit.record(session, action, row.id, actor=actor, tenant=TenantId(row.tenant_id), at=now, detail=detail)


def _to_record(row: Upload) -> UploadRecord:
    return UploadRecord(
        id=row.id,
        sha256=Digest(row.sha256),
        size=row.size,
        received=row.received,
        is_complete=row.is_complete,
        expires_at=row.expires_at,
    )
