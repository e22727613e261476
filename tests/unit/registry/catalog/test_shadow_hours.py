"""How shadows did, hour by hour: summed in memory, kept in the database,
shown to the adapter's owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraserve.db.paging import encode_cursor
from loraserve.db.session import Database
from loraserve.errors import AdapterNotFound, AliasNotFound, DatabaseUnavailable, InvalidRequest
from loraserve.limits import LIMITS
from loraserve.registry.binding import Shadow
from loraserve.registry.catalog.shadow_hours import MAX_PENDING, ShadowHours, Tally, _Key
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.types import AdapterRef, TenantId

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


class Now:
    def __init__(self) -> None:
        self.at = NOON

    def __call__(self) -> datetime:
        return self.at


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def hours(database: Database, now: Now) -> ShadowHours:
    return ShadowHours(database, clock=now, flush_s=60)


@pytest.fixture
async def shadow_on(publish: Any, registry: Registry, acme: TenantId, database: Database) -> Callable[..., Shadow]:
    """``sql`` has two versions; the shadow of an alias is its second."""
    first, second = (await publish(seed=0)).version, (await publish(seed=1)).version
    assert (first.version, second.version) == (1, 2)
    async with database.read() as session:
        adapter_id = (await AdapterRepository(session, acme).adapter("sql")).id

    def shadow(alias: str = "live", adapter: AdapterRef = second.ref) -> Shadow:
        return Shadow(adapter, adapter_id, alias, 1.0)

    return shadow


def tally(**amounts: int) -> Tally:
    return Tally(**{"num_requests": 1, **amounts})


async def test_hourly_comparisons_add_up_in_database(
    hours: ShadowHours, database: Database, now: Now, shadow_on: Any, acme: TenantId
) -> None:
    hours.record(shadow_on(), 1, tally(num_tokens=8, num_agreed_tokens=5, live_ms=100, shadow_ms=120))
    hours.record(shadow_on(), 1, tally(num_failed=1))
    await hours.flush()
    now.at = NOON + timedelta(minutes=59)
    # another server's
    other = ShadowHours(database, clock=now, flush_s=60)
    other.record(shadow_on(), 1, tally(num_equal=1, num_tokens=4, num_agreed_tokens=4, live_ms=50, shadow_ms=40))
    await other.flush()
    page = await hours.list(acme, "sql", "live")
    assert [(row.hour, row.version, row.shadow_version) for row in page.items] == [(NOON, 1, 2)]
    assert page.items[0].tally == Tally(
        num_requests=3, num_failed=1, num_equal=1, num_tokens=12, num_agreed_tokens=9, live_ms=150, shadow_ms=160
    )
    await asyncio.gather(hours.close(), other.close())


async def test_hours_come_newest_first_page_by_page(
    hours: ShadowHours, now: Now, shadow_on: Any, acme: TenantId
) -> None:
    for hour in range(3):
        now.at = NOON + timedelta(hours=hour)
        for version in (1, 3):
            hours.record(shadow_on(), version, tally())
    await hours.flush()
    seen: list[tuple[int, int]] = []
    cursor = None
    while True:
        page = await hours.list(acme, "sql", "live", limit=2, cursor=cursor)
        seen += [(row.hour.hour, row.version) for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [(14, 3), (14, 1), (13, 3), (13, 1), (12, 3), (12, 1)]
    await hours.close()


async def test_alias_lists_only_matching_comparisons(
    hours: ShadowHours, registry: Registry, shadow_on: Any, acme: TenantId, globex: TenantId
) -> None:
    hours.record(shadow_on("canary"), 1, tally())
    await hours.flush()
    assert (await hours.list(acme, "sql", "live")).items == ()
    with pytest.raises(AliasNotFound):
        await hours.list(acme, "sql", "canary")
    with pytest.raises(AdapterNotFound):
        await hours.list(globex, "sql", "live")
    await hours.close()


@pytest.mark.parametrize("position", ["x", "1 2", "1 2 x", "1 2 3 4", "1 99999999999 1", f"1 {1 << 31} 1", "-1 1 1"])
async def test_cursor_of_other_list_is_refused(hours: ShadowHours, acme: TenantId, position: str) -> None:
    with pytest.raises(InvalidRequest):
        await hours.list(acme, "sql", "live", cursor=encode_cursor(position))


async def test_comparisons_are_kept_when_database_write_fails(
    hours: ShadowHours, shadow_on: Any, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours.record(shadow_on(), 1, tally())
    with monkeypatch.context() as patched:

        async def away(*_: Any) -> None:
            raise DatabaseUnavailable("The database is away.")

        patched.setattr(hours, "_write", away)
        with pytest.raises(DatabaseUnavailable):
            await hours.flush()
        hours.record(shadow_on(), 1, tally())
    await hours.close()
    assert (await hours.list(acme, "sql", "live")).items[0].tally.num_requests == 2


async def test_comparisons_are_written_automatically_with_retries(
    database: Database, now: Now, shadow_on: Any, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = ShadowHours(database, clock=now, flush_s=0.005)
    write, num_tries = hours._write, 0

    async def unsteady(taken: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise DatabaseUnavailable("The database is away.")
        await write(taken)

    monkeypatch.setattr(hours, "_write", unsteady)
    hours.record(shadow_on(), 1, tally())
    async with asyncio.timeout(5):
        while not (await hours.list(acme, "sql", "live")).items:
            await asyncio.sleep(0.01)
    assert num_tries == 3
    await hours.close()


async def test_pending_comparisons_are_bounded_and_losses_counted(hours: ShadowHours, shadow_on: Any) -> None:
    for version in (*range(MAX_PENDING + 2), 0):
        hours._add(_Key("adapter", "live", NOON, version, 1), tally())
    assert (len(hours._pending), hours.num_lost) == (MAX_PENDING, 2)


async def test_comparisons_of_absent_adapter_are_dropped(hours: ShadowHours, shadow_on: Any, acme: TenantId) -> None:
    real = shadow_on()
    hours.record(Shadow(real.adapter, "01ABSENT", "live", 1.0), 1, tally())
    await hours.flush()
    assert (hours.num_lost, len(hours._pending)) == (1, 0)
    await hours.close()


async def test_unwritable_rows_lose_no_other_rows(
    hours: ShadowHours, shadow_on: Any, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shadow_on()
    for version in (1, 3, 5):
        hours.record(real, version, tally())
    for gone in ("00ABSENT", "7ABSENT"):
        hours.record(Shadow(real.adapter, gone, "live", 1.0), 1, tally())
    write, num_writes = hours._write, 0

    async def away_in_the_middle(taken: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            raise DatabaseUnavailable("The database is away.")
        await write(taken)

    monkeypatch.setattr(hours, "_write", away_in_the_middle)
    with pytest.raises(DatabaseUnavailable):
        await hours.flush()
    await hours.flush()
    assert (hours.num_lost, len(hours._pending)) == (2, 0)
    rows = (await hours.list(acme, "sql", "live")).items
    assert [(row.version, row.tally.num_requests) for row in rows] == [(5, 1), (3, 1), (1, 1)]
    await hours.close()


async def test_old_hours_are_forgotten(hours: ShadowHours, now: Now, shadow_on: Any, acme: TenantId) -> None:
    hours.record(shadow_on(), 1, tally())
    await hours.flush()
    now.at = NOON + timedelta(seconds=LIMITS.shadow_retention_s + 3601)
    hours.record(shadow_on(), 1, tally())
    await hours.flush()
    assert [row.hour.day for row in (await hours.list(acme, "sql", "live")).items] == [now.at.day]
    await hours.close()
