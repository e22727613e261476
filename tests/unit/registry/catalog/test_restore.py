"""Deleted adapters and versions come back as they were, within the retention."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.db.models import Tenant
from loraserve.db.session import Database, utc_now
from loraserve.errors import (
    AdapterNotFound,
    AlreadyExists,
    Conflict,
    LoraserveError,
    ModelNotFound,
    QuotaExceeded,
    VersionNotFound,
)
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget, ShadowPart, SplitPart
from loraserve.registry.registry import Registry
from loraserve.types import BaseSpec, TenantId

SQL = parse_model("sql", "base")


class Calendar:
    """What the registry takes for the time."""

    def __init__(self) -> None:
        self.offset = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.offset


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def registry(database: Database, store: LocalStore, small_base: BaseSpec, calendar: Calendar) -> Registry:
    return Registry(database, store, lambda: small_base, retention_s=3600.0, clock=calendar)


async def test_adapter_is_restored_with_aliases_and_metadata(publish: Any, registry: Registry, acme: TenantId) -> None:
    for seed in range(3):
        await publish(seed=seed)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(3), actor="x")
    await registry.delete_version(acme, "sql", 2, actor="x")
    split = AliasTarget.over([SplitPart(1, 1), SplitPart(3, 2)])
    canary, _ = await registry.aliases.set(acme, "sql", "canary", split, ShadowPart(1, 0.5), actor="x")
    await registry.metadata.edit(acme, "sql", Edit(notes="n", tags={"a": "b"}, fallback="1"), actor="x")
    before = await registry.get(acme, "sql")
    await registry.delete(acme, "sql", actor="x")
    with pytest.raises(ModelNotFound):
        await registry.resolve(acme, SQL)
    after = await registry.restorer.restore(acme, "sql", actor="x")
    assert (await registry.resolve(acme, SQL)).version == 3
    shown = ("aliases", "num_versions", "latest_version", "notes", "tags", "fallback", "created_at")
    assert [getattr(after, name) for name in shown] == [getattr(before, name) for name in shown]
    assert await registry.aliases.get(acme, "sql", "canary") == canary
    with pytest.raises(VersionNotFound):
        await registry.get_version(acme, "sql", 2)
    assert (await registry.list_audit(acme, limit=1)).items[0].action == "adapter.restore"


async def test_version_is_restored_under_same_number(publish: Any, registry: Registry, acme: TenantId) -> None:
    first = await publish(seed=1)
    await publish(seed=2)
    await registry.delete_version(acme, "sql", 1, actor="x")
    restored = await registry.restorer.restore_version(acme, "sql", 1, actor="x")
    assert (restored.digest, restored.aliases) == (first.version.digest, ())
    assert (await registry.resolve(acme, parse_model("sql@1", "base"))).digest == first.version.digest


async def test_restore_refuses_bytes_published_again(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish(seed=1)
    await publish(seed=2)
    await registry.delete_version(acme, "sql", 1, actor="x")
    await publish(seed=1)
    with pytest.raises(AlreadyExists, match="sql@3 has the same bytes"):
        await registry.restorer.restore_version(acme, "sql", 1, actor="x")


async def test_expired_tombstone_reads_like_absent_version(
    publish: Any, registry: Registry, acme: TenantId, calendar: Calendar
) -> None:
    for seed in (1, 2):
        await publish(seed=seed)
    await registry.delete_version(acme, "sql", 1, actor="x")
    calendar.offset = timedelta(seconds=3601)
    texts = []
    for number in (1, 9):
        with pytest.raises(VersionNotFound) as caught:
            await registry.restorer.restore_version(acme, "sql", number, actor="x")
        texts.append(str(caught.value))
    await registry.delete(acme, "sql", actor="x")
    calendar.offset *= 2
    with pytest.raises(AdapterNotFound) as gone:
        await registry.restorer.restore(acme, "sql", actor="x")
    with pytest.raises(AdapterNotFound) as absent:
        await registry.restorer.restore(acme, "lqs", actor="x")
    assert texts[0] == texts[1]
    assert str(gone.value) == str(absent.value).replace("lqs", "sql")


async def test_existing_adapter_or_version_is_not_restored(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    with pytest.raises(AlreadyExists):
        await registry.restorer.restore(acme, "sql", actor="x")
    with pytest.raises(AlreadyExists):
        await registry.restorer.restore_version(acme, "sql", 1, actor="x")


async def test_other_tenants_tombstones_read_as_absent(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    for seed in (1, 2):
        await publish(seed=seed)
        await publish("gone", seed=seed)
    await registry.delete_version(acme, "sql", 1, actor="x")
    await registry.delete(acme, "gone", actor="x")

    async def text(call: Any) -> str:
        with pytest.raises(LoraserveError) as caught:
            await call
        return f"{type(caught.value)} {caught.value}"

    restorer = registry.restorer
    for theirs, absent in (
        (restorer.restore(globex, "gone", actor="x"), restorer.restore(globex, "N", actor="x")),
        (restorer.restore(globex, "sql", actor="x"), restorer.restore(globex, "N", actor="x")),
        (
            restorer.restore_version(globex, "sql", 1, actor="x"),
            restorer.restore_version(globex, "N", 1, actor="x"),
        ),
    ):
        found, other = await text(theirs), await text(absent)
        assert found.replace("gone", "N").replace("sql", "N") == other


async def test_restore_counts_against_tenant_quotas(
    publish: Any, registry: Registry, database: Database, acme: TenantId
) -> None:
    size = (await publish("sql")).version.size_bytes
    await registry.delete(acme, "sql", actor="x")
    for limits in ({"max_adapters": 0}, {"max_stored_bytes": size - 1}):
        async with database.write() as session:
            tenant = await session.get(Tenant, acme)
            assert tenant is not None
            tenant.limits = limits
        with pytest.raises(QuotaExceeded):
            await registry.restorer.restore(acme, "sql", actor="x")
    with pytest.raises(AdapterNotFound):
        await registry.get(acme, "sql")


async def test_adapter_with_lost_bytes_is_not_restored(
    publish: Any, registry: Registry, store: LocalStore, acme: TenantId
) -> None:
    version = (await publish()).version
    await registry.delete(acme, "sql", actor="x")
    await asyncio.to_thread(store.delete, version.weights_blob)
    with pytest.raises(Conflict, match="stored bytes"):
        await registry.restorer.restore(acme, "sql", actor="x")
