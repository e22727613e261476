"""Versions are served on the base that they were made for; a server of another one refuses them,
and writes nothing of it down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from sqlalchemy import event

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.errors import (
    AdapterBaseMismatch,
    AdapterOfAnotherBase,
    AdapterQuarantined,
    AdapterRejected,
    Conflict,
    EngineDied,
    EngineUnavailable,
    LoraserveError,
)
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.model_name import ParsedModel, Term, parse_model
from loraserve.registry.records import AliasTarget, ShadowPart, SplitPart, VersionRecord
from loraserve.registry.registry import Registry
from loraserve.types import BaseSpec, Certificate, Digest, TenantId

Make = Callable[..., Certificate]
A, B = Digest("b" * 64), Digest("c" * 64)
OTHER_ID = "org/other"


@pytest.fixture
def other_base(small_base: BaseSpec) -> BaseSpec:
    """Another base of the same shapes."""
    return msgspec.structs.replace(small_base, id=OTHER_ID, digest=B)


@pytest.fixture
def here(certified: Registry) -> Registry:
    """A server of the base A."""
    return certified


@pytest.fixture
def there(database: Database, store: LocalStore, other_base: BaseSpec, certifying: Any) -> Registry:
    """A server of the base B, on the same database and store."""
    return Registry(database, store, lambda: other_base, certify=certifying)


def named(model: str) -> ParsedModel:
    return parse_model(model, "base")


def check_of(version: VersionRecord, name: str) -> dict[str, Any]:
    return next(dict(check) for check in version.checks if check["name"] == name)


async def bind(registry: Registry, tenant: TenantId, model: str, **how: Any) -> Any:
    return await registry.bind(tenant, [Term(named(model))], sticky=how.get("sticky"))


async def test_version_is_served_only_on_original_base(
    publish: Any, here: Registry, there: Registry, acme: TenantId
) -> None:
    await publish(via=here)
    assert (await bind(here, acme, "sql")).adapter.version == 1
    for model in ("sql", "sql@live", "sql@1", "acme/sql"):
        with pytest.raises(AdapterOfAnotherBase) as caught:
            await bind(there, acme, model)
    for text in ("sql@1", "org/base:1", A[:12], OTHER_ID, B[:12]):
        assert text in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("Try: loraserve adapter verify sql@1 --rebase")
    assert (caught.value.code, caught.value.param) == ("adapter_base_mismatch", "sql@1")
    assert (here.num_of_another_base_refused, there.num_of_another_base_refused) == (0, 4)
    with pytest.raises(AdapterOfAnotherBase):
        await there.describe(acme, named("sql"))
    assert [one.name for one in await here.list_servable(acme)] == ["sql"]
    assert await there.list_servable(acme) == []


async def test_mismatched_version_is_never_written(
    publish: Any, here: Registry, there: Registry, acme: TenantId
) -> None:
    version = (await publish(via=here)).version
    audit = (await here.list_audit(acme)).items
    for attempt in (
        bind(there, acme, "sql"),
        there.certificates.verify(acme, "sql", 1, actor="x"),
        there.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x"),
        publish(via=there),
        publish(via=there, is_dry_run=True),
    ):
        with pytest.raises(AdapterOfAnotherBase):
            await attempt
    # one that began before the version was moved may end after it
    assert await there.numeric_failures.record(version.ref) == 0
    assert await there.certificate_backfill.sweep()
    assert await here.get_version(acme, "sql", 1) == version
    assert (await here.list_audit(acme)).items == audit


async def test_fallback_of_mismatched_version_answers_and_names_error(
    publish: Any, here: Registry, there: Registry, acme: TenantId
) -> None:
    await publish(seed=1, via=here)
    await publish(seed=2, via=there)
    await here.metadata.edit(acme, "sql", Edit(fallback="2"), actor="x")
    binding = await bind(there, acme, "sql@1")
    assert (binding.adapter.version, binding.fell_back_from.version) == (2, 1)
    assert binding.fell_back_for == "adapter_base_mismatch"
    # on the other server the fallback is the one that can't answer
    assert (await bind(here, acme, "sql@1")).fallback is None
    with pytest.raises(AdapterOfAnotherBase):
        await bind(here, acme, "sql@2")
    await here.metadata.edit(acme, "sql", Edit(fallback="base"), actor="x")
    there.forget(acme, "sql")
    binding = await bind(there, acme, "sql@1")
    assert (binding.adapter, binding.fell_back_for) == (None, "adapter_base_mismatch")
    assert [one.name for one in await there.list_servable(acme)] == ["sql"]


async def test_splits_shadows_sums_and_grants_judge_each_version(
    publish: Any, here: Registry, there: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish(seed=1, via=here)
    await publish(seed=2, via=here)
    await publish("own", seed=3, via=there)
    split = AliasTarget.over([SplitPart(1, 1), SplitPart(2, 1)])
    await here.aliases.set(acme, "sql", "live", split, actor="x")
    await here.certificates.verify(acme, "sql", 1, actor="x")
    await there.certificates.verify(acme, "sql", 2, actor="x", is_rebasing=True)
    here.forget(acme, "sql")
    found = {user: await _bound(there, acme, user) for user in map(str, range(20))}
    assert set(found.values()) == {2, "adapter_base_mismatch"}
    # a user that one of the servers answers is refused by the other
    assert {user: await _bound(here, acme, user) for user in found} == {
        user: "adapter_base_mismatch" if version == 2 else 1 for user, version in found.items()
    }
    await there.aliases.set(acme, "own", "live", AliasTarget(1), actor="x")
    with pytest.raises(AdapterOfAnotherBase, match="sql@1"):
        await there.bind(acme, [Term(named("own")), Term(named("sql@1"), Decimal("0.5"))], sticky=None)
    assert (
        await there.bind(acme, [Term(named("own")), Term(named("sql@2"), Decimal("0.5"))], sticky=None)
    ).adapter is not None
    await here.grants.create(acme, "sql", "globex", actor="x")
    with pytest.raises(AdapterOfAnotherBase, match="sql@1"):
        await bind(there, globex, "acme/sql@1")


async def _bound(registry: Registry, tenant: TenantId, user: str) -> int | str:
    try:
        return int((await bind(registry, tenant, "sql", sticky=user)).adapter.version)
    except AdapterOfAnotherBase as error:
        return error.code


async def test_shadow_of_other_base_is_ignored(publish: Any, here: Registry, there: Registry, acme: TenantId) -> None:
    await publish(seed=1, via=here)
    await publish(seed=2, via=here, is_promoting=False)
    await here.aliases.set(acme, "sql", "live", AliasTarget(1), ShadowPart(2, 1.0), actor="x")
    assert (await bind(here, acme, "sql")).shadow.adapter.version == 2
    await there.certificates.verify(acme, "sql", 2, actor="x", is_rebasing=True)
    here.forget(acme, "sql")
    assert (await bind(here, acme, "sql")).shadow is None


async def test_alias_never_moves_or_returns_to_mismatched_version(
    publish: Any, here: Registry, there: Registry, acme: TenantId
) -> None:
    await publish(seed=1, via=here)
    await publish(seed=2, via=there)
    for target, shadow in (
        (AliasTarget(1), None),
        (AliasTarget.over([SplitPart(1, 1), SplitPart(2, 1)]), None),
        (AliasTarget(2), ShadowPart(1, 1)),
    ):
        with pytest.raises(AdapterOfAnotherBase, match="sql@1"):
            await there.aliases.set(acme, "sql", "canary", target, shadow, actor="x")
    with pytest.raises(AdapterOfAnotherBase, match="sql@1"):
        await there.aliases.rollback(acme, "sql", "live", actor="x")
    assert (await here.aliases.rollback(acme, "sql", "live", actor="x")).version == 1


async def test_same_bytes_for_new_base_require_deleted_version(
    publish: Any, here: Registry, there: Registry, acme: TenantId
) -> None:
    await publish(via=here)
    with pytest.raises(AdapterOfAnotherBase):
        await publish(via=there)
    await here.delete(acme, "sql", actor="x")
    version = (await publish(via=there)).version
    assert (version.version, version.base_digest, version.state) == (2, B, "ready")


async def test_explicit_rebase_moves_passing_version(
    publish: Any, here: Registry, there: Registry, acme: TenantId, certifying: Any
) -> None:
    before = (await publish(via=here)).version
    moved = await there.certificates.verify(acme, "sql", 1, actor="key", is_rebasing=True)
    assert (moved.base_digest, moved.state, moved.digest, moved.aliases) == (B, "ready", before.digest, ("live",))
    assert check_of(moved, "parity")["status"] == "passed"
    assert check_of(moved, "base")["base_id"] == OTHER_ID
    assert A[:12] in check_of(moved, "base")["detail"]
    # at once on the server that moved it
    assert (await bind(there, acme, "sql")).adapter == before.ref
    here.forget(acme, "sql")
    with pytest.raises(AdapterOfAnotherBase):
        await bind(here, acme, "sql")
    row = next(row for row in (await here.list_audit(acme)).items if row.action == "version.verify")
    assert (row.actor, row.target) == ("key", "sql@1")
    assert (row.detail["base_before"], row.detail["base_after"]) == (A, B)
    # and back
    back = await here.certificates.verify(acme, "sql", 1, actor="key", is_rebasing=True)
    assert back.base_digest == A
    # on its own base the word changes nothing but what a verification does
    assert (await here.certificates.verify(acme, "sql", 1, actor="key", is_rebasing=True)).base_digest == A


@pytest.mark.parametrize("how", ["shapes", "certificate", "engine away", "engine dead"])
async def test_failing_rebase_leaves_version_unchanged(
    publish: Any, here: Registry, there: Registry, acme: TenantId, certifying: Any, make_certificate: Make, how: str
) -> None:
    before = (await publish(via=here)).version
    audit = (await here.list_audit(acme)).items
    outcome, error = {
        "shapes": (AdapterBaseMismatch("q_proj.lora_A is 2×8; this base has 16."), AdapterBaseMismatch),
        "certificate": (make_certificate(verdict="failed", max_difference=0.31), AdapterRejected),
        "engine away": (EngineUnavailable("The engine isn't up."), EngineUnavailable),
        "engine dead": (EngineDied("The engine died."), EngineDied),
    }[how]
    certifying.outcome = outcome
    with pytest.raises(error) as caught:
        await there.certificates.verify(acme, "sql", 1, actor="x", is_rebasing=True)
    if how in ("shapes", "certificate"):
        assert "sql@1 stays a version of" in caught.value.message
    assert await here.get_version(acme, "sql", 1) == before
    assert (await here.list_audit(acme)).items == audit


async def test_concurrent_rebases_let_single_rebase_succeed(
    publish: Any, here: Registry, there: Registry, acme: TenantId, certifying: Any
) -> None:
    await publish(via=here)
    certifying.gate.clear()
    moving = asyncio.create_task(there.certificates.verify(acme, "sql", 1, actor="x", is_rebasing=True))
    again = asyncio.create_task(there.certificates.verify(acme, "sql", 1, actor="y", is_rebasing=True))
    async with asyncio.timeout(5):
        while len(certifying.asked) < 3:
            await asyncio.sleep(0.001)
    certifying.gate.set()
    results = await asyncio.gather(moving, again, return_exceptions=True)
    assert sorted(type(result) for result in results if isinstance(result, LoraserveError)) == [Conflict]


async def test_quarantine_ends_with_passing_rebase(
    publish: Any, here: Registry, there: Registry, acme: TenantId, certifying: Any, make_certificate: Make
) -> None:
    certifying.outcome = make_certificate(verdict="failed", max_difference=0.31)
    assert (await publish(via=here)).version.state == "quarantined"
    # on another base it isn't known to be wrong, only to be another's
    with pytest.raises(AdapterOfAnotherBase):
        await bind(there, acme, "sql@1")
    with pytest.raises(AdapterQuarantined):
        await bind(here, acme, "sql@1")
    certifying.outcome = make_certificate()
    moved = await there.certificates.verify(acme, "sql", 1, actor="x", is_rebasing=True)
    assert moved.state == "ready"


async def test_adapter_counts_versions_per_base(publish: Any, here: Registry, there: Registry, acme: TenantId) -> None:
    for seed in range(2):
        await publish(seed=seed, via=here)
    await publish(seed=2, via=there)
    for record in (await here.get(acme, "sql"), (await there.list(acme)).items[0]):
        assert (record.num_versions, record.latest_version) == (3, 3)
        assert record.num_versions_by_base == {A: 2, B: 1}


async def test_unloaded_base_serves_and_judges_no_version(
    publish: Any, here: Registry, database: Database, store: LocalStore, acme: TenantId
) -> None:
    await publish(via=here)

    def base() -> BaseSpec:
        raise EngineUnavailable("The base model isn't loaded yet.")

    loading = Registry(database, store, base)
    with pytest.raises(EngineUnavailable):
        await bind(loading, acme, "sql")
    assert (await loading.aliases.set(acme, "sql", "canary", AliasTarget(1), actor="x"))[1]


async def test_base_comparison_needs_no_extra_statement(
    publish: Any, here: Registry, there: Registry, database: Database, acme: TenantId
) -> None:
    await publish(via=here)
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    engines = [database._engine.sync_engine]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        await bind(here, acme, "sql")
        num_cold = len([text for text in statements if text.lstrip().upper().startswith("SELECT")])
        await bind(here, acme, "sql")
        num_warm = len([text for text in statements if text.lstrip().upper().startswith("SELECT")]) - num_cold
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)
    assert (num_cold, num_warm) == (1, 0)
