"""Metering: each event is counted once, whatever happens to the server or its database."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve import faults
from loraserve.db.models import UsageHour, UsageJournal
from loraserve.db.session import Database
from loraserve.errors import DatabaseUnavailable
from loraserve.limits import Limits
from loraserve.tenancy.billing import meter as usage
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.meter import UsageEvent, UsageMeter
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import TenantId

NOON = 1_800_014_400.0


@pytest.fixture
async def acme(authenticator: Authenticator) -> TenantId:
    return (await authenticator.tenants.create("acme", actor="test")).id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "usage"


@pytest.fixture
async def meter(database: Database, folder: Path) -> AsyncIterator[UsageMeter]:
    meter = UsageMeter(database, folder)
    yield meter
    await meter.close()


def event(tenant: TenantId, completion_tokens: int = 1, **fields: Any) -> UsageEvent:
    whole = {"owner": "", "adapter": "sql", "version": 1, "num_requests": 0, "prompt_tokens": 0, "cached_tokens": 0}
    return UsageEvent(tenant, completion_tokens=completion_tokens, **{**whole, "at": NOON, **fields})


async def counted(database: Database) -> list[tuple[Any, ...]]:
    columns = (UsageHour.adapter, UsageHour.version, UsageHour.num_requests, UsageHour.completion_tokens)
    async with database.read() as session:
        rows = (await session.execute(select(*columns, UsageHour.hour).order_by(*columns))).all()
    return [(*row[:4], row[4].hour) for row in rows]


async def journals(database: Database) -> list[str]:
    async with database.read() as session:
        return list((await session.scalars(select(UsageJournal.id))).all())


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Source:
    """Usage of one token at each time that it is asked for."""

    def __init__(self, meter: UsageMeter, tenant: TenantId) -> None:
        self._meter, self._tenant = meter, tenant
        self.num_records = 0

    def record(self) -> None:
        self.num_records += 1
        self._meter.record(event(self._tenant))


async def test_expected_usage_is_recorded_once(database: Database, meter: UsageMeter, acme: TenantId) -> None:
    source = Source(meter, acme)
    for _ in range(3):
        meter.expect(source)
    assert source.num_records == 0
    await meter.flush()
    await meter.flush()
    assert source.num_records == 1
    assert [row[3] for row in await counted(database)] == [1]


async def test_forgotten_source_records_no_usage(meter: UsageMeter, acme: TenantId) -> None:
    source = Source(meter, acme)
    meter.expect(source)
    meter.forget(source)
    await meter.flush()
    assert source.num_records == 0


async def test_failed_source_keeps_no_source_from_record(
    meter: UsageMeter, acme: TenantId, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Source):
        def record(self) -> None:
            raise LookupError("gone")

    sources = [Source(meter, acme) for _ in range(8)]
    # a set has any order: some follow the one that fails, whichever comes first
    for source in (*sources[:4], Failing(meter, acme), *sources[4:]):
        meter.expect(source)
    await meter.flush()
    assert [source.num_records for source in sources] == [1] * 8
    assert "a request's usage can't be recorded now (gone)" in caplog.text


async def test_journal_has_usage_while_database_hangs(
    meter: UsageMeter, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = asyncio.Event()

    @asynccontextmanager
    async def write() -> AsyncIterator[AsyncSession]:
        hangs.set()
        await asyncio.Event().wait()
        yield AsyncSession()

    monkeypatch.setattr(meter.database, "write", write)
    meter.expect(Source(meter, acme))
    meter.start()
    async with asyncio.timeout(60):
        await hangs.wait()
        before, source = meter.journal_bytes, Source(meter, acme)
        meter.expect(source)
        while meter.journal_bytes == before:
            await asyncio.sleep(0.01)
    assert source.num_records == 1
    for task in meter._tasks:
        task.cancel()


async def test_running_meter_collects_expected_usage(meter: UsageMeter, acme: TenantId) -> None:
    source = Source(meter, acme)
    meter.start()
    meter.expect(source)
    async with asyncio.timeout(60):
        while not source.num_records:
            await asyncio.sleep(0.01)


def die(meter: UsageMeter) -> None:
    """The process is killed: nothing is flushed, and its lock is gone."""
    meter._journal.close()


async def test_events_add_up_by_adapter_version_and_hour(database: Database, meter: UsageMeter, acme: TenantId) -> None:
    meter.record(event(acme, 5, num_requests=1))
    meter.record(event(acme, 7, at=NOON + 3599))
    meter.record(event(acme, 11, at=NOON + 3600))
    meter.record(event(acme, 13, version=2))
    await meter.flush()
    meter.record(event(acme, 17, num_requests=1))
    await meter.flush()
    assert await counted(database) == [("sql", 1, 0, 11, 13), ("sql", 1, 2, 29, 12), ("sql", 2, 0, 13, 12)]


async def test_sealed_usage_survives_kill_and_counts_once(
    database: Database, meter: UsageMeter, folder: Path, acme: TenantId
) -> None:
    killed = UsageMeter(database, folder)
    killed.record(event(acme, 5))
    await killed.flush()
    killed.record(event(acme, 7))
    killed.persist()
    killed.record(event(acme, 1000))
    die(killed)
    assert await meter.recover() == 1
    assert await meter.recover() == 0
    assert await counted(database) == [("sql", 1, 0, 12, 12)]
    assert killed._journal.id not in await journals(database)
    assert not [name for name in names(folder) if killed._journal.id in name]


async def test_kill_between_commit_and_clear_counts_usage_once(
    database: Database, meter: UsageMeter, folder: Path, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = UsageMeter(database, folder)
    monkeypatch.setattr(killed._journal, "clear", lambda: None)
    killed.record(event(acme, 5))
    await killed.flush()
    die(killed)
    await meter.recover()
    assert await counted(database) == [("sql", 1, 0, 5, 12)]


@pytest.mark.parametrize("has_committed", [True, False])
async def test_a_commit_of_unknown_fate_counts_once(
    database: Database, meter: UsageMeter, acme: TenantId, has_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = database.write, 1

    @asynccontextmanager
    async def write() -> AsyncIterator[Any]:
        nonlocal failures
        async with real() as session:
            yield session
            if failures and not has_committed:
                failures -= 1
                raise DatabaseUnavailable("The connection broke.")
        if failures:
            failures -= 1
            raise DatabaseUnavailable("The connection broke.")

    monkeypatch.setattr(database, "write", write)
    meter.record(event(acme, 5))
    with pytest.raises(DatabaseUnavailable):
        await meter.flush()
    meter.record(event(acme, 7))
    await meter.flush()
    assert await counted(database) == [("sql", 1, 0, 12, 12)]


@pytest.fixture
def away(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The database is away until the patch is undone."""

    @asynccontextmanager
    async def write() -> AsyncIterator[Any]:
        raise DatabaseUnavailable("The registry's database can't be reached now.")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "write", write)
        yield patch


