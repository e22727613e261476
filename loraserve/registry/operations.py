"""Operations: work that takes longer than a request.

Each has a row that its server renews while it works.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, delete, select
from ulid import ULID

from loraserve.background import BackgroundTask
from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import OperationRow
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database
from loraserve.errors import LoraserveError, OperationNotFound, Overloaded
from loraserve.limits import LIMITS
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

RUNNING, DONE, FAILED, CANCELLED = "running", "done", "failed", "cancelled"
ENDED = (DONE, FAILED, CANCELLED)
Result = Mapping[str, Any]
_LOST = {
    "code": "operation_lost",
    "message": "The server that ran this operation has ended. Start the operation again.",
}
_STOPPED = {
    "code": "operation_stopped",
    "message": "The server that ran this operation was stopped. Start the operation again.",
}
_BEAT_S = LIMITS.operation_heartbeat_s
_LAST_TRIES_S = 60.0
"""Time for which writing the end of an operation is retried while the database is unreachable."""


class Cancelled(Exception):
    """The operation was cancelled."""


@dataclass(slots=True)
class OperationProgress:
    """Progress of an operation. The work updates it from any thread."""

    bytes_done: int = 0
    bytes_total: int | None = None
    """Total number of bytes; None while unknown."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def advance(self, num_bytes: int) -> None:
        """Add bytes that are done.

        Raises:
            Cancelled: the operation was cancelled.
        """
        self.bytes_done += num_bytes
        if self.cancelled.is_set():
            raise Cancelled


@dataclass(frozen=True, slots=True)
class OperationRecord:
    id: str
    kind: str
    target: str
    state: str
    bytes_done: int
    bytes_total: int | None
    result: Result | None
    error: Mapping[str, str] | None
    created_at: datetime
    updated_at: datetime


Work = Callable[[OperationProgress], Awaitable[Result]]


