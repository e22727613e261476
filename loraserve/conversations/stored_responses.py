"""Stored responses: written once their answer is whole, read by the responses that continue them.

A row has a response's own input and output and the id of the one before it; a conversation is a
chain of rows. A tenant's rows are bounded in number and bytes: the oldest make room.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, delete, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.background import BackgroundTask
from loraserve.db.models import StoredResponseRow, Tenant
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import InvalidRequest, LoraserveError, ResponseNotFound
from loraserve.limits import LIMITS, Limits
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

_ID = re.compile(r"resp_([0-9A-HJKMNP-TV-Z]{26})")
_PREFIX = "resp_"
_SWEPT_AT_ONCE = 200
_PARAM = "previous_response_id"
_WHOLE = select(StoredResponseRow.id, StoredResponseRow.previous_id, StoredResponseRow.input, StoredResponseRow.answer)


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response as it was answered.

    Attributes:
        id: ``resp_`` and a ULID.
        previous_id: id of the response that it continues.
        input: its own input items, as JSON.
        answer: the response object, as JSON.
    """

    id: str
    previous_id: str | None
    input: bytes
    answer: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.answer)


class StoredResponses:
    """Stored responses of all tenants; each call is for one.

    Args:
        is_storing: whether responses are stored; if not, those that were stay for their time.

    Attributes:
        num_stored, num_lost: responses that were stored since the start, and those that should have
            been.
        num_expired: responses that the sweep has deleted since the start.
    """

    def __init__(
        self, database: Database, *, is_storing: bool = True, clock: Clock = utc_now, limits: Limits = LIMITS
    ) -> None:
        self.is_storing = is_storing
        self.num_stored = self.num_lost = self.num_expired = 0
        self._database = database
        self._clock = clock
        self._limits = limits
        self._saving: set[asyncio.Task[None]] = set()
        self._task = BackgroundTask(
            "stored-responses",
            self.sweep,
            lambda: limits.response_sweep_s,
            failure="expired responses can't be deleted now",
            logger=logger,
            first_delay_s=None,
        )

    def start(self) -> None:
        """Delete expired responses from now on, until `close`."""
        self._task.start()

    async def close(self) -> None:
        await self._task.close()
        for task in self._saving:
            task.cancel()
        await asyncio.gather(*self._saving, return_exceptions=True)

    async def save(self, tenant: TenantId, response: ResponseRecord) -> bool:
        """Store the response durably, and return whether it is.

        An answer doesn't wait for a database that is away: after `limits.store_response_s`, or at
        once while writes fail, the response isn't stored.
        """
        if not self.is_storing:
            return False
        is_saved = False
        if response.num_bytes <= self._limits.max_stored_response_bytes and self._database.is_available:
            task = asyncio.create_task(self._write(tenant, response), name="store-response")
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)
            await asyncio.wait({task}, timeout=self._limits.store_response_s)
            is_saved = self._has_saved(task)
        self.num_stored += is_saved
        self.num_lost += not is_saved
        return is_saved

    def _has_saved(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            task.cancel()
            logger.warning("a response isn't stored: the database takes too long")
            return False
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # of other errors not even the message: a statement's has its texts
            reason = error if isinstance(error, LoraserveError) else type(error).__name__
            logger.warning("a response isn't stored: %s", reason)
        return error is None and not task.cancelled()

    async def get(self, tenant: TenantId, response_id: str) -> ResponseRecord:
        """Return the response.

        Raises:
            ResponseNotFound: the tenant has none of this id, or its time is over.
        """
        query = _WHOLE.where(*self._own(tenant, _key(response_id)))
        async with self._database.read_columns() as connection:
            found = (await connection.execute(query)).first()
        if found is None:
            raise response_not_found()
        return _to_response(found)

    async def delete(self, tenant: TenantId, response_id: str) -> None:
        """Delete the response. Those that continue it can't be continued any more.

        Raises:
            ResponseNotFound: as `get`.
        """
        row = StoredResponseRow
        statement = delete(row).where(*self._own(tenant, _key(response_id))).returning(row.id)
        async with self._database.write() as session:
            found = await session.scalar(statement)
        if found is None:
            raise response_not_found()

    async def conversation(self, tenant: TenantId, response_id: str) -> list[ResponseRecord]:
        """Return the response and those before it, the first one first.

        Raises:
            ResponseNotFound: the tenant hasn't this one, or hasn't one before it any more.
            InvalidRequest: they are more, or longer, than a response may continue. `param` is
                ``previous_response_id``.
        """
        limits = self._limits
        # without their texts first: what a client names may be as long as it likes
        async with self._database.read_columns() as connection:
            rows = (await connection.execute(self._chain(tenant, _key(response_id)))).all()
            if not rows:
                raise response_not_found(_PARAM)
            keys = [row.id for row in rows]
            if len(keys) > limits.max_conversation_responses or rows[-1].total > limits.max_conversation_bytes:
                raise InvalidRequest(
                    f"{_PARAM} continues a conversation of more than {limits.max_conversation_responses} responses "
                    f"or {limits.max_conversation_bytes} bytes.",
                    param=_PARAM,
                    hint="Send the items that still matter as input, without previous_response_id.",
                )
            if rows[-1].previous_id is not None:
                raise ResponseNotFound(
                    "A response before previous_response_id in its conversation was deleted, or its time is over.",
                    param=_PARAM,
                    hint="Send the conversation's items as input.",
                )
            query = _WHOLE.where(StoredResponseRow.tenant_id == tenant, StoredResponseRow.id.in_(keys))
            found = {one.id: _to_response(one) for one in (await connection.execute(query)).all()}
        return [found[key] for key in reversed(keys)]

    def _chain(self, tenant: TenantId, key: str) -> Select[Any]:
        """Select a response and those before it, without their texts, to one beyond the bounds.

        A cycle in the rows ends at the bounds, too.
        """
        limits, row = self._limits, StoredResponseRow
        depth, total = literal(1, Integer).label("depth"), row.num_bytes.label("total")
        first = select(row.id, row.previous_id, row.num_bytes, depth, total).where(*self._own(tenant, key))
        chain = first.cte("chain", recursive=True)
        before = (
            select(row.id, row.previous_id, row.num_bytes, chain.c.depth + 1, chain.c.total + row.num_bytes)
            .join(chain, row.id == chain.c.previous_id)
            .where(
                row.tenant_id == tenant,
                row.expires_at > self._clock(),
                chain.c.depth <= limits.max_conversation_responses,
                chain.c.total <= limits.max_conversation_bytes,
            )
        )
        found = chain.union_all(before)
        columns = found.c.id, found.c.previous_id, found.c.num_bytes, found.c.depth, found.c.total
        return select(*columns).order_by(found.c.depth)

    async def sweep(self) -> None:
        """Delete responses whose time is over, and those of deleted tenants."""
        row = StoredResponseRow
        gone = select(Tenant.id).where(Tenant.deleted_at.is_not(None))
        while True:
            due = select(row.id).where(or_(row.expires_at <= self._clock(), row.tenant_id.in_(gone)))
            async with self._database.write() as session:
                deleted = await session.scalars(
                    delete(row)
                    .where(row.id.in_(due.limit(_SWEPT_AT_ONCE).with_for_update(skip_locked=True)))
                    .returning(row.id)
                )
                num_deleted = len(deleted.all())
            self.num_expired += num_deleted
            if num_deleted < _SWEPT_AT_ONCE:
                return

    def _own(self, tenant: TenantId, key: str) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions of the tenant's row of this id, while its time isn't over."""
        row = StoredResponseRow
        return row.tenant_id == tenant, row.id == key, row.expires_at > self._clock()

    async def _write(self, tenant: TenantId, response: ResponseRecord) -> None:
        now = self._clock()
        async with self._database.write() as session:
            session.add(
                StoredResponseRow(
                    id=_key(response.id),
                    tenant_id=tenant,
                    previous_id=None if response.previous_id is None else _key(response.previous_id),
                    input=response.input,
                    answer=response.answer,
                    num_bytes=response.num_bytes,
                    created_at=now,
                    expires_at=now + timedelta(seconds=self._limits.response_ttl_s),
                )
            )
            await session.flush()
            await self._make_room(session, tenant)

    async def _make_room(self, session: AsyncSession, tenant: TenantId) -> None:
        """Delete the tenant's oldest responses beyond its bounds."""
        limits, row = self._limits, StoredResponseRow
        mine = row.tenant_id == tenant
        count, total = (
            await session.execute(select(func.count(), func.coalesce(func.sum(row.num_bytes), 0)).where(mine))
        ).one()
        if count <= limits.max_stored_responses_per_tenant and total <= limits.max_stored_bytes_per_tenant:
            return
        newest_first = row.id.desc()
        kept = (
            select(
                row.id,
                func.row_number().over(order_by=newest_first).label("place"),
                func.sum(row.num_bytes).over(order_by=newest_first).label("total"),
            )
            .where(mine)
            .subquery()
        )
        beyond = select(kept.c.id).where(
            or_(
                kept.c.place > limits.max_stored_responses_per_tenant,
                kept.c.total > limits.max_stored_bytes_per_tenant,
            )
        )
        await session.execute(delete(row).where(row.id.in_(beyond)))


def response_not_found(param: str | None = None) -> ResponseNotFound:
    """Return the same error for absent, deleted, expired and other tenants' responses."""
    named = "" if param is None else f"{param}: "
    return ResponseNotFound(
        f"{named}There is no such response.",
        param=param,
        hint="Responses are kept for a time, unless they were made with store: false.",
    )


def _key(response_id: str) -> str:
    """Return the row's id; an empty one, which no row has, for what can't be a response's id."""
    found = _ID.fullmatch(response_id)
    return "" if found is None else found[1]


def _to_response(row: Any) -> ResponseRecord:
    previous_id = None if row.previous_id is None else _PREFIX + row.previous_id
    return ResponseRecord(_PREFIX + row.id, previous_id, row.input, row.answer)