async def test_usage_waits_during_database_outage(
    database: Database, meter: UsageMeter, acme: TenantId, away: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        meter.record(event(acme, 5))
        with pytest.raises(DatabaseUnavailable):
            await meter.flush()
    assert meter.lag_s > 0
    away.undo()
    await meter.flush()
    assert meter.lag_s == 0
    assert await counted(database) == [("sql", 1, 0, 15, 12)]


async def test_journal_is_compacted_exactly_during_database_outage(
    database: Database, folder: Path, acme: TenantId, away: pytest.MonkeyPatch, meter: UsageMeter
) -> None:
    killed = UsageMeter(database, folder)
    for number in range(50):
        killed.record(event(acme, 1))
        killed.persist()
        if number == 20:
            with pytest.raises(DatabaseUnavailable):
                await killed.flush()
    before = killed.journal_bytes
    away.setattr(usage, "LIMITS", Limits(max_usage_journal_bytes=100))
    await killed._sync_journal()
    assert killed.journal_bytes < before / 10
    die(killed)
    away.undo()
    await meter.recover()
    assert await counted(database) == [("sql", 1, 0, 50, 12)]


async def test_full_disk_refuses_and_loses_no_usage(database: Database, meter: UsageMeter, acme: TenantId) -> None:
    with faults.arm("usage.before_write", "ENOSPC"):
        meter.record(event(acme, 5))
        meter.persist()
        assert meter.num_failed_writes == 1
        await meter.flush()
    assert await counted(database) == [("sql", 1, 0, 5, 12)]


async def test_journal_with_unknown_tenants_is_counted_and_kept(
    database: Database, meter: UsageMeter, folder: Path, acme: TenantId
) -> None:
    stranger = UsageMeter(database, folder)
    stranger.record(event(TenantId("0" * 26), 5))
    stranger.record(event(acme, 2))
    stranger.persist()
    die(stranger)
    assert await meter.recover() == 0
    assert f"{stranger._journal.id}.refused" in names(folder)
    assert await meter.recover() == 0
    assert await counted(database) == [("sql", 1, 0, 2, 12)]


async def test_kill_before_setting_aside_keeps_unknown_tenants(
    database: Database, meter: UsageMeter, folder: Path, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = UsageMeter(database, folder)
    stranger.record(event(TenantId("0" * 26), 5))
    stranger.record(event(acme, 2))
    stranger.persist()
    die(stranger)
    write = database.write

    @asynccontextmanager
    async def killed_after_the_commit() -> AsyncIterator[Any]:
        async with write() as session:
            yield session
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(database, "write", killed_after_the_commit)
        with pytest.raises(InterruptedError):
            await meter.recover()
    await meter.recover()
    assert f"{stranger._journal.id}.refused" in names(folder)
    assert f"{stranger._journal.id}.journal" not in names(folder)
    assert await counted(database) == [("sql", 1, 0, 2, 12)]


async def test_tenant_lost_from_database_delays_no_other_usage(
    database: Database, meter: UsageMeter, acme: TenantId, caplog: pytest.LogCaptureFixture
) -> None:
    meter.record(event(TenantId("0" * 26), 5))
    meter.record(event(acme, 2))
    await meter.flush()
    assert await counted(database) == [("sql", 1, 0, 2, 12)]
    assert "0" * 26 in caplog.text


async def test_a_thousand_adapters_are_counted_at_once(database: Database, meter: UsageMeter, acme: TenantId) -> None:
    for number in range(1200):
        meter.record(event(acme, number, adapter=f"a-{number}"))
    await meter.flush()
    found = await counted(database)
    assert (len(found), sum(row[3] for row in found)) == (1200, 1199 * 600)


async def test_closed_meter_leaves_no_file_or_row(database: Database, folder: Path, acme: TenantId) -> None:
    meter = UsageMeter(database, folder)
    meter.start()
    meter.record(event(acme, 5))
    await meter.close()
    assert names(folder) == []
    assert await journals(database) == []
    assert await counted(database) == [("sql", 1, 0, 5, 12)]


async def test_two_servers_add_to_the_same_hours(
    database: Database, meter: UsageMeter, folder: Path, acme: TenantId
) -> None:
    other = UsageMeter(database, folder / "other")
    for one in (meter, other, meter):
        one.record(event(acme, 5))
        await one.flush()
    await other.close()
    assert await counted(database) == [("sql", 1, 0, 15, 12)]


async def test_recorded_events_reach_database_automatically(
    database: Database, meter: UsageMeter, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "LIMITS", Limits(usage_journal_s=0.01, usage_flush_s=0.02))
    meter.start()
    meter.record(event(acme, 5))
    for _ in range(1000):
        if await counted(database):
            break
        await asyncio.sleep(0.01)
    assert await counted(database) == [("sql", 1, 0, 5, 12)]
    assert meter.recorded == Amounts(0, 0, 0, 5)


async def test_usage_of_running_streams_is_journaled_periodically(
    database: Database, folder: Path, meter: UsageMeter, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "LIMITS", Limits(usage_journal_s=0.01, usage_flush_s=1000))
    killed = UsageMeter(database, folder)
    killed.start()
    await asyncio.sleep(0.1)
    killed.record(event(acme, 5))
    before = killed.journal_bytes
    for _ in range(200):
        if killed.journal_bytes > before:
            break
        await asyncio.sleep(0.01)
    for task in killed._tasks:
        task.cancel()
    die(killed)
    await meter.recover()
    assert await counted(database) == [("sql", 1, 0, 5, 12)]
