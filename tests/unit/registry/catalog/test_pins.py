"""Operators' pins outlive processes, reach every server, and hold nothing for what isn't served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.errors import (
    AdapterNotFound,
    AdapterQuarantined,
    AdapterUnavailable,
    Conflict,
    DatabaseUnavailable,
    EngineUnavailable,
)
from loraserve.limits import LIMITS, Limits
from loraserve.registry.catalog import pins as pins_module
from loraserve.registry.catalog.pins import MAX_RETRY_S, RETRY_S
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId


@dataclass
class Engine:
    """Holds what it is told to hold, until its process ends."""

    is_ready: bool = True
    num_restarts: int = 0
    held: set[Digest] = field(default_factory=set)
    error: Exception | None = None
    num_asked: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def pin(self, ref: AdapterRef) -> None:
        self.num_asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.held.add(ref.digest)

    async def unpin(self, ref: AdapterRef) -> None:
        if self.error is not None:
            raise self.error
        self.held.discard(ref.digest)

    def restart(self) -> None:
        self.num_restarts += 1
        self.held.clear()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    registry: Registry
    engine: Engine
    clock: Clock

    async def sync(self) -> None:
        await self.registry.pins.sync()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def make_server(database: Database, store: LocalStore, small_base: BaseSpec) -> AsyncIterator[Any]:
    """A function that makes a server on the one database."""
    servers: list[Server] = []

    def make() -> Server:
        engine, clock = Engine(), Clock()
        engine.gate.set()
        registry = Registry(database, store, lambda: small_base, pinning=engine, monotonic=clock)
        servers.append(Server(registry, engine, clock))
        return servers[-1]

    yield make
    for server in servers:
        await server.registry.pins.close()


async def pin(server: Server, tenant: TenantId, name: str = "sql", number: int = 1, wait_s: float = 5.0) -> bool:
    return await server.registry.pins.pin(tenant, name, number, actor="x", once=None, wait_s=wait_s)


async def unpin(server: Server, tenant: TenantId, name: str = "sql", number: int = 1) -> bool:
    return await server.registry.pins.unpin(tenant, name, number, actor="x", once=None, wait_s=5.0)


async def test_a_pin_outlives_the_engine_and_the_server(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    digest = (await publish(via=server.registry)).version.digest
    assert await pin(server, acme)
    assert server.engine.held == {digest}
    server.engine.restart()
    await server.sync()
    assert server.engine.held == {digest}
    next_start = make_server()
    await next_start.sync()
    assert next_start.engine.held == {digest}
    assert (next_start.registry.pins.num_wanted, next_start.registry.pins.num_held) == (1, 1)


async def test_pin_and_unpin_reach_every_server(publish: Any, make_server: Any, acme: TenantId) -> None:
    here, there = make_server(), make_server()
    digest = (await publish(via=here.registry)).version.digest
    await pin(here, acme)
    await there.sync()
    assert there.engine.held == {digest}
    assert await unpin(here, acme)
    assert here.engine.held == set()
    await there.sync()
    assert there.engine.held == set()


async def test_bytes_pinned_by_other_tenant_stay_held(
    publish: Any, make_server: Any, acme: TenantId, globex: TenantId
) -> None:
    server = make_server()
    digest = (await publish(via=server.registry)).version.digest
    await publish("theirs", tenant=globex, via=server.registry)
    await pin(server, acme)
    await pin(server, globex, "theirs")
    await unpin(server, acme)
    await server.sync()
    assert server.engine.held == {digest}
    await unpin(server, globex, "theirs")
    assert server.engine.held == set()


async def test_unloadable_version_is_not_pinned(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    await publish(via=server.registry)
    server.engine.error = AdapterUnavailable("It can't be loaded.")
    with pytest.raises(AdapterUnavailable):
        await pin(server, acme)
    server.engine.error = None
    await server.sync()
    assert (server.engine.held, server.registry.pins.num_wanted) == (set(), 0)


async def test_later_refused_pin_is_retried_with_growing_delay(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    digest = (await publish(via=server.registry)).version.digest
    await pin(server, acme)
    server.engine.restart()
    server.engine.error = AdapterUnavailable("It can't be loaded.")
    server.engine.num_asked = 0
    for number, delay in enumerate((RETRY_S, 2 * RETRY_S, 4 * RETRY_S), 1):
        await server.sync()
        server.clock.now += delay - 0.01
        await server.sync()
        assert server.engine.num_asked == number
        server.clock.now += 0.02
    server.engine.error = None
    server.clock.now += MAX_RETRY_S
    await server.sync()
    assert server.engine.held == {digest}


async def test_slow_pin_continues_and_is_durable(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    digest = (await publish(via=server.registry)).version.digest
    server.engine.gate.clear()
    assert await pin(server, acme, wait_s=0.01) is False
    await server.sync()
    await server.sync()
    # one load is waited for at a time
    assert server.engine.num_asked == 2
    server.engine.gate.set()
    await server.sync()
    assert server.engine.held == {digest}


async def test_unwritten_pin_is_released(
    publish: Any, make_server: Any, acme: TenantId, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    await publish(via=server.registry)

    def refuse() -> Any:
        raise OSError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(database, "_writers", refuse)
        with pytest.raises(DatabaseUnavailable):
            await pin(server, acme)
    await server.sync()
    assert server.engine.held == set()


async def test_unpin_missed_by_engine_is_repeated(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    await publish(via=server.registry)
    await pin(server, acme)
    server.engine.error = EngineUnavailable("It is away.")
    assert await unpin(server, acme) is False
    server.engine.error = None
    await server.sync()
    assert server.engine.held == set()


@pytest.mark.parametrize("is_alone", [True, False])
async def test_deleted_version_is_held_only_after_restore(
    publish: Any, make_server: Any, acme: TenantId, is_alone: bool
) -> None:
    server = make_server()
    registry = server.registry
    digest = (await publish(via=registry, is_promoting=False)).version.digest
    await pin(server, acme)
    if is_alone:
        await registry.delete_version(acme, "sql", 1, actor="x")
    else:
        await registry.delete(acme, "sql", actor="x")
    await server.sync()
    assert server.engine.held == set()
    if is_alone:
        await registry.restorer.restore_version(acme, "sql", 1, actor="x")
    else:
        await registry.restorer.restore(acme, "sql", actor="x")
    await server.sync()
    assert server.engine.held == {digest}


async def test_quarantined_version_is_neither_pinned_nor_held(
    publish: Any, make_server: Any, acme: TenantId, database: Database
) -> None:
    server = make_server()
    await publish(via=server.registry)
    await pin(server, acme)
    async with database.write() as session:
        repository = AdapterRepository(session, acme)
        (await repository.version(await repository.adapter("sql"), 1)).state = "quarantined"
    await server.sync()
    assert server.engine.held == set()
    with pytest.raises(AdapterQuarantined):
        await pin(server, acme)


async def test_pins_are_bounded(
    publish: Any, make_server: Any, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    for seed in range(2):
        await publish(seed=seed, via=server.registry)
    monkeypatch.setattr(pins_module, "LIMITS", Limits(max_operator_pins=1))
    await pin(server, acme)
    with pytest.raises(Conflict, match="the maximum"):
        await pin(server, acme, number=2)
    await pin(server, acme)
    await server.sync()
    assert len(server.engine.held) == 1


async def test_pin_and_unpin_each_leave_single_audit_row(publish: Any, make_server: Any, acme: TenantId) -> None:
    server = make_server()
    await publish(via=server.registry)
    for _ in range(2):
        await pin(server, acme)
    for _ in range(2):
        await unpin(server, acme)
    actions = [row.action for row in (await server.registry.list_audit(acme)).items]
    assert actions[:2] == ["version.unpin", "version.pin"]
    assert actions.count("version.pin") == 1


async def test_other_tenants_version_cannot_be_pinned(
    publish: Any, make_server: Any, acme: TenantId, globex: TenantId
) -> None:
    server = make_server()
    await publish(via=server.registry)
    for call in (pin, unpin):
        with pytest.raises(AdapterNotFound):
            await call(server, globex)
    assert server.engine.num_asked == 0


def test_servers_agree_within_seconds() -> None:
    assert LIMITS.pin_sync_s <= 2
