"""Answers that aren't finite: counted with the version, and the third puts it in quarantine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraserve.db.session import Database
from loraserve.errors import AdapterQuarantined, DatabaseUnavailable
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import VersionRecord
from loraserve.registry.registry import Registry
from loraserve.types import AdapterPart, TenantId

SQL = parse_model("sql", "base")


def numerics(version: VersionRecord) -> list[tuple[str, int]]:
    return [(check["status"], check["strikes"]) for check in version.checks if check["name"] == "numerics"]


async def test_the_third_strike_quarantines_the_version(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    bad = (await publish()).version
    await publish(tenant=globex)
    assert [await registry.numeric_failures.record(bad.ref) for _ in range(2)] == [1, 2]
    version = await registry.get_version(acme, "sql", 1)
    assert (version.state, numerics(version)) == ("ready", [("warned", 2)])
    assert (await registry.resolve(acme, SQL)).version == 1
    assert await registry.numeric_failures.record(bad.ref) == 3
    # at once, though the name was in the cache
    with pytest.raises(AdapterQuarantined, match="3 answers were not finite"):
        await registry.resolve(acme, SQL)
    assert numerics(await registry.get_version(acme, "sql", 1)) == [("failed", 3)]
    assert (await registry.resolve(globex, SQL)).version == 1, "equal bytes of another tenant go on"
    rows = [row for row in (await registry.list_audit(acme)).items if row.action == "version.quarantine"]
    assert [(row.target, row.actor, row.detail["strikes"]) for row in rows] == [("sql@1", "server", 3)]
    assert (registry.numeric_failures.num_failures, registry.numeric_failures.num_quarantined) == (3, 1)


async def test_servers_count_together_and_across_starts(
    publish: Any, registry: Registry, database: Database, store: Any, small_base: Any, acme: TenantId
) -> None:
    bad = (await publish()).version
    other = Registry(database, store, lambda: small_base)
    for one in (registry, other, registry):
        await one.numeric_failures.record(bad.ref)
    assert (await other.get_version(acme, "sql", 1)).state == "quarantined"


async def test_failures_after_quarantine_are_not_counted(publish: Any, registry: Registry, acme: TenantId) -> None:
    bad = (await publish()).version
    for _ in range(3):
        await registry.numeric_failures.record(bad.ref)
    before = await registry.get_version(acme, "sql", 1)
    assert await registry.numeric_failures.record(bad.ref) == 3
    assert await registry.get_version(acme, "sql", 1) == before


async def test_grantee_failures_cannot_quarantine_owners_adapter(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    bad = (await publish()).version
    for _ in range(5):
        registry.numeric_failures.report(globex, bad.ref)
        await registry.numeric_failures.close()
    assert numerics(await registry.get_version(acme, "sql", 1)) == []
    registry.numeric_failures.report(acme, bad.ref)
    await registry.numeric_failures.close()
    assert numerics(await registry.get_version(acme, "sql", 1)) == [("warned", 1)]


async def test_of_a_sum_no_part_is_blamed(publish: Any, registry: Registry, acme: TenantId) -> None:
    bad = (await publish()).version
    ref = msgspec.structs.replace(bad.ref, parts=(AdapterPart(adapter=bad.ref, weight=2.0),))
    registry.numeric_failures.report(acme, ref)
    await registry.numeric_failures.close()
    assert numerics(await registry.get_version(acme, "sql", 1)) == []


async def test_verification_ends_quarantine_and_resets_count(publish: Any, certified: Registry, acme: TenantId) -> None:
    bad = (await publish(via=certified)).version
    for _ in range(3):
        await certified.numeric_failures.record(bad.ref)
    version = await certified.certificates.verify(acme, "sql", 1, actor="x")
    assert (version.state, numerics(version)) == ("ready", [])
    assert await certified.numeric_failures.record(bad.ref) == 1


async def test_repaired_damage_keeps_numeric_quarantine(publish: Any, registry: Registry, acme: TenantId) -> None:
    bad = (await publish()).version
    for _ in range(3):
        await registry.numeric_failures.record(bad.ref)
    await registry.corruption.quarantine(bad.digest, bad.weights_blob)
    await publish()
    assert (await registry.get_version(acme, "sql", 1)).state == "quarantined"


async def test_deleted_or_mismatched_version_is_not_counted(publish: Any, registry: Registry, acme: TenantId) -> None:
    first = (await publish()).version
    second = (await publish(seed=1)).version
    mixed = msgspec.structs.replace(first.ref, version=2)
    assert await registry.numeric_failures.record(mixed) == 0
    assert numerics(await registry.get_version(acme, "sql", 2)) == []
    await registry.delete(acme, "sql", actor="x")
    assert await registry.numeric_failures.record(second.ref) == 0


async def test_unwritable_strike_is_dropped_without_harm(
    publish: Any, registry: Registry, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (await publish()).version

    async def away(*_: Any) -> int:
        raise DatabaseUnavailable("The database is away.")

    with monkeypatch.context() as patched:
        patched.setattr(registry.numeric_failures, "record", away)
        registry.numeric_failures.report(acme, bad.ref)
        await registry.numeric_failures.close()
    assert numerics(await registry.get_version(acme, "sql", 1)) == []
