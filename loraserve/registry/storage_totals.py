"""Totals of what each tenant stores, kept by every change: adapters, and bytes of versions.

A quota is checked at each push, and a tenant may have a hundred thousand versions: to sum them up
took half a second. So a transaction that adds, deletes or restores adapters or versions also adds
to their tenant's totals.

One row of a tenant has all that it ever made, deleted or not (`MADE`), and one for each day what it
deleted then: the tenant has the difference. Pushes of a tenant take turns anyway, and deletes
change other rows than pushes: no push waits for a delete.

Each change is relative, so that a difference between the totals and what they count stays the same,
whatever happens at the same time. `find_differences` counts everything, in one statement and hence
at one instant; `set_right` adds what it finds.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, literal_column, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Adapter, AdapterVersion, StorageTotal, Tenant
from loraserve.db.session import Database
from loraserve.db.upsert import upsert
from loraserve.types import TenantId

MADE = ""
"""Instead of a day: all that the tenant ever made, deleted or not."""
TENANTS_AT_ONCE = 20
"""Tenants whose versions one statement counts: few, as each may have a million."""
_LOGGED = 20
"""Wrong totals of a step that the log names."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StorageTotals:
    """Sums of what a tenant stores, and of what it deleted lately."""

    num_adapters: int
    num_bytes: int
    """Bytes of versions that aren't deleted, each counted in full."""
    num_deleted_bytes: int
    """Bytes of versions deleted on the day of an instant or later, each counted in full."""


@dataclass(frozen=True, slots=True)
class TotalsDifference:
    """Difference of a row of totals from what it counts; negative: what it has too much."""

    tenant: TenantId
    day: str
    num_adapters: int
    num_bytes: int


async def read_totals(session: AsyncSession, tenant: TenantId, *, deleted_since: datetime) -> StorageTotals:
    """Sum the tenant's totals.

    They hold until the commit if the tenant's row is locked, but for deletes, which make them
    smaller.
    """
    row = StorageTotal
    sign = case((row.day == MADE, 1), else_=-1)
    is_recent = row.day >= _day_of(deleted_since)
    query = select(
        func.sum(sign * row.num_adapters),
        func.sum(sign * row.num_bytes),
        func.sum(case((is_recent, row.num_bytes), else_=0)),
    ).where(row.tenant_id == tenant)
    found = (await session.execute(query)).one()
    return StorageTotals(*(int(value or 0) for value in found))


async def add_to_totals(session: AsyncSession, tenant: TenantId, *, num_adapters: int = 0, num_bytes: int = 0) -> None:
    """Count what the tenant makes in this transaction, which has locked the tenant's row."""
    if num_adapters or num_bytes:
        await _add(session, [TotalsDifference(tenant, MADE, num_adapters, num_bytes)])


async def add_to_deleted(
    session: AsyncSession, tenant: TenantId, at: datetime, *, num_adapters: int = 0, num_bytes: int = 0
) -> None:
    """Count what the tenant deletes at that instant, in this transaction.

    What is restored is counted in the negative at the instant of its deletion. Deletes of a tenant
    wait here for each other's commits: call it late.
    """
    if num_adapters or num_bytes:
        await _add(session, [TotalsDifference(tenant, _day_of(at), num_adapters, num_bytes)])


async def find_differences(session: AsyncSession, after: str) -> tuple[list[TotalsDifference], str | None]:
    """Compare the totals of some tenants with what they count.

    Args:
        after: id of the last tenant that was looked at; empty for the first call.

    Returns:
        What the totals lack; the id for the next call, None after the last tenant.
    """
    ids = select(Tenant.id).where(Tenant.id > after).order_by(Tenant.id).limit(TENANTS_AT_ONCE)
    tenants = (await session.scalars(ids)).all()
    if not tenants:
        return [], None
    counted = union_all(*_counted(session, after, tenants[-1])).subquery()
    tenant, day, num_adapters, num_bytes = counted.c
    adapters, num = func.sum(num_adapters), func.sum(num_bytes)
    query = select(tenant, day, adapters, num).group_by(tenant, day).having(or_(adapters != 0, num != 0))
    # a push that brings a deleted adapter's name back also changes the day's row first
    rows = (await session.execute(query.order_by(tenant, day.desc()))).all()
    found = [TotalsDifference(TenantId(row[0]), row[1], int(row[2]), int(row[3])) for row in rows]
    return found, tenants[-1] if len(tenants) == TENANTS_AT_ONCE else None