class Operations:
    """Operations of all tenants; this server finishes those it began, or marks them as stopped."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self.num_ended: Counter[str] = Counter()
        """Number of operations ended since the start, by final state."""
        self._database = database
        self._clock = clock
        self._running: dict[str, tuple[asyncio.Task[None], OperationProgress]] = {}
        self._num_beginning = 0

    @property
    def num_running(self) -> int:
        """Number of operations running on this server."""
        return len(self._running)

    async def begin(
        self,
        tenant: TenantId,
        kind: str,
        target: str,
        work: Work,
        *,
        actor: str,
        once: Once[OperationRecord] | None = None,
    ) -> OperationRecord:
        """Begin an operation on this server, and return its durable record.

        Raises:
            Overloaded: this server runs `LIMITS.max_concurrent_operations` already.
            Replay: `once` was used before.
        """
        if once is not None:
            async with self._database.read() as session:
                await once.check(session)
        if (found := len(self._running) + self._num_beginning) >= LIMITS.max_concurrent_operations:
            raise Overloaded(f"{found} operations are running, the maximum.", retry_after_s=10)
        self._num_beginning += 1
        try:
            record = await self._insert(tenant, kind, target, actor=actor, once=once)
        finally:
            self._num_beginning -= 1
        progress = OperationProgress()
        task = asyncio.create_task(self._run(record.id, tenant, work, progress), name=f"{kind} {record.id}")
        self._running[record.id] = task, progress
        task.add_done_callback(lambda _: self._running.pop(record.id, None))
        return record

    async def _insert(
        self, tenant: TenantId, kind: str, target: str, *, actor: str, once: Once[OperationRecord] | None
    ) -> OperationRecord:
        """Insert the row of a running operation, and delete the tenant's oldest ones."""
        now = self._clock()
        row = OperationRow(
            id=str(ULID.from_datetime(now)),
            tenant_id=tenant,
            kind=kind,
            target=target[:255],
            state=RUNNING,
            is_cancelling=False,
            progress=_as_json(OperationProgress()),
            result=None,
            error=None,
            actor=actor,
            created_at=now,
            updated_at=now,
        )
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            kept = (
                select(OperationRow.id)
                .where(OperationRow.tenant_id == tenant)
                .order_by(OperationRow.id.desc())
                .offset(LIMITS.max_operations_per_tenant - 1)
            )
            await session.execute(delete(OperationRow).where(OperationRow.id.in_(kept), OperationRow.state != RUNNING))
            session.add(row)
            audit.record(session, f"{kind}.begin", row.target, actor=actor, tenant=tenant, at=now)
            record = _to_record(row, now)
            if once is not None:
                await once.finish(session, record)
        return record

    async def get(self, tenant: TenantId | None, operation_id: str) -> OperationRecord:
        """Read the operation of the tenant, or with None of any tenant.

        Raises:
            OperationNotFound
        """
        query = select(OperationRow).where(*_one(tenant, operation_id))
        async with self._database.read() as session:
            row = (await session.scalars(query)).one_or_none()
        if row is None:
            raise _absent()
        return _to_record(row, self._clock())

    async def list(
        self, tenant: TenantId | None, *, limit: int = 50, cursor: str | None = None
    ) -> Page[OperationRecord]:
        """List a page of the tenant's operations, newest first.

        With None, they are all tenants'.
        """
        before = decode_cursor(cursor)
        query = select(OperationRow).order_by(OperationRow.id.desc()).limit(check_limit(limit) + 1)
        if tenant is not None:
            query = query.where(OperationRow.tenant_id == tenant)
        if before is not None:
            query = query.where(OperationRow.id < before)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        now = self._clock()
        return make_page(rows, limit, lambda row: row.id, lambda row: _to_record(row, now))

    async def cancel(self, tenant: TenantId | None, operation_id: str, *, actor: str) -> OperationRecord:
        """Cancel the operation, which may run on another server; no-op if it has ended.

        Raises:
            OperationNotFound
        """
        now = self._clock()
        async with self._database.write() as session:
            query = select(OperationRow).where(*_one(tenant, operation_id)).with_for_update()
            row = (await session.scalars(query)).one_or_none()
            if row is None:
                raise _absent()
            if row.state == RUNNING and not row.is_cancelling:
                row.is_cancelling = True
                owner = row.tenant_id
                audit.record(session, f"{row.kind}.cancel", row.target, actor=actor, tenant=owner, at=now)
            record = _to_record(row, now)
        if operation_id in self._running:
            self._running[operation_id][1].cancelled.set()
        return record

    async def close(self) -> None:
        """Stop the operations of this server, and mark their rows."""
        running = list(self._running.values())
        for task, progress in running:
            # the working thread must see it too
            progress.cancelled.set()
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)

    async def _run(self, operation_id: str, tenant: TenantId, work: Work, progress: OperationProgress) -> None:
        heartbeat = BackgroundTask(
            f"heartbeat of {operation_id}",
            partial(self._beat, operation_id, progress),
            _BEAT_S,
            failure=f"the heartbeat of operation {operation_id} can't be written now",
            logger=logger,
            first_delay_s=None,
        )
        heartbeat.start()
        try:
            try:
                result = dict(await work(progress))
                ended: dict[str, Any] = {"state": DONE, "result": result}
            except Cancelled:
                ended = {"state": CANCELLED}
            except LoraserveError as error:
                ended = {"state": FAILED, "error": {"code": error.code, "message": str(error)}}
            except asyncio.CancelledError:
                await self._end(operation_id, progress, {"state": FAILED, "error": _STOPPED}, last_tries_s=1.0)
                raise
            except Exception:
                logger.exception("operation %s failed", operation_id)
                message = "The operation failed; the server's log has the reason."
                ended = {"state": FAILED, "error": {"code": LoraserveError.code, "message": message}}
        finally:
            await heartbeat.close()
        await self._end(operation_id, progress, ended, last_tries_s=_LAST_TRIES_S)

    async def _beat(self, operation_id: str, progress: OperationProgress) -> None:
        """Renew the operation's row.

        Cancel the work if another server received the operation's cancellation.
        """
        async with self._database.write() as session:
            row = await session.get(OperationRow, operation_id, with_for_update=True)
            if row is None or row.is_cancelling:
                progress.cancelled.set()
            if row is not None:
                row.progress, row.updated_at = _as_json(progress), self._clock()

    async def _end(
        self, operation_id: str, progress: OperationProgress, ended: Mapping[str, Any], *, last_tries_s: float
    ) -> None:
        self.num_ended[ended["state"]] += 1
        for _ in range(max(1, int(last_tries_s / _BEAT_S))):
            try:
                async with self._database.write() as session:
                    row = await session.get(OperationRow, operation_id, with_for_update=True)
                    if row is not None:
                        row.progress, row.updated_at = _as_json(progress), self._clock()
                        for name, value in ended.items():
                            setattr(row, name, value)
                return
            except LoraserveError as error:
                # unreachable or full: without a retry the row would show forever that the operation
                # runs
                logger.warning("the end of operation %s can't be written now: %s", operation_id, error)
                await asyncio.sleep(_BEAT_S)
        logger.error("operation %s has ended (%s), which can't be written", operation_id, ended["state"])


def _one(tenant: TenantId | None, operation_id: str) -> list[ColumnElement[bool]]:
    is_plain = operation_id.isascii() and operation_id.isalnum()
    conditions = [OperationRow.id == (operation_id[:64] if is_plain else "")]
    return conditions if tenant is None else [*conditions, OperationRow.tenant_id == tenant]


def _absent() -> OperationNotFound:
    return OperationNotFound("There is no such operation.", hint="See: GET /api/v1/operations")


def _as_json(progress: OperationProgress) -> dict[str, int | None]:
    return {"bytes_done": progress.bytes_done, "bytes_total": progress.bytes_total}


def _to_record(row: OperationRow, now: datetime) -> OperationRecord:
    is_lost = row.state == RUNNING and row.updated_at < now - timedelta(seconds=LIMITS.operation_lost_s)
    return OperationRecord(
        id=row.id,
        kind=row.kind,
        target=row.target,
        state=FAILED if is_lost else row.state,
        bytes_done=row.progress.get("bytes_done") or 0,
        bytes_total=row.progress.get("bytes_total"),
        result=row.result,
        error=_LOST if is_lost else row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
