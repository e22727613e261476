from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.registry.records import Published
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import AdapterRef, BaseSpec, Certificate, TenantId

Publish = Callable[..., Awaitable[Published]]


@dataclass
class Certifying:
    """An engine that gives the certificate, or fails, as it is told;
    and remembers what it was asked.
    """

    outcome: Certificate | Exception
    asked: list[AdapterRef] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, ref: AdapterRef) -> Certificate:
        self.asked.append(ref)
        await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "blobs")


@pytest.fixture
async def claim(database: Database, store: LocalStore) -> StoreClaim:
    """The store is the registry's, as at a server's start."""
    claim = StoreClaim(database, store)
    await claim.open()
    return claim


@pytest.fixture
def registry(database: Database, store: LocalStore, small_base: BaseSpec) -> Registry:
    return Registry(database, store, lambda: small_base)


@pytest.fixture
def certifying(make_certificate: Callable[..., Certificate]) -> Certifying:
    certifying = Certifying(make_certificate())
    certifying.gate.set()
    return certifying


@pytest.fixture
def certified(database: Database, store: LocalStore, small_base: BaseSpec, certifying: Certifying) -> Registry:
    """A registry whose engine certifies."""
    return Registry(database, store, lambda: small_base, certify=certifying)


@pytest.fixture
async def tenants(database: Database) -> tuple[TenantId, TenantId]:
    """Two tenants that don't know of each other: acme and globex."""
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    made = [await authenticator.tenants.create(name, actor="test") for name in ("acme", "globex")]
    return made[0].id, made[1].id


@pytest.fixture
def acme(tenants: tuple[TenantId, TenantId]) -> TenantId:
    return tenants[0]


@pytest.fixture
def globex(tenants: tuple[TenantId, TenantId]) -> TenantId:
    return tenants[1]


@pytest.fixture
def publish(registry: Registry, acme: TenantId, make_upload: Callable[..., tuple[bytes, bytes]]) -> Publish:
    """A function that publishes the adapter of a seed, as the HTTP side does."""

    async def run(
        name: str = "sql", seed: int = 0, *, tenant: TenantId = acme, via: Registry = registry, **how: object
    ) -> Published:
        config, weights = make_upload(
            seed, **{key: how.pop(key) for key in ("rank", "fill", "hidden_size") if key in how}
        )
        staged = await via.uploads.stage(tenant)
        try:
            staged.write(weights)
            return await via.publisher.publish(tenant, name, config, staged, actor="test", **how)  # type: ignore[arg-type]
        finally:
            await via.uploads.release(tenant, staged)

    return run
