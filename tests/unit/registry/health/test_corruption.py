"""Damaged bytes: every version that is stored in them is quarantined,
until they are pushed again or verified.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.errors import AdapterCorrupt, AdapterQuarantined, DatabaseUnavailable, EngineUnavailable
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import VersionRecord
from loraserve.registry.registry import Registry
from loraserve.types import Digest, TenantId

SQL = parse_model("sql", "base")


def damage(store: LocalStore, blob: Digest) -> None:
    path = store.root / blob[:2] / blob[2:4] / blob
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def check_names(version: VersionRecord) -> list[str]:
    return [f"{check['name']} {check['status']}" for check in version.checks]


@pytest.mark.parametrize("blob", ["config_blob", "weights_blob"])
async def test_damaged_blob_quarantines_only_versions_using_blob(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId, blob: str
) -> None:
    bad = (await publish(seed=1)).version
    await publish(seed=1, tenant=globex)
    await publish(seed=1, name="twin")
    await publish(seed=2, name="other")
    assert (await registry.resolve(globex, SQL)).version == 1
    assert await registry.corruption.quarantine(bad.digest, getattr(bad, blob)) == 3
    for tenant in (acme, globex):
        # at once, though the name was in the cache
        with pytest.raises(AdapterQuarantined, match="damaged or missing"):
            await registry.resolve(tenant, SQL)
    with pytest.raises(AdapterQuarantined):
        await registry.resolve(acme, parse_model("twin", "base"))
    assert (await registry.resolve(acme, parse_model("other", "base"))).version == 1
    version = await registry.get_version(acme, "sql", 1)
    assert (version.state, check_names(version)[-1]) == ("quarantined", "stored failed")
    rows = [row for row in (await registry.list_audit(globex)).items if row.action == "version.quarantine"]
    assert [(row.target, row.actor, row.detail["blob"]) for row in rows] == [("sql@1", "server", getattr(bad, blob))]


async def test_repeated_report_changes_only_timestamp(publish: Any, registry: Registry, acme: TenantId) -> None:
    bad = (await publish()).version
    await registry.corruption.quarantine(bad.digest, bad.weights_blob)
    before = await registry.get_version(acme, "sql", 1)
    assert await registry.corruption.quarantine(bad.digest, bad.weights_blob) == 0
    after = await registry.get_version(acme, "sql", 1)
    assert replace(after, checks=before.checks) == before
    assert check_names(after) == check_names(before)
    assert registry.corruption.num_quarantined == 1


async def test_an_equal_version_in_other_files_goes_on(
    publish: Any, registry: Registry, globex: TenantId, make_upload: Any, store: LocalStore
) -> None:
    bad = (await publish()).version
    config, weights = make_upload()
    with store.stage() as staged:
        staged.write(weights)
        spaced = json.dumps(json.loads(config), indent=3).encode()
        twin = (await registry.publisher.publish(globex, "sql", spaced, staged, actor="x")).version
    assert (twin.digest, twin.config_blob == bad.config_blob) == (bad.digest, False)
    await registry.corruption.quarantine(bad.digest, bad.config_blob)
    assert (await registry.resolve(globex, SQL)).version == 1


async def test_pushing_same_files_repairs_and_serves_version(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, store: LocalStore
) -> None:
    bad = (await publish(via=certified)).version
    damage(store, bad.weights_blob)
    await certified.corruption.quarantine(bad.digest, bad.weights_blob)
    again = await publish(via=certified)
    assert (again.is_new, again.version.version, again.version.state) == (False, 1, "ready")
    assert check_names(again.version) == ["format passed", "base passed", "finite passed", "parity passed"]
    assert certifying.asked == [bad.ref, bad.ref], "the engine reads what was written before it is served"
    store.read(bad.weights_blob)
    assert (await certified.resolve(acme, SQL)).digest == bad.digest
    assert "version.mend" in [row.action for row in (await certified.list_audit(acme)).items]


async def test_unnoticed_damage_is_repaired_by_same_push(publish: Any, registry: Registry, store: LocalStore) -> None:
    bad = (await publish()).version
    damage(store, bad.weights_blob)
    assert not (await publish()).is_new
    store.read(bad.weights_blob)


async def test_reformatted_files_replace_damaged_files(
    publish: Any, registry: Registry, acme: TenantId, make_upload: Any, store: LocalStore
) -> None:
    bad = (await publish()).version
    damage(store, bad.config_blob)
    await registry.corruption.quarantine(bad.digest, bad.config_blob)
    config, weights = make_upload()
    with store.stage() as staged:
        staged.write(weights)
        spaced = json.dumps(json.loads(config), indent=3).encode()
        mended = (await registry.publisher.publish(acme, "sql", spaced, staged, actor="x")).version
    assert (mended.digest, mended.state, mended.size_bytes) == (bad.digest, "ready", len(spaced) + len(weights))
    ref = await registry.resolve(acme, SQL)
    assert bytes(store.read(ref.config_blob)) == spaced


async def test_a_failed_certificate_outlives_the_damage(
    publish: Any, certified: Registry, certifying: Any, make_certificate: Any
) -> None:
    certifying.outcome = make_certificate(verdict="failed", reason="The logits are far off.")
    bad = (await publish(via=certified)).version
    await certified.corruption.quarantine(bad.digest, bad.weights_blob)
    certifying.outcome = EngineUnavailable("The engine isn't up.")
    version = (await publish(via=certified)).version
    assert (version.state, check_names(version)[-1]) == ("quarantined", "parity failed")


@pytest.mark.parametrize("is_restored", [True, False])
async def test_verification_ends_quarantine_only_for_repaired_bytes(
    publish: Any, certified: Registry, certifying: Any, make_certificate: Any, acme: TenantId, is_restored: bool
) -> None:
    bad = (await publish(via=certified)).version
    await certified.corruption.quarantine(bad.digest, bad.weights_blob)
    certifying.outcome = make_certificate() if is_restored else AdapterCorrupt("Damaged.")
    if is_restored:
        version = await certified.certificates.verify(acme, "sql", 1, actor="x")
        assert (version.state, "stored failed" in check_names(version)) == ("ready", False)
        assert (await certified.resolve(acme, SQL)).version == 1
        return
    with pytest.raises(AdapterCorrupt):
        await certified.certificates.verify(acme, "sql", 1, actor="x")
    with pytest.raises(AdapterQuarantined):
        await certified.resolve(acme, SQL)


async def test_reports_reach_database_in_background_once(
    publish: Any, registry: Registry, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (await publish()).version
    calls = []
    quarantine = registry.corruption.quarantine

    async def counted(digest: Digest, blob: Digest) -> int:
        calls.append(blob)
        return await quarantine(digest, blob)

    monkeypatch.setattr(registry.corruption, "quarantine", counted)
    for _ in range(3):
        registry.corruption.report(bad.digest, bad.weights_blob)
    await registry.corruption.close()
    assert calls == [bad.weights_blob]
    assert (await registry.get_version(acme, "sql", 1)).state == "quarantined"


async def test_report_failing_to_write_is_retried_with_next(
    publish: Any, registry: Registry, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (await publish()).version
    with monkeypatch.context() as patched:

        async def away(*_: Any) -> int:
            raise DatabaseUnavailable("The database is away.")

        patched.setattr(registry.corruption, "quarantine", away)
        registry.corruption.report(bad.digest, bad.weights_blob)
        await registry.corruption.close()
    await asyncio.sleep(0)
    registry.corruption.report(bad.digest, bad.weights_blob)
    await registry.corruption.close()
    assert (await registry.get_version(acme, "sql", 1)).state == "quarantined"


async def test_a_version_deleted_meanwhile_stays_deleted(publish: Any, registry: Registry, acme: TenantId) -> None:
    bad = (await publish(is_promoting=False)).version
    await registry.delete_version(acme, "sql", 1, actor="x")
    assert await registry.corruption.quarantine(bad.digest, bad.weights_blob) == 0
