"""How many servers share a database, each by its own clock."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest
from sqlalchemy import func, select
from stopped_clock import StoppedClock

from loraserve.db.models import ServerRow
from loraserve.db.session import Database
from loraserve.errors import DatabaseUnavailable
from loraserve.limits import LIMITS
from loraserve.tenancy.limits.admission import RateUse
from loraserve.tenancy.limits.servers import Servers
from loraserve.types import TenantId


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


async def num_rows(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(ServerRow)) or 0


@pytest.mark.postgres
async def test_beating_servers_are_counted_by_each_server(database: Database, clock: StoppedClock) -> None:
    servers = [Servers(database, monotonic=clock) for _ in range(3)]
    for _ in range(3):
        for server in servers:
            await server.beat()
    assert [server.num_live for server in servers] == [3, 3, 3]


@pytest.mark.postgres
async def test_heartbeats_carry_uses_of_rates(database: Database, clock: StoppedClock) -> None:
    acme, globex = TenantId("a" * 26), TenantId("b" * 26)
    uses = {acme: RateUse(0.25, 1.0)}
    here = Servers(database, monotonic=clock)
    there = Servers(database, uses=lambda: uses, monotonic=clock)
    for _ in range(2):
        await there.beat()
        await here.beat()
    assert here.told_at == clock.now_s
    assert here.uses_elsewhere(acme) == [RateUse(0.25, 1.0)]
    assert here.uses_elsewhere(globex) == there.uses_elsewhere(acme) == []
    uses.clear()
    await there.beat()
    await here.beat()
    assert here.uses_elsewhere(acme) == []
    uses[acme] = RateUse(0.5, 0.5)
    await there.beat()
    await here.beat()
    assert here.uses_elsewhere(acme) == [RateUse(0.5, 0.5)]
    # of a killed one nothing counts
    clock.now_s += LIMITS.server_silence_s + 1
    await here.beat()
    assert here.uses_elsewhere(acme) == []


async def test_killed_server_stops_counting_after_silence(database: Database, clock: StoppedClock) -> None:
    here, killed = Servers(database, monotonic=clock), Servers(database, monotonic=clock)
    for _ in range(2):
        await killed.beat()
        await here.beat()
    assert here.num_live == 2
    clock.now_s += LIMITS.server_silence_s + 1
    await here.beat()
    assert here.num_live == 1


async def test_killed_servers_row_never_counts_for_later_server(database: Database, clock: StoppedClock) -> None:
    await Servers(database, monotonic=clock).beat()
    here = Servers(database, monotonic=clock)
    for _ in range(3):
        await here.beat()
    assert here.num_live == 1


async def test_rows_of_the_dead_are_removed(database: Database, clock: StoppedClock) -> None:
    await Servers(database, monotonic=clock).beat()
    here = Servers(database, monotonic=clock)
    await here.beat()
    clock.now_s += 3601
    await here.beat()
    assert await num_rows(database) == 1


async def test_closing_server_leaves_immediately(database: Database, clock: StoppedClock) -> None:
    here, leaving = Servers(database, monotonic=clock), Servers(database, monotonic=clock)
    leaving.start()
    while not await num_rows(database):
        pass
    await here.beat()
    await leaving.beat()
    await here.beat()
    assert here.num_live == 2
    await leaving.close()
    await here.beat()
    assert (here.num_live, await num_rows(database)) == (1, 1)


async def test_last_count_stands_during_outage_with_single_warning(
    database: Database, clock: StoppedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loraserve.tenancy.limits.servers.LIMITS", LIMITS.__class__(server_beat_s=0.001))
    here, other = Servers(database, monotonic=clock), Servers(database, monotonic=clock)
    for _ in range(2):
        await other.beat()
        await here.beat()
    num_tries = 0

    def away() -> NoReturn:
        nonlocal num_tries
        num_tries += 1
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(database, "write", away)
        here.start()
        while num_tries < 5:
            await asyncio.sleep(0.001)
        assert here.num_live == 2
        await here.close()
    assert [record.levelname for record in caplog.records if "heartbeats" in record.message] == ["WARNING"]


async def test_server_with_removed_row_writes_row_again(database: Database, clock: StoppedClock) -> None:
    paused, here = Servers(database, monotonic=clock), Servers(database, monotonic=clock)
    await paused.beat()
    await here.beat()
    clock.now_s += 3601
    await here.beat()
    for _ in range(2):
        await paused.beat()
        await here.beat()
    assert here.num_live == 2
