"""Aliases that lead to several versions, shadow another one, and move back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters_store import LocalStore
from loraserve.adapters.ir import AdapterIR
from loraserve.db.models import Grant
from loraserve.db.session import Database, utc_now
from loraserve.errors import (
    AdapterQuarantined,
    AdapterUncertified,
    AdapterUnsupported,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    VersionNotFound,
)
from loraserve.registry.model_name import parse_terms
from loraserve.registry.records import AliasTarget, ShadowPart, SplitPart
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.types import BaseSpec, TenantId

SQL = parse_terms("sql", "base")
CANARY = AliasTarget.over([SplitPart(3, 90), SplitPart(2, 10)])


async def publish_three(publish: Any) -> None:
    for seed in range(3):
        await publish(seed=seed)


async def quarantine(database: Database, tenant: TenantId, number: int) -> None:
    async with database.write() as session:
        repository = AdapterRepository(session, tenant)
        row = await repository.version(await repository.adapter("sql"), number)
        row.state = "quarantined"


async def test_split_binds_users_to_versions_and_names_largest(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish_three(publish)
    record, is_new = await registry.aliases.set(acme, "sql", "live", CANARY, actor="x")
    assert (record.version, record.target, is_new) == (3, CANARY, False)
    # a user's place depends on the adapter's random id: of 60 users all were on the version of 90 %
    # in one run of 500
    bound = [await registry.bind(acme, SQL, sticky=str(user)) for user in range(400)]
    assert {one.adapter.version for one in bound if one.adapter} == {2, 3}
    assert (await registry.get(acme, "sql")).aliases == {"live": 3}
    assert [(await registry.get_version(acme, "sql", number)).aliases for number in (1, 2, 3)] == [
        (),
        ("live",),
        ("live",),
    ]


async def test_bound_request_keeps_version_when_alias_moves(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    bound = await registry.bind(acme, SQL, sticky=None)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x")
    await registry.delete_version(acme, "sql", 3, actor="x")
    assert bound.adapter is not None
    assert bound.adapter.version == 3
    now = await registry.bind(acme, SQL, sticky=None)
    assert now.adapter is not None
    assert now.adapter.version == 1


async def test_sum_uses_version_assigned_to_user_by_split(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", CANARY, ShadowPart(1, 1.0), actor="x")
    for user in map(str, range(20)):
        alone = await registry.bind(acme, SQL, sticky=user)
        double = await registry.bind(acme, parse_terms("2*sql", "base"), sticky=user)
        assert alone.adapter is not None
        assert double.adapter is not None
        assert [part.adapter for part in double.adapter.parts] == [alone.adapter]
        assert (alone.shadow is None, double.shadow) == (False, None)


async def test_shadow_is_bound_with_answering_version(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(3), ShadowPart(1, 0.5), actor="x")
    shadow = (await registry.bind(acme, SQL, sticky=None)).shadow
    assert shadow is not None
    assert (shadow.adapter.version, shadow.share) == (1, 0.5)


async def test_shadow_equal_to_answering_version_is_removed(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(3), ShadowPart(1, 0.5), actor="x")
    await publish(seed=1)
    assert (await registry.aliases.get(acme, "sql", "live")).shadow == ShadowPart(1, 0.5)
    await publish(seed=0)
    record = await registry.aliases.get(acme, "sql", "live")
    assert (record.version, record.shadow) == (1, None)


async def test_a_publish_ends_the_split(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", CANARY, actor="x")
    await publish(seed=9)
    assert (await registry.aliases.get(acme, "sql", "live")).target == AliasTarget(4)


@pytest.mark.parametrize("number", [2, 3])
async def test_a_version_of_a_split_is_not_deleted(
    publish: Any, registry: Registry, acme: TenantId, number: int
) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "canary", CANARY, actor="x")
    await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x")
    with pytest.raises(Conflict, match="aliases canary point to it"):
        await registry.delete_version(acme, "sql", number, actor="x")


async def test_a_shadow_is_not_deleted(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(3), ShadowPart(1, 0.5), actor="x")
    with pytest.raises(Conflict, match="the shadow of the aliases live"):
        await registry.delete_version(acme, "sql", 1, actor="x")


async def test_rollback_undoes_move_and_second_rollback_redoes(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", CANARY, actor="x")
    await registry.aliases.set(acme, "sql", "live", AliasTarget(2), ShadowPart(1, 0.5), actor="x")
    back = await registry.aliases.rollback(acme, "sql", "live", actor="x")
    assert (back.target, back.shadow) == (CANARY, ShadowPart(1, 0.5))
    # a user's place depends on the adapter's random id: of 60 users all were on the version of 90 %
    # in one run of 500
    bound = [await registry.bind(acme, SQL, sticky=str(user)) for user in range(400)]
    assert {one.adapter.version for one in bound if one.adapter} == {2, 3}
    assert (await registry.aliases.rollback(acme, "sql", "live", actor="x")).target == AliasTarget(2)
    entry = (await registry.list_audit(acme, limit=2)).items[1]
    assert (entry.action, entry.detail["after"]) == ("alias.rollback", "2=10,3=90")


async def test_adding_shadow_alone_is_not_a_rollback_point(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(2), actor="x")
    await registry.aliases.set(acme, "sql", "live", AliasTarget(2), ShadowPart(1, 0.5), actor="x")
    assert (await registry.aliases.rollback(acme, "sql", "live", actor="x")).target == AliasTarget(3)


async def test_unmoved_or_orphaned_alias_is_not_rolled_back(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "new", AliasTarget(1), actor="x")
    with pytest.raises(Conflict, match="hasn't been moved"):
        await registry.aliases.rollback(acme, "sql", "new", actor="x")
    await registry.aliases.set(acme, "sql", "new", AliasTarget(2), actor="x")
    await registry.delete_version(acme, "sql", 1, actor="x")
    with pytest.raises(Conflict, match="pointed at 1, which is deleted"):
        await registry.aliases.rollback(acme, "sql", "new", actor="x")
    assert (await registry.aliases.get(acme, "sql", "new")).version == 2


async def test_alias_refuses_absent_or_quarantined_versions(
    publish: Any, registry: Registry, database: Database, acme: TenantId
) -> None:
    await publish_three(publish)
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x")
    await registry.aliases.set(acme, "sql", "canary", AliasTarget(2), actor="x")
    await quarantine(database, acme, 1)
    bad = AliasTarget.over([SplitPart(1, 1), SplitPart(3, 1)])
    absent = AliasTarget.over([SplitPart(3, 1), SplitPart(9, 1)])
    for target, shadow, error in (
        (bad, None, AdapterQuarantined),
        (AliasTarget(3), ShadowPart(1, 0.5), AdapterQuarantined),
        (absent, None, VersionNotFound),
        (AliasTarget(3), ShadowPart(9, 0.5), VersionNotFound),
    ):
        with pytest.raises(error):
            await registry.aliases.set(acme, "sql", "live", target, shadow, actor="x")
    with pytest.raises(AdapterQuarantined):
        await registry.aliases.rollback(acme, "sql", "canary", actor="x")
    assert (await registry.aliases.get(acme, "sql", "live")).target == AliasTarget(3)


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([(1, 1.0)], "split"),
        ([(number, 1.0) for number in range(1, 18)], "split"),
        ([(1, 1.0), (1, 2.0)], "split"),
        ([(1, 1.0), (2, 0.0)], "split.1.weight"),
        ([(1, -1.0), (2, 1.0)], "split.0.weight"),
        ([(1, 1.0), (2, float("nan"))], "split.1.weight"),
        ([(1, 1e300), (2, 1.0)], "split.0.weight"),
    ],
)
def test_malformed_alias_split_is_refused(parts: list[tuple[int, float]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AliasTarget.over([SplitPart(version, weight) for version, weight in parts])
    assert caught.value.param == param


async def test_setting_current_target_changes_no_alias(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish_three(publish)
    shadow = ShadowPart(1, 0.5)
    first, _ = await registry.aliases.set(acme, "sql", "live", CANARY, shadow, actor="x")
    same = AliasTarget.over([SplitPart(2, 10), SplitPart(3, 90)])
    assert await registry.aliases.set(acme, "sql", "live", same, shadow, actor="x") == (first, False)


async def test_aliases_are_listed_by_name_over_pages(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    for name in ("b", "a", "c"):
        await registry.aliases.set(acme, "sql", name, AliasTarget(1), actor="x")
    first = await registry.aliases.list(acme, "sql", limit=3)
    second = await registry.aliases.list(acme, "sql", limit=3, cursor=first.next_cursor)
    assert [record.name for record in first.items + second.items] == ["a", "b", "c", "live"]
    assert second.next_cursor is None


async def test_granted_adapter_answers_grantee_only_by_owners_name(
    publish: Any, registry: Registry, database: Database, acme: TenantId, globex: TenantId
) -> None:
    await publish()
    theirs = parse_terms("acme/sql", "base")
    with pytest.raises(ModelNotFound, match='"acme/sql"') as absent:
        await registry.bind(globex, theirs, sticky=None)
    async with database.write() as session:
        adapter = await AdapterRepository(session, acme).adapter("sql")
        session.add(Grant(adapter_id=adapter.id, tenant_id=globex, created_at=utc_now(), created_by="x"))
    bound = await registry.bind(globex, theirs, sticky=None)
    assert bound.adapter is not None
    assert (bound.adapter.tenant, bound.adapter.version) == (acme, 1)
    assert [(one.model, one.owned_by) for one in await registry.list_servable(globex)] == [("acme/sql", "acme")]
    assert (await registry.bind(acme, theirs, sticky=None)).adapter == bound.adapter
    for name in ("acme/sql@1", "acme/sql@live"):
        assert (await registry.bind(globex, parse_terms(name, "base"), sticky=None)).adapter == bound.adapter
    for name in ("sql", "acme/sql@2", "acme/sql@nope", "globex/sql"):
        with pytest.raises(ModelNotFound):
            await registry.bind(globex, parse_terms(name, "base"), sticky=None)
    async with database.write() as session:
        await session.delete(await session.get(Grant, (adapter.id, globex)))
    registry.forget(acme, "sql")
    with pytest.raises(ModelNotFound) as gone:
        await registry.bind(globex, theirs, sticky=None)
    assert str(gone.value) == str(absent.value)
    assert await registry.list_servable(globex) == []


async def move(registry: Registry, tenant: TenantId, way: str) -> None:
    """Move ``live`` to version 1, or to a split with it, or back to it."""
    if way == "rollback":
        await registry.aliases.rollback(tenant, "sql", "live", actor="x")
        return
    target = AliasTarget(1) if way == "move" else AliasTarget.over([SplitPart(2, 99), SplitPart(1, 1)])
    shadow = ShadowPart(1, 0.5) if way == "shadow" else None
    await registry.aliases.set(tenant, "sql", "live", AliasTarget(2) if shadow else target, shadow, actor="x")


@pytest.mark.parametrize("way", ["move", "split", "shadow", "rollback"])
async def test_alias_refuses_version_exceeding_memory_limits(
    way: str, publish: Any, registry: Registry, acme: TenantId, database: Database
) -> None:
    await publish(seed=0, rank=8)
    await publish(seed=1, rank=4)
    before = await registry.aliases.get(acme, "sql", "live")

    def check(ir: AdapterIR, base: BaseSpec) -> None:
        if ir.rank > 4:
            raise AdapterUnsupported("This adapter needs 9 bytes.", hint="Train it with a lower rank.")

    # what was published fits no more once the server has less memory
    registry.inspector.check_fit = check
    registry.stored_fit.doubts = lambda base, *, rank, **shape: rank > 4
    with pytest.raises(AdapterUnsupported, match="sql@1: This adapter needs 9 bytes") as caught:
        await move(registry, acme, way)
    assert caught.value.hint == "Train it with a lower rank."
    assert await registry.aliases.get(acme, "sql", "live") == before
    registry.stored_fit.doubts = lambda base, **shape: False
    await move(registry, acme, way)


async def test_alias_reads_no_files_without_doubt(
    publish: Any, registry: Registry, acme: TenantId, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_three(publish)
    monkeypatch.setattr(LocalStore, "read", lambda *_: pytest.fail("a file was read"))
    await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x")


@pytest.mark.parametrize("verdict", ["degraded", "not_possible"])
@pytest.mark.parametrize("way", ["move", "split", "rollback"])
async def test_strict_alias_refuses_degraded_version(
    way: str, verdict: str, publish: Any, certified: Registry, certifying: Any, acme: TenantId
) -> None:
    passed = certifying.outcome
    certifying.outcome = msgspec.structs.replace(passed, verdict=verdict)
    await publish(seed=0, via=certified)
    certifying.outcome = passed
    await publish(seed=1, via=certified)
    certified.certificates.is_strict = True
    with pytest.raises(AdapterUncertified, match=rf"sql@1 is {verdict.replace('_', ' ')}.*--strict-certificates"):
        await move(certified, acme, way)
    # a push of the same bytes would promote them too
    with pytest.raises(AdapterUncertified, match="sql@1"):
        await publish(seed=0, via=certified)
    assert (await certified.aliases.get(acme, "sql", "live")).version == 2
    await move(certified, acme, "shadow")
    certified.certificates.is_strict = False
    await move(certified, acme, way)
