"""Table of usage by the hour, to which usage is added exactly once, however often that is tried."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Tenant, UsageHour, UsageJournal
from loraserve.db.upsert import upsert
from loraserve.tenancy.billing.journal import Amounts, UsageKey

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AMOUNTS = Amounts.__struct_fields__
_IDS_PER_STATEMENT = 500


async def counted_sequence(session: AsyncSession, journal: str, now: datetime) -> int:
    """Lock the journal's row, and return the number of its last counted entry, 0 for none."""
    await upsert(session, UsageJournal, [{"id": journal, "sequence": 0, "updated_at": now}])
    query = select(UsageJournal.sequence).where(UsageJournal.id == journal).with_for_update()
    return (await session.scalars(query)).one()


async def count(
    session: AsyncSession, journal: str, sequence: int, totals: Mapping[UsageKey, Amounts], now: datetime
) -> frozenset[str]:
    """Add the totals to their hours and mark the journal as counted up to `sequence`.

    One transaction does both.

    Returns:
        Tenants that this database doesn't have. Their usage isn't added.
    """
    unknown_tenants = await _unknown_tenants(session, {key.tenant for key in totals})
    # sorted, so that two replicas don't deadlock
    keys = sorted(key for key in totals if key.tenant not in unknown_tenants)
    await upsert(session, UsageHour, [_row(key, totals[key]) for key in keys], add=_AMOUNTS)
    counted = {"id": journal, "sequence": sequence, "updated_at": now}
    await upsert(session, UsageJournal, [counted], replace=("sequence", "updated_at"))
    return unknown_tenants


async def bill(session: AsyncSession, totals: Mapping[UsageKey, Amounts]) -> None:
    """Add the totals to their hours, in the transaction that records what they are for.

    The tenants must exist.
    """
    await upsert(session, UsageHour, [_row(key, totals[key]) for key in sorted(totals)], add=_AMOUNTS)


async def _unknown_tenants(session: AsyncSession, tenants: set[str]) -> frozenset[str]:
    known: set[str] = set()
    ordered = sorted(tenants)
    for start in range(0, len(ordered), _IDS_PER_STATEMENT):
        query = select(Tenant.id).where(Tenant.id.in_(ordered[start : start + _IDS_PER_STATEMENT]))
        known.update(await session.scalars(query))
    return frozenset(tenants - known)


async def forget_journal(session: AsyncSession, journal: str) -> None:
    """Delete the row of a journal whose file is gone."""
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
