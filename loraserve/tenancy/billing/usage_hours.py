"""The table of hours: usage is added to it exactly once, however often that is tried."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Tenant, UsageHour, UsageJournal
from loraserve.tenancy.billing.journal import Amounts, UsageKey

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AMOUNTS = ("num_requests", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens")
_KEY = ("tenant_id", "hour", "owner", "adapter", "version", "price")
_ROWS_PER_STATEMENT = 500
"""SQLite takes 32,766 values in one."""


async def counted_sequence(session: AsyncSession, journal: str, now: datetime) -> int:
    """The number of the journal's last entry that is counted, 0 for none. Its row is this transaction's alone from here on."""
    insert = _insert(session)
    values = {"id": journal, "sequence": 0, "updated_at": now}
    await session.execute(insert(UsageJournal).values(**values).on_conflict_do_nothing())
    query = select(UsageJournal.sequence).where(UsageJournal.id == journal).with_for_update()
    return (await session.scalars(query)).one()


async def count(
    session: AsyncSession, journal: str, sequence: int, totals: Mapping[UsageKey, Amounts], now: datetime
) -> frozenset[str]:
    """The totals are added to their hours, and the journal is counted up to `sequence`, both or none.

    Returns:
        Tenants that this database doesn't know. What they used isn't added anywhere.
    """
    insert = _insert(session)
    unknown_tenants = await _unknown_tenants(session, {key.tenant for key in totals})
    # One order for everybody: two replicas never wait for each other's rows.
    keys = sorted(key for key in totals if key.tenant not in unknown_tenants)
    for start in range(0, len(keys), _ROWS_PER_STATEMENT):
        rows = [_row(key, totals[key]) for key in keys[start : start + _ROWS_PER_STATEMENT]]
        statement = insert(UsageHour).values(rows)
        table = UsageHour.__table__.c
        grown = {name: table[name] + statement.excluded[name] for name in _AMOUNTS}
        await session.execute(statement.on_conflict_do_update(index_elements=list(_KEY), set_=grown))
    values = {"id": journal, "sequence": sequence, "updated_at": now}
    statement = insert(UsageJournal).values(**values)
    moved = {"sequence": sequence, "updated_at": now}
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=moved))
    return unknown_tenants


async def _unknown_tenants(session: AsyncSession, tenants: set[str]) -> frozenset[str]:
    known: set[str] = set()
    ordered = sorted(tenants)
    for start in range(0, len(ordered), _ROWS_PER_STATEMENT):
        query = select(Tenant.id).where(Tenant.id.in_(ordered[start : start + _ROWS_PER_STATEMENT]))
        known.update(await session.scalars(query))
    return frozenset(tenants - known)


async def forget_journal(session: AsyncSession, journal: str) -> None:
    """Nothing is known of the journal, whose file must be gone."""
    await session.execute(delete(UsageJournal).where(UsageJournal.id == journal))


def instant_of(hour: int) -> datetime:
    return _EPOCH + timedelta(hours=hour)


def _row(key: UsageKey, amounts: Amounts) -> dict[str, Any]:
    return {
        "tenant_id": key.tenant,
        "hour": instant_of(key.hour),
        "owner": key.owner,
        "adapter": key.adapter,
        "version": key.version,
        "price": key.price,
        **{name: getattr(amounts, name) for name in _AMOUNTS},
    }


def _insert(session: AsyncSession) -> Any:
    return postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
