"""Names: resolved, listed, moved by compare-and-swap, deleted; another tenant's read as absent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from loraserve.db.session import Database
from loraserve.errors import (
    AdapterNotFound,
    AliasNotFound,
    Conflict,
    InvalidRequest,
    LoraserveError,
    ModelNotFound,
    PreconditionFailed,
    VersionNotFound,
)
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget, Precondition
from loraserve.registry.registry import Registry
from loraserve.types import BaseSpec, TenantId

SQL = parse_model("sql", "base")


async def text_of(awaitable: Any) -> tuple[type[LoraserveError], str]:
    with pytest.raises(LoraserveError) as caught:
        await awaitable
    return type(caught.value), str(caught.value)


async def test_other_tenants_objects_read_exactly_as_absent(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish("sql")
    await publish("sql", seed=1)

    def calls(tenant: TenantId, name: str) -> list[Any]:
        return [
            registry.resolve(tenant, parse_model(name, "base")),
            registry.resolve(tenant, parse_model(f"{name}@1", "base")),
            registry.get(tenant, name),
            registry.get_version(tenant, name, 1),
            registry.list_versions(tenant, name),
            registry.aliases.get(tenant, name, "live"),
            registry.aliases.set(tenant, name, "live", AliasTarget(1), actor="x"),
            registry.aliases.delete(tenant, name, "live", actor="x"),
            registry.delete_version(tenant, name, 1, actor="x"),
            registry.delete(tenant, name, actor="x"),
        ]

    foreign = [await text_of(call) for call in calls(globex, "sql")]
    absent = [await text_of(call) for call in calls(globex, "lqs")]
    assert foreign == [(kind, text.replace("lqs", "sql")) for kind, text in absent]
    assert (await registry.list(globex)).items == ()
    assert await registry.list_servable(globex) == []
    assert (await registry.list_owned(globex, limit=10, cursor=None, digests=None)).items == ()
    assert (await registry.get(acme, "sql")).aliases == {"live": 2}


async def test_every_adapter_is_listed_once_over_pages(publish: Any, registry: Registry, acme: TenantId) -> None:
    names = ["c", "a-b", "a", "b.1", "zz", "a_b"]
    for name in names:
        await publish(name)
    found: list[str] = []
    cursor = None
    while True:
        page = await registry.list(acme, limit=2, cursor=cursor)
        found += [record.name for record in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert sorted(found) == sorted(names)
    assert len(page.items) == 2


async def test_versions_are_listed_newest_first_over_pages(publish: Any, registry: Registry, acme: TenantId) -> None:
    for seed in range(3):
        await publish(seed=seed)
    first = await registry.list_versions(acme, "sql", limit=2)
    second = await registry.list_versions(acme, "sql", limit=2, cursor=first.next_cursor)
    assert [record.version for record in first.items + second.items] == [3, 2, 1]
    assert second.next_cursor is None


@pytest.mark.parametrize("cursor", ["x", "!!", "", "a" * 500, "AAAA", "é"])
async def test_a_made_up_cursor_is_refused(registry: Registry, acme: TenantId, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await registry.list_audit(acme, cursor=cursor)
    assert caught.value.param == "cursor"
    with pytest.raises(InvalidRequest):
        await registry.list(acme, limit=0)
    with pytest.raises(InvalidRequest):
        await registry.list(acme, limit=10_000)


async def test_a_moved_alias_is_resolved_at_once(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish(seed=1)
    await publish(seed=2)
    assert (await registry.resolve(acme, SQL)).version == 2
    record, is_new = await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x")
    assert (record.version, is_new) == (1, False)
    assert (await registry.resolve(acme, SQL)).version == 1
    assert (await registry.aliases.set(acme, "sql", "canary", AliasTarget(2), actor="x"))[1] is True
    assert (await registry.resolve(acme, parse_model("sql@canary", "base"))).version == 2


async def test_concurrent_conditional_moves_let_single_move_succeed(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    for seed in range(3):
        await publish(seed=seed)
    seen = Precondition(revisions=frozenset({(await registry.aliases.get(acme, "sql", "live")).revision}))
    results = await asyncio.gather(
        *(
            registry.aliases.set(acme, "sql", "live", AliasTarget(number), actor="x", condition=seen)
            for number in (1, 2)
        ),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["PreconditionFailed", "tuple"]


async def test_alias_moved_away_and_back_fails_old_precondition(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish(seed=1)
    await publish(seed=2)
    seen = Precondition(revisions=frozenset({(await registry.aliases.get(acme, "sql", "live")).revision}))
    await registry.aliases.delete(acme, "sql", "live", actor="x")
    await registry.aliases.set(acme, "sql", "live", AliasTarget(2), actor="x")
    with pytest.raises(PreconditionFailed):
        await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x", condition=seen)


async def test_conditions_on_presence(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    with pytest.raises(PreconditionFailed):
        await registry.aliases.set(
            acme, "sql", "new", AliasTarget(1), actor="x", condition=Precondition(is_present=True)
        )
    with pytest.raises(PreconditionFailed):
        await registry.aliases.set(
            acme, "sql", "live", AliasTarget(1), actor="x", condition=Precondition(is_absent=True)
        )
    await registry.aliases.set(acme, "sql", "new", AliasTarget(1), actor="x", condition=Precondition(is_absent=True))


async def test_an_alias_names_existing_versions_only(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    for number in (0, 2, -1, 2**31, 2**70):
        with pytest.raises(VersionNotFound):
            await registry.aliases.set(acme, "sql", "live", AliasTarget(number), actor="x")
    with pytest.raises(AliasNotFound):
        await registry.aliases.get(acme, "sql", "canary")


async def test_deleting_aliased_version_is_refused_naming_aliases(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish(seed=1)
    await publish(seed=2)
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(2), actor="x")
    with pytest.raises(Conflict, match=r"canary, live"):
        await registry.delete_version(acme, "sql", 2, actor="x")
    await registry.delete_version(acme, "sql", 1, actor="x")
    with pytest.raises(VersionNotFound):
        await registry.get_version(acme, "sql", 1)
    with pytest.raises(ModelNotFound):
        await registry.resolve(acme, parse_model("sql@1", "base"))


async def test_a_deleted_adapter_resolves_no_more(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    await registry.resolve(acme, SQL)
    await registry.delete(acme, "sql", actor="x")
    for call in (
        registry.resolve(acme, SQL),
        registry.get(acme, "sql"),
        registry.get_version(acme, "sql", 1),
        registry.delete(acme, "sql", actor="x"),
    ):
        with pytest.raises((AdapterNotFound, ModelNotFound)):
            await call
    assert await registry.list_servable(acme) == []


async def test_reused_name_restores_no_alias_or_version_number(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish(seed=1)
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x")
    await registry.delete(acme, "sql", actor="x")
    published = await publish(seed=1, is_promoting=False)
    assert published.is_new
    assert published.version.version == 2
    assert (await registry.get(acme, "sql")).aliases == {}
    with pytest.raises(VersionNotFound):
        await registry.get_version(acme, "sql", 1)


async def test_every_change_leaves_an_audit_row(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish(seed=1)
    await publish(seed=1)
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x")
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x")
    await registry.aliases.delete(acme, "sql", "canary", actor="x")
    await registry.delete(acme, "sql", actor="x")
    await publish("theirs", tenant=globex)
    entries = (await registry.list_audit(acme)).items
    assert [(entry.action, entry.target) for entry in reversed(entries)] == [
        ("tenant.create", "acme"),
        ("version.publish", "sql@1"),
        ("alias.move", "sql@live"),
        ("alias.move", "sql@canary"),
        ("alias.delete", "sql@canary"),
        ("adapter.delete", "sql"),
    ]
    assert {entry.tenant for entry in entries} == {"acme"}
    assert {entry.tenant for entry in (await registry.list_audit(None)).items} == {"acme", "globex", "default"}


async def test_servable_adapters_are_reachable_by_bare_name(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("b", seed=1)
    await publish("a", seed=2, is_promoting=False)
    await publish("c", seed=3)
    assert [(one.name, one.version) for one in await registry.list_servable(acme)] == [("b", 1), ("c", 1)]


async def test_owned_versions_are_found_by_digest_with_owners(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    first = await publish("a", seed=1)
    await publish("b", seed=2)
    await publish("a", seed=1, tenant=globex)
    digest = first.version.digest
    found = await registry.list_owned(None, limit=10, cursor=None, digests=[digest])
    assert [(one.tenant_name, one.name, one.version) for one in found.items] == [("acme", "a", 1), ("globex", "a", 1)]
    mine = await registry.list_owned(acme, limit=10, cursor=None, digests=[digest])
    assert [one.tenant_name for one in mine.items] == ["acme"]


async def test_known_names_resolve_during_database_outage(
    publish: Any, database: Database, small_base: BaseSpec, acme: TenantId, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    registry = Registry(database, store, lambda: small_base, monotonic=lambda: now)
    await publish(via=registry)
    assert (await registry.resolve(acme, SQL)).version == 1

    def refuse() -> Any:
        raise OSError("connection refused")

    monkeypatch.setattr(database, "_read_engine", SimpleNamespace(connect=refuse))
    now = 1030.0
    assert (await registry.resolve(acme, SQL)).version == 1
    now = 1060.0
    assert (await registry.resolve(acme, SQL)).version == 1
    code, _ = await text_of(registry.resolve(acme, parse_model("sql@1", "base")))
    assert code.code == "database_unavailable"
    now = 1063.0
    assert (await text_of(registry.resolve(acme, SQL)))[0].code == "database_unavailable"


async def test_other_processs_change_is_seen_within_cache_lifetime(
    publish: Any, database: Database, small_base: BaseSpec, registry: Registry, acme: TenantId, store: Any
) -> None:
    now = 0.0
    here = Registry(database, store, lambda: small_base, monotonic=lambda: now)
    await publish(seed=1)
    assert (await here.resolve(acme, SQL)).version == 1
    await publish(seed=2)
    now = 1.9
    assert (await here.resolve(acme, SQL)).version == 1
    now = 2.1
    assert (await here.resolve(acme, SQL)).version == 2
