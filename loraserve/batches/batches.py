"""Batches of tenants: made, listed, cancelled. `BatchRunner` computes them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from loraserve.batches.records import (
    CANCELLING,
    ENDED_STATES,
    IN_PROGRESS,
    INPUT,
    LIVE_STATES,
    VALIDATING,
    BatchRecord,
    Listing,
    NewBatch,
)
from loraserve.batches.stored_files import find_file, is_object_id
from loraserve.db import audit
from loraserve.db.models import BatchRow, Lease
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import BatchNotFound, Conflict, InvalidRequest, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.repository import AdapterRepository
from loraserve.types import TenantId


class Batches:
    """Batches of all tenants; each call acts for one.

    Args:
        on_change: called when there is something new to do for the runner.
    """

    def __init__(
        self, database: Database, *, clock: Clock = utc_now, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.on_change = on_change
        self._database = database
        self._clock = clock

    async def create(self, tenant: TenantId, new: NewBatch, *, actor: str) -> BatchRecord:
        """Make a batch, which is validated and computed from now on.

        Raises:
            FileNotFound: the tenant has no such file.
            InvalidRequest: the file isn't a batch's input.
            QuotaExceeded: the tenant has `LIMITS.max_live_batches_per_tenant` that haven't ended.
        """
        now = self._clock()
        async with self._database.write() as session:
            await AdapterRepository(session, tenant).lock_tenant()
            file = await find_file(session, tenant, new.input_file_id, now, is_locking=True)
            if file.purpose != INPUT:
                raise InvalidRequest(
                    f"The file's purpose is {file.purpose}; a batch's input has the purpose {INPUT}.",
                    param="input_file_id",
                )
            await self._make_room(session, tenant)
            row = BatchRow(
                id=f"batch_{ULID.from_datetime(now)}",
                tenant_id=tenant,
                created_by=actor,
                input_file_id=file.id,
                input_blob=file.blob,
                endpoint=new.endpoint,
                completion_window=new.completion_window,
                labels=None if new.metadata is None else dict(new.metadata),
                output_ttl_s=new.output_ttl_s,
                state=VALIDATING,
                times={},
                errors=None,
                num_lines=0,
                num_completed=0,
                num_failed=0,
                num_chunks=0,
                usage={},
                output_file_id=None,
                error_file_id=None,
                created_at=now,
                expires_at=now + timedelta(seconds=LIMITS.batch_window_s),
            )
            session.add(row)
            detail = {"input_file_id": file.id, "endpoint": new.endpoint}
            audit.record(session, "batch.create", row.id, actor=actor, tenant=tenant, at=now, detail=detail)
        self.on_change()
        return BatchRecord.of(row)

    async def _make_room(self, session: AsyncSession, tenant: TenantId) -> None:
        """Delete the tenant's oldest batches that have ended, beyond those that are kept.

        Raises:
            QuotaExceeded
        """
        mine = BatchRow.tenant_id == tenant
        live = select(func.count()).select_from(BatchRow).where(mine, BatchRow.state.in_(LIVE_STATES))
        num_live = await session.scalar(live) or 0
        if num_live >= LIMITS.max_live_batches_per_tenant:
            raise QuotaExceeded(
                f"{num_live} batches of the tenant haven't ended, the maximum.",
                hint="Wait until one has ended, or cancel one.",
            )
        kept = select(BatchRow.id).where(mine).order_by(BatchRow.id.desc()).offset(LIMITS.max_batches_per_tenant - 1)
        await session.execute(
            delete(BatchRow)
            .where(BatchRow.id.in_(kept), BatchRow.state.in_(ENDED_STATES))
            .execution_options(synchronize_session=False)
        )

    async def get(self, tenant: TenantId, batch_id: str) -> BatchRecord:
        """Read the tenant's batch.

        Raises:
            BatchNotFound: it is absent or another tenant's; the text is the same.
        """
        async with self._database.read() as session:
            return BatchRecord.of(await self._find(session, tenant, batch_id))

    async def cancel(self, tenant: TenantId, batch_id: str, *, actor: str) -> BatchRecord:
        """Cancel the batch, on whichever server it runs; no-op if it is being cancelled.

        What is done stays, in its output.

        Raises:
            BatchNotFound
            Conflict: it has ended.
        """
        now = self._clock()
        async with self._database.write() as session:
            row = await self._find(session, tenant, batch_id, is_locking=True)
            if row.state in ENDED_STATES:
                raise Conflict(f"The batch is {row.state}: there is nothing to cancel.")
            if row.state != CANCELLING:
                move(row, CANCELLING, now)
                audit.record(session, "batch.cancel", row.id, actor=actor, tenant=tenant, at=now)
        self.on_change()
        return BatchRecord.of(row)

    async def to_run(
        self, *, limit: int, besides: Collection[str], busy_tenants: Collection[TenantId]
    ) -> list[BatchRecord]:
        """Choose batches that no server runs: what is short, then the oldest of each tenant.

        Checking an input and making output files is short: neither waits for a tenant's other
        batches.

        Args:
            besides: ids of batches that aren't needed.
            busy_tenants: tenants of which a batch is computed already.

        Raises:
            DatabaseUnavailable
        """
        now = self._clock()
        is_leased = select(Lease.name).where(Lease.name == BatchRow.id, Lease.expires_at > now).exists()
        free = BatchRow.state.in_(LIVE_STATES), BatchRow.id.not_in(besides), ~is_leased
        is_long = (BatchRow.state == IN_PROGRESS) & (BatchRow.expires_at > now)
        short = select(BatchRow).where(*free, ~is_long).order_by(BatchRow.id).limit(limit)
        oldest = select(func.min(BatchRow.id)).where(is_long, BatchRow.tenant_id.not_in(busy_tenants))
        long = select(BatchRow).where(*free, BatchRow.id.in_(oldest.group_by(BatchRow.tenant_id)))
        async with self._database.read() as session:
            rows = list((await session.scalars(short)).all())
            rows += (await session.scalars(long.order_by(BatchRow.id).limit(limit))).all()
        return [BatchRecord.of(row) for row in rows[:limit]]

    async def num_by_state(self) -> dict[str, int]:
        """Count the batches of all tenants that haven't ended, by state.

        Raises:
            DatabaseUnavailable
        """
        query = select(BatchRow.state, func.count()).where(BatchRow.state.in_(LIVE_STATES)).group_by(BatchRow.state)
        async with self._database.read() as session:
            rows = (await session.execute(query)).all()
        found: dict[str, int] = {row[0]: row[1] for row in rows}
        return {state: found.get(state, 0) for state in LIVE_STATES}

    async def list(self, tenant: TenantId, *, limit: int, after: str | None) -> Listing[BatchRecord]:
        """List some of the tenant's batches, newest first.

        Args:
            after: id of the last batch of the page before.
        """
        query = select(BatchRow).where(BatchRow.tenant_id == tenant).order_by(BatchRow.id.desc()).limit(limit + 1)
        if after is not None:
            query = query.where(BatchRow.id < after)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return Listing(tuple(map(BatchRecord.of, rows[:limit])), len(rows) > limit)

    async def _find(
        self, session: AsyncSession, tenant: TenantId, batch_id: str, *, is_locking: bool = False
    ) -> BatchRow:
        query = select(BatchRow).where(BatchRow.id == batch_id, BatchRow.tenant_id == tenant)
        row = None
        if is_object_id(batch_id):
            row = (await session.scalars(query.with_for_update() if is_locking else query)).one_or_none()
        if row is None:
            raise BatchNotFound("There is no such batch.", hint="GET /v1/batches lists the batches.")
        return row


def move(row: BatchRow, state: str, now: datetime) -> None:
    """Note the batch's new state, and since when it has it."""
    row.state = state
    row.times = {**row.times, state: int(now.timestamp())}
