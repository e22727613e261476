"""The totals that a quota reads are what counting everything gives, whatever happened."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from adapters_store import LocalStore
from loraserve import faults
from loraserve.db.models import Adapter, AdapterVersion, StorageTotal, Tenant
from loraserve.db.session import Database, utc_now
from loraserve.errors import LoraserveError, QuotaExceeded
from loraserve.registry import storage_totals
from loraserve.registry.health.checks import FAILED, STORED
from loraserve.registry.records import QUARANTINED
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.registry.storage_totals import StorageTotals, TotalsDifference, find_differences, read_totals, set_right
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.tenants import TenantLimits
from loraserve.types import BaseSpec, TenantId

NAMES = ("sql", "pirate", "support")
Step = Callable[[], Awaitable[Any]]


class Calendar:
    """Clock of a registry, set some hours later by each step of a test."""

    def __init__(self) -> None:
        self.offset = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.offset


async def differences(database: Database) -> list[TotalsDifference]:
    async with database.read() as session:
        found, last = await find_differences(session, "")
    assert last is None
    return found


async def totals(database: Database, tenant: TenantId, since: datetime | None = None) -> StorageTotals:
    async with database.read() as session:
        return await read_totals(session, tenant, deleted_since=since or utc_now())


async def counted(database: Database, tenant: TenantId) -> tuple[int, int]:
    """Count the adapters and bytes that a quota is about, from their rows."""
    adapters = (
        select(func.count()).select_from(Adapter).where(Adapter.tenant_id == tenant, Adapter.deleted_at.is_(None))
    )
    sizes = (
        select(func.sum(AdapterVersion.size_bytes))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.deleted_at.is_(None))
    )
    async with database.read() as session:
        return await session.scalar(adapters) or 0, int(await session.scalar(sizes) or 0)


def draw_step(registry: Registry, publish: Any, tenant: TenantId, rng: random.Random) -> Step:
    """Draw a change that an adapter can go through; it may be refused now."""
    name, number, seed = rng.choice(NAMES), rng.randint(1, 6), rng.randint(0, 5)
    restorer = registry.restorer
    steps: list[Step] = [
        lambda: publish(name, seed, tenant=tenant, via=registry, rank=1 + seed % 3, is_promoting=seed % 2 == 0),
        lambda: publish(name, seed, tenant=tenant, via=registry),
        lambda: publish(name, seed, tenant=tenant, via=registry, is_new_name=True),
        lambda: registry.delete(tenant, name, actor="x"),
        lambda: registry.delete_version(tenant, name, number, actor="x"),
        lambda: restorer.restore(tenant, name, actor="x"),
        lambda: restorer.restore_version(tenant, name, number, actor="x"),
    ]
    return rng.choices(steps, (4, 3, 1, 2, 4, 3, 4))[0]


async def test_each_change_is_counted(
    database: Database,
    registry: Registry,
    publish: Any,
    make_upload: Callable[..., tuple[bytes, bytes]],
    acme: TenantId,
) -> None:
    async def corrupt() -> None:
        report = [{"name": STORED, "status": FAILED, "detail": "x"}]
        async with database.write() as session:
            await session.execute(update(AdapterVersion).values(checks=report, state=QUARANTINED))

    async def repair() -> None:
        """Push the same weights with a longer config."""
        config, weights = make_upload(1)
        staged = await registry.uploads.stage(acme)
        staged.write(weights)
        await registry.publisher.publish(acme, "sql", config + b" " * 100, staged, actor="x")
        await registry.uploads.release(acme, staged)

    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    restorer = registry.restorer
    steps: list[tuple[Step, int, int]] = [
        (lambda: publish(seed=0), 1, size),
        (lambda: publish(seed=1), 1, 2 * size),
        (lambda: publish(seed=1), 1, 2 * size),
        (lambda: registry.delete_version(acme, "sql", 1, actor="x"), 1, size),
        (lambda: restorer.restore_version(acme, "sql", 1, actor="x"), 1, 2 * size),
        (lambda: registry.delete(acme, "sql", actor="x"), 0, 0),
        (lambda: restorer.restore(acme, "sql", actor="x"), 1, 2 * size),
        (corrupt, 1, 2 * size),
        (repair, 1, 2 * size + 100),
        (lambda: registry.delete(acme, "sql", actor="x"), 0, 0),
        (lambda: publish(seed=2), 1, size),
    ]
    for number, (step, num_adapters, num_bytes) in enumerate(steps):
        await step()
        found = await totals(database, acme)
        assert (found.num_adapters, found.num_bytes) == (num_adapters, num_bytes), number
        assert await differences(database) == [], number


class Fault(Exception):
    """Ends a transaction right before its commit."""


def fail() -> None:
    raise Fault


async def test_totals_match_recount_after_random_changes_and_failures(
    database: Database, store: LocalStore, small_base: BaseSpec, publish: Any, acme: TenantId, globex: TenantId
) -> None:
    calendar, rng = Calendar(), random.Random(3)
    registry = Registry(database, store, lambda: small_base, clock=calendar)
    outcomes: dict[str, int] = {}
    for number in range(120):
        calendar.offset += timedelta(hours=rng.random() * 6)
        tenant = rng.choice((acme, globex))
        step = draw_step(registry, publish, tenant, rng)
        try:
            if number % 7 == 3:
                with faults.arm("registry.before_commit", fail):
                    await step()
            elif number % 7 == 5:
                running = asyncio.ensure_future(step())
                await asyncio.sleep(rng.random() * 0.02)
                running.cancel()
                await running
            else:
                await step()
            outcome = "done"
        except (LoraserveError, Fault, asyncio.CancelledError) as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert await differences(database) == [], (number, outcome)
        found = await totals(database, tenant)
        assert (found.num_adapters, found.num_bytes) == await counted(database, tenant)
    assert outcomes["done"] > 30
    assert {"Fault", "CancelledError"} <= outcomes.keys()


async def test_concurrent_servers_count_each_change_once(
    database: Database, database_url: str, store: LocalStore, small_base: BaseSpec, publish: Any, acme: TenantId
) -> None:
    other_database = Database(database_url)
    try:
        calendar = Calendar()
        registries = [Registry(one, store, lambda: small_base, clock=calendar) for one in (database, other_database)]
        rng = random.Random(5)

        async def work(registry: Registry) -> int:
            num_done = 0
            for _ in range(12):
                try:
                    await draw_step(registry, publish, acme, rng)()
                    num_done += 1
                except LoraserveError:
                    pass
            return num_done

        for _ in range(3):
            done = await asyncio.gather(*(work(registry) for registry in registries for _ in range(2)))
            assert sum(done) > 5
            assert await differences(database) == []
            calendar.offset += timedelta(hours=9)
    finally:
        await other_database.dispose()


async def test_deleted_bytes_count_from_given_day(
    database: Database, publish: Any, store: LocalStore, small_base: BaseSpec, acme: TenantId
) -> None:
    calendar = Calendar()
    registry = Registry(database, store, lambda: small_base, clock=calendar)
    size = (await publish(via=registry)).version.size_bytes
    await publish("pirate", 1, via=registry)
    await registry.delete(acme, "sql", actor="x")
    first = calendar()
    calendar.offset = timedelta(days=2)
    await registry.delete(acme, "pirate", actor="x")
    assert await totals(database, acme, first) == StorageTotals(0, 0, 2 * size)
    assert await totals(database, acme, first + timedelta(days=1)) == StorageTotals(0, 0, size)
    assert await totals(database, acme, first + timedelta(days=3)) == StorageTotals(0, 0, 0)


async def test_deleted_duplicate_bytes_do_not_fill_quota(publish: Any, registry: Registry, database: Database) -> None:
    """The totals count equal versions each; a quota refuses only what is kept once."""
    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    limits = TenantLimits(max_stored_bytes=size + 64)
    small = (await authenticator.tenants.create("small", actor="test", limits=limits)).id
    for seed in (0, 0, 0, 1):
        await publish(seed=seed, tenant=small)
        await registry.delete(small, "sql", actor="test")
    assert (await totals(database, small)).num_deleted_bytes == 4 * size
    with pytest.raises(QuotaExceeded, match=f"^{2 * size} bytes of deleted versions"):
        await publish(seed=2, tenant=small)


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_push_does_not_wait_for_other_adapters_delete(
    database: Database, registry: Registry, publish: Any, acme: TenantId
) -> None:
    await publish("sql")
    await publish("pirate", 1)
    async with database.write() as session:
        repository = AdapterRepository(session, acme)
        await repository.delete_adapter(await repository.adapter("sql", is_locking=True), utc_now())
        await session.flush()
        # neither a push to another adapter, nor one that makes one
        async with asyncio.timeout(25):
            await publish("pirate", 2)
            await publish("support", 3)
    assert await differences(database) == []


async def test_wrong_totals_are_found_set_right_and_told(
    database: Database,
    store: LocalStore,
    claim: StoreClaim,
    registry: Registry,
    publish: Any,
    acme: TenantId,
    globex: TenantId,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_totals, "TENANTS_AT_ONCE", 1)
    for tenant in (acme, globex):
        await publish(tenant=tenant)
        await publish(seed=1, tenant=tenant)
        await registry.delete_version(tenant, "sql", 1, actor="x")
    right = [await totals(database, tenant) for tenant in (acme, globex)]
    collector = Collector(database, store, claim, retention_s=3600.0)
    await collector.collect()
    assert collector.num_wrong_totals == 0
    async with database.write() as session:
        # as by servers of an older revision that went on
        await session.execute(delete(StorageTotal).where(StorageTotal.tenant_id == globex))
        wrong = update(StorageTotal).where(StorageTotal.tenant_id == acme, StorageTotal.day == "")
        await session.execute(wrong.values(num_bytes=StorageTotal.num_bytes - 7))
    with caplog.at_level(logging.ERROR):
        await collector.collect()
    assert collector.num_wrong_totals == 3
    assert f"tenant {acme} (all that it made) lacked 0 adapters and 7 bytes" in caplog.text
    assert [await totals(database, tenant) for tenant in (acme, globex)] == right
    await collector.collect()
    assert collector.num_wrong_totals == 3


async def test_concurrent_total_corrections_add_difference_once(
    database: Database, database_url: str, publish: Any, acme: TenantId
) -> None:
    await publish()
    right = await totals(database, acme)
    async with database.write() as session:
        await session.execute(update(StorageTotal).values(num_adapters=0))
    other = Database(database_url)

    async def work(database: Database) -> list[TotalsDifference]:
        async with database.write() as session:
            found, _ = await set_right(session, "")
            await asyncio.sleep(0.05)
            return found

    try:
        found = await asyncio.gather(work(database), work(other))
    finally:
        await other.dispose()
    assert sorted(map(len, found)) == [0, 1]
    assert await totals(database, acme) == right


async def test_deleted_tenants_rows_stay_counted(
    database: Database, registry: Registry, publish: Any, globex: TenantId
) -> None:
    await publish(tenant=globex)
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    await authenticator.tenants.delete("globex", actor="test")
    async with database.read() as session:
        assert await session.scalar(select(Tenant.deleted_at).where(Tenant.id == globex)) is not None
    assert await differences(database) == []
