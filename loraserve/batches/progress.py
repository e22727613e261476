"""Progress of a batch: its states, its results chunk by chunk, and its files at the end.

Every step is one transaction that finds the batch as this runner last read it, or else leaves it to
the runner that was faster. A chunk of results, the lines that it is about and their usage are
recorded together: a line is done and billed once, or computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapters_store.base import BlobStore, StagedBlob
from loraserve import faults
from loraserve.batches.batches import move
from loraserve.batches.records import (
    ENDED_STATES,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT,
    VALIDATING,
    BatchError,
    BatchRecord,
)
from loraserve.batches.stored_files import insert_file
from loraserve.db import audit
from loraserve.db.models import BatchChunk, BatchRow, Tenant
from loraserve.db.session import Clock, Database
from loraserve.errors import LoraserveError, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.blob_references import add_gc_candidates, retain
from loraserve.registry.quota import check_stored_bytes
from loraserve.tenancy.billing.journal import Totals, add_to
from loraserve.tenancy.billing.usage_hours import bill
from loraserve.types import Digest

_PREFIX = {True: "output", False: "errors"}


class TakenOver(LoraserveError):
    """Another server continues the batch, or it has ended: this one's work on it is void."""

    code = "batch_taken_over"


@dataclass(slots=True)
class Results:
    """Results that aren't durable yet, in the form of a chunk."""

    parts: list[bytes] = field(default_factory=list, repr=False)
    lines: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: Totals = field(default_factory=dict)

    def add(self, number: int, part: bytes, usage: Totals, *, is_completed: bool) -> None:
        self.parts.append(part)
        self.lines.append(number)
        self.num_bytes += len(part)
        self.num_completed += is_completed
        self.num_failed += not is_completed
        add_to(self.usage, usage.items())