def _counted(session: AsyncSession, after: str, last: str) -> list[Select[Any]]:
    """Build addends: what each row of totals should have, less what it has."""
    is_sqlite = session.get_bind().dialect.name == "sqlite"

    def day(at: Any) -> Any:
        return func.strftime("%Y-%m-%d", at) if is_sqlite else func.to_char(func.timezone("UTC", at), "YYYY-MM-DD")

    made: ColumnElement[Any] = literal_column("''")
    one: ColumnElement[Any] = literal_column("1")
    nothing: ColumnElement[Any] = literal_column("0")
    size, version_end, adapter_end = AdapterVersion.size_bytes, AdapterVersion.deleted_at, Adapter.deleted_at
    mine = (Adapter.tenant_id > after, Adapter.tenant_id <= last)

    def adapters(day: Any) -> Select[Any]:
        return select(Adapter.tenant_id, day.label("day"), one.label("num_adapters"), nothing.label("num_bytes")).where(
            *mine
        )

    def versions(day: Any) -> Select[Any]:
        found = select(Adapter.tenant_id, day, nothing, size)
        return found.join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id).where(*mine)

    kept = select(StorageTotal.tenant_id, StorageTotal.day, -StorageTotal.num_adapters, -StorageTotal.num_bytes)
    return [
        adapters(made),
        adapters(day(adapter_end)).where(adapter_end.is_not(None)),
        # apart, as each has an index: the rows of the versions aren't read
        versions(made).where(version_end.is_(None)),
        versions(made).where(version_end.is_not(None)),
        versions(day(version_end)).where(version_end.is_not(None)),
        kept.where(StorageTotal.tenant_id > after, StorageTotal.tenant_id <= last),
    ]


async def set_right(session: AsyncSession, after: str) -> tuple[list[TotalsDifference], str | None]:
    """Set the totals of some tenants right in this transaction; as `find_differences`.

    Others may change what is counted meanwhile, and their totals. Two that add the same difference
    would be wrong: the second waits here for the first's commit, and counts after it.
    """
    if session.get_bind().dialect.name == "postgresql":
        # SQLite has one writer anyway
        await session.execute(select(func.pg_advisory_xact_lock(func.hashtext(StorageTotal.__tablename__))))
    found, last = await find_differences(session, after)
    await _add(session, found)
    return found, last


async def check_totals(database: Database) -> AsyncIterator[int]:
    """Compare all totals with what they count, a few tenants at a time, and set wrong ones right.

    Yields:
        How many were wrong, after each of these steps; the log says which.
    """
    after: str | None = ""
    while after is not None:
        async with database.read() as session:
            found, last = await find_differences(session, after)
        if found:
            async with database.write() as session:
                found, last = await set_right(session, after)
        after = last
        for one in found[:_LOGGED]:
            logger.error(
                "the totals of tenant %s (%s) lacked %d adapters and %d bytes of versions, and are set right",
                one.tenant,
                f"deleted on {one.day}" if one.day else "all that it made",
                one.num_adapters,
                one.num_bytes,
            )
        if len(found) > _LOGGED:
            logger.error("%d more totals of tenants were wrong, and are set right", len(found) - _LOGGED)
        yield len(found)


async def _add(session: AsyncSession, found: list[TotalsDifference]) -> None:
    rows = [
        {"tenant_id": one.tenant, "day": one.day, "num_adapters": one.num_adapters, "num_bytes": one.num_bytes}
        for one in found
    ]
    await upsert(session, StorageTotal, rows, add=("num_adapters", "num_bytes"))


def _day_of(at: datetime) -> str:
    return at.astimezone(UTC).date().isoformat()