class BatchProgress:
    """Progress of one batch on this server."""

    def __init__(self, database: Database, store: BlobStore, batch: BatchRecord, *, clock: Clock) -> None:
        self.batch = batch
        """The batch as it is known to be."""
        self._database = database
        self._store = store
        self._clock = clock

    async def refresh(self) -> BatchRecord:
        """Read the batch again: it may be cancelled.

        Raises:
            TakenOver, DatabaseUnavailable
        """
        async with self._database.read() as session:
            row = await session.get(BatchRow, self.batch.id)
        if row is not None and row.num_chunks != self.batch.num_chunks:
            raise _taken_over()
        return self._note(row)

    async def is_tenant_deleted(self) -> bool:
        async with self._database.read() as session:
            row = await session.get(Tenant, self.batch.tenant)
        return row is None or row.deleted_at is not None

    async def done_lines(self) -> list[int]:
        """List the numbers of the lines whose results are durable."""
        query = select(BatchChunk.lines).where(BatchChunk.batch_id == self.batch.id)
        async with self._database.read() as session:
            return [number for lines in (await session.scalars(query)).all() for number in lines]

    async def chunks(self) -> list[Digest]:
        """List the blobs of its results in the order in which they came."""
        query = select(BatchChunk.digest).where(BatchChunk.batch_id == self.batch.id).order_by(BatchChunk.sequence)
        async with self._database.read() as session:
            return list(map(Digest, (await session.scalars(query)).all()))

    async def begin(self, num_lines: int) -> None:
        """Note that the input is valid.

        Raises:
            TakenOver, DatabaseUnavailable
        """
        async with self._database.write() as session:
            row = await self._lock(session)
            row.num_lines = num_lines
            if row.state == VALIDATING:
                move(row, IN_PROGRESS, self._clock())
        self._note(row)

    async def finalize(self) -> None:
        """Note that no more lines are computed; a batch that is being cancelled stays so."""
        async with self._database.write() as session:
            row = await self._lock(session)
            if row.state == IN_PROGRESS:
                move(row, FINALIZING, self._clock())
        self._note(row)

    async def fail(self, errors: Sequence[BatchError]) -> None:
        """End the batch without files.

        Raises:
            TakenOver, DatabaseUnavailable
        """
        await self._end(FAILED, {}, errors=errors)

    async def commit(self, results: Results) -> None:
        """Make the results durable, mark their lines as done and bill them, or do none of it.

        It may be repeated with the same results after any error.

        Raises:
            TakenOver: the results are void.
            QuotaExceeded: the tenant may not store that much, or a batch has too many results.
            DatabaseUnavailable: it may be recorded, or not.
            StorageFull, StorageError: nothing is recorded.
        """
        staged = await asyncio.to_thread(self._write, results.parts)
        digest = staged.digest
        try:
            if await self._has_recorded(digest):
                return
            await retain(self._database, [digest])
            await asyncio.to_thread(staged.commit)
        finally:
            await asyncio.to_thread(staged.discard)
        faults.hit("batch.after_chunk")
        async with self._database.write() as session:
            row = await self._lock(session)
            await self._check_quota(session, results.num_bytes)
            session.add(
                BatchChunk(
                    batch_id=row.id,
                    sequence=row.num_chunks,
                    digest=digest,
                    size=results.num_bytes,
                    lines=results.lines,
                )
            )
            row.num_chunks += 1
            row.num_completed += results.num_completed
            row.num_failed += results.num_failed
            row.usage = _added(row.usage, results.usage)
            await bill(session, results.usage)
        faults.hit("batch.after_chunk_commit")
        self._note(row)

    async def end(
        self, state: str, files: dict[bool, StagedBlob], num_undone: int, errors: Sequence[BatchError] = ()
    ) -> None:
        """End the batch with its files: what is done, and what isn't.

        Args:
            files: staged output file (True) and error file (False); an empty one isn't made.
            num_undone: lines that weren't computed, which count as failed.

        Raises:
            TakenOver: they are void.
            StorageFull, StorageError, DatabaseUnavailable
        """
        made: dict[bool, tuple[Digest, int]] = {}
        for kind, staged in files.items():
            if staged.num_bytes:
                made[kind] = staged.digest, staged.num_bytes
                await retain(self._database, [staged.digest])
                await asyncio.to_thread(staged.commit)
        faults.hit("batch.before_end")
        await self._end(state, made, num_undone=num_undone, errors=errors)

    async def _end(
        self,
        state: str,
        made: dict[bool, tuple[Digest, int]],
        *,
        num_undone: int = 0,
        errors: Sequence[BatchError] = (),
    ) -> None:
        now, batch = self._clock(), self.batch
        async with self._database.write() as session:
            row = await self._lock(session)
            # a cancel that came while the files of a whole batch were made comes too late
            if row.state != batch.state and row.state in ENDED_STATES:
                raise _taken_over()
            ids: dict[bool, str] = {}
            for kind, (digest, size) in made.items():
                name = f"{batch.id}_{_PREFIX[kind]}.jsonl"
                file = insert_file(
                    session,
                    batch.tenant,
                    OUTPUT,
                    name,
                    size,
                    digest,
                    ttl_s=batch.output_ttl_s,
                    actor=batch.created_by,
                    now=now,
                )
                ids[kind] = file.id
            row.output_file_id, row.error_file_id = ids.get(True), ids.get(False)
            row.num_failed += num_undone
            row.errors = [error.as_json() for error in errors] or None
            move(row, state, now)
            chunks = (await session.scalars(select(BatchChunk.digest).where(BatchChunk.batch_id == row.id))).all()
            await session.execute(delete(BatchChunk).where(BatchChunk.batch_id == row.id))
            await add_gc_candidates(session, [*map(Digest, chunks), batch.input_blob], now)
            detail = {"state": state, "completed": row.num_completed, "failed": row.num_failed}
            audit.record(session, "batch.end", row.id, actor=audit.SERVER, tenant=batch.tenant, at=now, detail=detail)
        self.batch = BatchRecord.of(row)

    def _write(self, parts: Sequence[bytes]) -> StagedBlob:
        staged = self._store.stage()
        try:
            for part in parts:
                staged.write(part)
        except BaseException:
            staged.discard()
            raise
        return staged

    async def _has_recorded(self, digest: Digest) -> bool:
        """Check whether an earlier commit of these results succeeded though its answer was lost.

        Raises:
            TakenOver: another server recorded others.
        """
        async with self._database.read() as session:
            row = await session.get(BatchRow, self.batch.id)
            if row is None or row.num_chunks == self.batch.num_chunks:
                return False
            last = await session.get(BatchChunk, (row.id, self.batch.num_chunks))
        if last is None or last.digest != digest or row.num_chunks != self.batch.num_chunks + 1:
            raise _taken_over()
        self.batch = BatchRecord.of(row)
        return True

    async def _check_quota(self, session: AsyncSession, size: int) -> None:
        limits = (await session.scalars(select(Tenant.limits).where(Tenant.id == self.batch.tenant))).one()
        await check_stored_bytes(session, self.batch.tenant, limits, size, self._clock())
        stored = select(func.sum(BatchChunk.size)).where(BatchChunk.batch_id == self.batch.id)
        if int(await session.scalar(stored) or 0) + size > LIMITS.max_batch_output_bytes:
            raise QuotaExceeded(
                f"The batch's results exceed the limit of {LIMITS.max_batch_output_bytes} bytes.",
                hint="Split the input into smaller files.",
            )

    async def _lock(self, session: AsyncSession) -> BatchRow:
        """Read the batch's row, locked, if it is as far as it is known to be."""
        row = (
            await session.scalars(select(BatchRow).where(BatchRow.id == self.batch.id).with_for_update())
        ).one_or_none()
        if row is None or row.num_chunks != self.batch.num_chunks or row.state in ENDED_STATES:
            raise _taken_over()
        return row

    def _note(self, row: BatchRow | None) -> BatchRecord:
        if row is None or row.state in ENDED_STATES:
            raise _taken_over()
        self.batch = BatchRecord.of(row)
        return self.batch


def _added(usage: dict[str, int], totals: Totals) -> dict[str, int]:
    """Add the sums of some results to the batch's."""
    added = dict(usage)
    for amounts in totals.values():
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            added[name] = added.get(name, 0) + getattr(amounts, name)
    return added


def _taken_over() -> TakenOver:
    return TakenOver("Another server goes on with this batch, or it has ended.")
