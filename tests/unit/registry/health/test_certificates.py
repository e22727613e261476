"""Certificates: asked for before a version is there, stored with it, and heeded:
what failed isn't served.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load, save
from sqlalchemy import select

from adapters_store import LocalStore
from loraserve import faults
from loraserve.adapters.compiler import compile_adapter
from loraserve.db.idempotency import Once, Replay, StoredResponse
from loraserve.db.models import AdapterVersion
from loraserve.errors import (
    AdapterCorrupt,
    AdapterNotFound,
    AdapterQuarantined,
    AdapterRejected,
    AdapterUncertified,
    AdapterUnsupported,
    EngineUnavailable,
    LoraserveError,
    Overloaded,
    RateLimited,
    VersionNotFound,
)
from loraserve.limits import LIMITS, Limits
from loraserve.registry.health import certificates, inspection
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget, VersionRecord
from loraserve.registry.registry import Registry
from loraserve.sdk.types import management as sdk
from loraserve.types import Certificate, TenantId

SQL = parse_model("sql", "base")
Make = Callable[..., Certificate]


def parity_of(version: VersionRecord) -> dict[str, Any]:
    return next(dict(check) for check in version.checks if check["name"] == "parity")


async def until_asked(certifying: Any, num_times: int) -> None:
    async with asyncio.timeout(5):
        while len(certifying.asked) < num_times:
            await asyncio.sleep(0.001)


@pytest.fixture
def failed(make_certificate: Make) -> Certificate:
    return make_certificate(verdict="failed", max_difference=0.31, tolerance=0.002, reason="The logits are far off.")


async def test_version_is_certified_from_stored_bytes_before_publication(
    publish: Any, certified: Registry, certifying: Any, store: LocalStore, acme: TenantId, make_upload: Any
) -> None:
    certifying.gate.clear()
    publishing = asyncio.create_task(publish(via=certified))
    await until_asked(certifying, 1)
    with pytest.raises(AdapterNotFound):
        await certified.get(acme, "sql")
    ref = certifying.asked[0]
    assert (bytes(store.read(ref.config_blob)), bytes(store.read(ref.weights_blob))) == make_upload()
    certifying.gate.set()
    version = (await publishing).version
    assert version.ref == ref
    assert (version.state, version.aliases) == ("ready", ("live",))
    assert [check["name"] for check in version.checks] == ["format", "base", "finite", "parity"]
    assert parity_of(version)["status"] == "passed"
    assert parity_of(version)["certificate"] == msgspec.structs.asdict(certifying.outcome)
    assert certified.certificates.num_by_verdict == {"passed": 1}


async def test_server_may_certify_only_on_request(
    publish: Any, database: Any, store: LocalStore, small_base: Any, certifying: Any, acme: TenantId
) -> None:
    registry = Registry(database, store, lambda: small_base, certify=certifying, is_certified_at_upload=False)
    version = (await publish(via=registry)).version
    assert (version.state, version.aliases, certifying.asked) == ("ready", ("live",), [])
    assert parity_of(version)["status"] == "skipped"
    assert "on request only" in parity_of(version)["detail"]
    verified = await registry.certificates.verify(acme, "sql", 1, actor="test")
    assert parity_of(verified)["status"] == "passed"


async def test_failed_certificate_quarantines_without_moving_live(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, failed: Certificate
) -> None:
    await publish(seed=1, via=certified)
    certifying.outcome = failed
    version = (await publish(seed=2, via=certified)).version
    assert (version.version, version.state, version.aliases) == (2, "quarantined", ())
    assert (await certified.resolve(acme, SQL)).version == 1
    with pytest.raises(AdapterQuarantined) as caught:
        await certified.resolve(acme, parse_model("sql@2", "base"))
    for text in ("sql@2", "The logits are far off", "0.31", "0.002"):
        assert text in caught.value.message
    assert certified.num_quarantined_refused == 1
    assert (await certified.list_versions(acme, "sql")).items[0].state == "quarantined"


async def test_alias_is_not_moved_to_quarantined_version(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, failed: Certificate
) -> None:
    await publish(seed=1, via=certified)
    certifying.outcome = failed
    await publish(seed=2, via=certified)
    with pytest.raises(AdapterQuarantined):
        await certified.aliases.set(acme, "sql", "canary", AliasTarget(2), actor="x")
    assert (await certified.get(acme, "sql")).aliases == {"live": 1}


async def test_republished_bytes_keep_certificate_and_quarantine(
    publish: Any, certified: Registry, certifying: Any, make_certificate: Make, failed: Certificate
) -> None:
    certifying.outcome = failed
    first = (await publish(via=certified)).version
    certifying.outcome = make_certificate()
    again = (await publish(via=certified)).version
    assert (again.state, again.aliases, again.checks) == ("quarantined", (), first.checks)
    assert len(certifying.asked) == 1


async def test_unservable_adapter_is_refused_with_engine_message(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId
) -> None:
    certifying.outcome = AdapterUnsupported("norms can't be served on a GPU")
    with pytest.raises(AdapterUnsupported, match="norms"):
        await publish(via=certified)
    assert (await certified.list(acme)).items == ()
    assert certified.certificates.num_by_verdict == {"rejected": 1}


@pytest.mark.parametrize(
    "error", [EngineUnavailable("The engine isn't up."), Overloaded("Too many."), AdapterCorrupt("X.")]
)
async def test_temporary_engine_failure_refuses_no_upload(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, error: LoraserveError
) -> None:
    certifying.outcome = error
    version = (await publish(via=certified)).version
    assert (version.state, version.aliases) == ("ready", ("live",))
    parity = parity_of(version)
    assert (parity["status"], parity["detail"] + ".", parity["certificate"]) == ("skipped", error.message, None)
    assert (await certified.resolve(acme, SQL)).version == 1
    assert certified.certificates.num_by_verdict == {"skipped": 1}


async def test_silent_engine_is_awaited_only_until_timeout(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LIMITS", Limits(verification_timeout_s=0.02))
    certifying.gate.clear()
    async with asyncio.timeout(2):
        assert parity_of((await publish(via=certified)).version)["status"] == "skipped"
        with pytest.raises(Overloaded):
            await certified.certificates.verify(acme, "sql", 1, actor="x")


async def test_dry_run_reports_skipped_comparison(publish: Any, certified: Registry, certifying: Any) -> None:
    parity = parity_of((await publish(via=certified, is_dry_run=True)).version)
    assert (parity["status"], parity["certificate"], certifying.asked) == ("skipped", None, [])


async def test_reverification_starts_and_ends_quarantine(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, make_certificate: Make, failed: Certificate
) -> None:
    await publish(via=certified)
    assert (await certified.resolve(acme, SQL)).version == 1
    before = await certified.get(acme, "sql")
    certifying.outcome = failed
    version = await certified.certificates.verify(acme, "sql", 1, actor="x")
    assert (version.state, version.aliases, parity_of(version)["status"]) == ("quarantined", ("live",), "failed")
    # at once, though the name was in the cache
    with pytest.raises(AdapterQuarantined):
        await certified.resolve(acme, SQL)
    assert await certified.list_servable(acme) == []
    certifying.outcome = make_certificate(seconds=7.0)
    version = await certified.certificates.verify(acme, "sql", 1, actor="x")
    assert (version.state, parity_of(version)["certificate"]["seconds"]) == ("ready", 7.0)
    assert [check["name"] for check in version.checks] == ["format", "base", "finite", "parity"]
    assert version == await certified.get_version(acme, "sql", 1)
    assert version.revision == before.revision + 2
    assert (await certified.resolve(acme, SQL)).version == 1
    rows = [entry for entry in (await certified.list_audit(acme)).items if entry.action == "version.verify"]
    assert [(row.target, row.actor, row.detail["verdict"]) for row in rows] == [
        ("sql@1", "x", "passed"),
        ("sql@1", "x", "failed"),
    ]


async def test_no_longer_servable_version_is_quarantined(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId
) -> None:
    await publish(via=certified)
    certifying.outcome = AdapterRejected("It takes 4 MiB of a budget of 2 MiB.")
    version = await certified.certificates.verify(acme, "sql", 1, actor="x")
    parity = parity_of(version)
    assert (version.state, parity["status"], parity["certificate"]) == ("quarantined", "failed", None)
    with pytest.raises(AdapterQuarantined, match="4 MiB"):
        await certified.resolve(acme, SQL)


@pytest.mark.parametrize("error", [EngineUnavailable("The engine isn't up."), AdapterCorrupt("Its bytes changed.")])
async def test_impossible_verification_changes_no_version(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, error: LoraserveError
) -> None:
    before = (await publish(via=certified)).version
    certifying.outcome = error
    with pytest.raises(type(error)):
        await certified.certificates.verify(acme, "sql", 1, actor="x")
    assert await certified.get_version(acme, "sql", 1) == before


async def test_version_deleted_during_verification_stays_deleted(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId
) -> None:
    await publish(via=certified, is_promoting=False)
    certifying.gate.clear()
    verifying = asyncio.create_task(certified.certificates.verify(acme, "sql", 1, actor="x"))
    await until_asked(certifying, 2)
    await certified.delete_version(acme, "sql", 1, actor="x")
    certifying.gate.set()
    with pytest.raises(VersionNotFound):
        await verifying


async def test_tenants_verifications_leave_capacity_for_other_tenant(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, globex: TenantId
) -> None:
    await publish(via=certified)
    await publish(via=certified, tenant=globex)
    certifying.gate.clear()
    running = [
        asyncio.create_task(certified.certificates.verify(acme, "sql", 1, actor="x"))
        for _ in range(LIMITS.max_concurrent_verifications_per_tenant)
    ]
    await until_asked(certifying, 2 + len(running))
    with pytest.raises(RateLimited):
        await certified.certificates.verify(acme, "sql", 1, actor="x")
    running.append(asyncio.create_task(certified.certificates.verify(globex, "sql", 1, actor="x")))
    certifying.gate.set()
    assert [version.state for version in await asyncio.gather(*running)] == ["ready"] * len(running)
    assert not certified.certificates._num_running, "one entry per tenant that ever verified would grow for ever"
    await certified.certificates.verify(acme, "sql", 1, actor="x")


async def test_the_same_idempotency_key_verifies_once(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId
) -> None:
    await publish(via=certified)

    def once() -> Once[VersionRecord]:
        return Once("owner", "k", "f", lambda version: StoredResponse(200, {}, version.state.encode()))

    await certified.certificates.verify(acme, "sql", 1, actor="x", once=once())
    with pytest.raises(Replay) as caught:
        await certified.certificates.verify(acme, "sql", 1, actor="x", once=once())
    assert caught.value.response.body == b"ready"
    assert len(certifying.asked) == 2


async def test_non_finite_numbers_are_stored_as_null(
    publish: Any, certified: Registry, certifying: Any, make_certificate: Make
) -> None:
    certifying.outcome = make_certificate(verdict="failed", max_difference=math.nan, mean_difference=math.inf)
    version = (await publish(via=certified)).version
    certificate = parity_of(version)["certificate"]
    assert (certificate["max_difference"], certificate["mean_difference"], version.state) == (None, None, "quarantined")


def test_upload_check_reports_adapter_kind(small_base: Any, make_upload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = make_upload()

    def compile_as_another(*arguments: Any, **options: Any) -> Any:
        ir = compile_adapter(*arguments, **options)
        modules = (replace(ir.modules[0], magnitude=ir.modules[0].lora_a), *ir.modules[1:])
        return replace(ir, modules=modules, kind="VERA", invocation_token_ids=(5, 7))

    def format_of() -> str:
        checks = inspection.inspect_upload(config, memoryview(weights), small_base).checks
        return str(checks[0]["detail"])

    assert format_of() == "LORA: 8 tensors, 112 parameters"
    monkeypatch.setattr(inspection, "compile_adapter", compile_as_another)
    assert format_of().startswith("VERA with magnitudes (DoRA), the invocation tokens 5 7 (aLoRA): 8 tensors")


def test_upload_warns_of_absent_targets(small_base: Any, make_upload: Any) -> None:
    """PEFT leaves a listed module untrained where the base lacks it."""
    config, weights = make_upload()
    targets = ["q_proj", "v_proj", "w_pack", "mlp.experts.w1"]
    given = json.dumps({**json.loads(config), "target_modules": targets}).encode()
    inspected = inspection.inspect_upload(given, weights, small_base)
    check = next(check for check in inspected.checks if check["name"] == "targets")
    assert check["status"] == "warned"
    assert check["detail"].startswith("target_modules lists 'w_pack', 'mlp.experts.w1', which org/base:1 doesn't have")
    plain = inspection.inspect_upload(config, weights, small_base)
    assert "targets" not in {check["name"] for check in plain.checks}
    # a module that the base has keeps its refusal
    without = {name: tensor for name, tensor in load(weights).items() if "v_proj" not in name}
    with pytest.raises(AdapterRejected, match="targets v_proj in layers 0–1, and the file holds no tensors"):
        inspection.inspect_upload(given, save(without), small_base)


def test_upload_names_renamed_tensors(small_base: Any, make_upload: Any) -> None:
    config, weights = make_upload()
    wrapped = {
        name.replace("base_model.model.", "base_model.model._orig_mod."): array for name, array in load(weights).items()
    }
    plain = inspection.inspect_upload(config, memoryview(weights), small_base)
    found = inspection.inspect_upload(config, memoryview(save(wrapped)), small_base)
    assert "names" not in [check["name"] for check in plain.checks]
    (check,) = (check for check in found.checks if check["name"] == "names")
    assert (check["status"], check["detail"]) == ("passed", "renamed: left out _orig_mod, torch.compile's")
    assert (found.rank, found.target_modules) == (plain.rank, plain.target_modules)


@pytest.mark.parametrize("was_corrupt", [False, True])
async def test_verification_keeps_quarantine_for_damage_reported_meanwhile(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, was_corrupt: bool
) -> None:
    version = (await publish(via=certified)).version
    if was_corrupt:
        await certified.corruption.quarantine(version.digest, version.weights_blob)
    certifying.gate.clear()
    verifying = asyncio.create_task(certified.certificates.verify(acme, "sql", 1, actor="test"))
    await until_asked(certifying, 2)
    await certified.corruption.quarantine(version.digest, version.weights_blob)
    certifying.gate.set()
    verified = await verifying
    assert (verified.state, parity_of(verified)["status"]) == ("quarantined", "passed")
    assert (await certified.certificates.verify(acme, "sql", 1, actor="test")).state == "ready"


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_same_bytes_under_new_name_inherit_quarantine(
    publish: Any,
    certified: Registry,
    certifying: Any,
    acme: TenantId,
    globex: TenantId,
    failed: Certificate,
    make_certificate: Make,
    is_deleted: bool,
) -> None:
    certifying.outcome = failed
    await publish(via=certified)
    if is_deleted:
        await certified.delete(acme, "sql", actor="test")
    certifying.outcome = EngineUnavailable("The engine isn't up.")
    twin = (await publish(name="twin", via=certified)).version
    assert (twin.state, twin.aliases, parity_of(twin)["status"]) == ("quarantined", (), "failed")
    assert "the same weights as sql@1" in parity_of(twin)["detail"]
    # another tenant isn't told what this one holds
    assert (await publish(tenant=globex, via=certified)).version.state == "ready"
    assert (await publish(seed=1, via=certified)).version.state == "ready"
    certifying.outcome = make_certificate()
    assert (await certified.certificates.verify(acme, "twin", 1, actor="test")).state == "ready"


async def test_quarantine_survives_deletion_during_republish(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, failed: Certificate
) -> None:
    certifying.outcome = failed
    await publish(via=certified)
    loop, is_deleted = asyncio.get_running_loop(), False

    def delete() -> None:
        nonlocal is_deleted
        if not is_deleted:
            is_deleted = True
            deleting = certified.delete_version(acme, "sql", 1, actor="test")
            asyncio.run_coroutine_threadsafe(deleting, loop).result(10)

    # between what the publish knows of the version and its transaction
    with faults.arm("blob.fsync", delete), pytest.raises(Overloaded, match="deleted while the request ran"):
        await publish(via=certified)
    assert is_deleted
    assert (await certified.list_versions(acme, "sql")).items == ()
    again = (await publish(via=certified)).version
    assert (again.version, again.state, parity_of(again)["status"]) == (2, "quarantined", "failed")


@pytest.fixture
def degraded(make_certificate: Make) -> Certificate:
    return make_certificate(
        verdict="degraded",
        reason="Rounding the base leaves 41% of the adapter's effect; at least 80% is expected.",
        effect_kept=0.41,
        min_effect_kept=0.8,
        answer_divergence=0.37,
        answer_agreement=0.83,
        base_divergence=1.3,
        base_agreement=0.37,
        num_answer_tokens=52,
    )


async def test_degraded_version_is_served_with_figures(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, degraded: Certificate
) -> None:
    certifying.outcome = degraded
    version = (await publish(via=certified)).version
    assert (version.state, version.aliases) == ("ready", ("live",))
    check = parity_of(version)
    assert (check["status"], check["certificate"]["effect_kept"]) == ("degraded", 0.41)
    for text in ("leaves 41% of", "83% of the likeliest tokens stay (37% without it)", "0.37 nats", "(1.3 without it)"):
        assert text in check["detail"]
    assert (await certified.resolve(acme, SQL)).version == 1
    assert certified.certificates.num_by_verdict == {"degraded": 1}
    # it holds for this way of computing the base, and isn't made again
    await certified.certificate_backfill.sweep()
    assert len(certifying.asked) == 1


async def test_not_possible_certificate_is_not_retried(
    publish: Any, certified: Registry, certifying: Any, make_certificate: Make
) -> None:
    reason = "The cost of rounding can't be measured. The base's files have changed since it was loaded."
    certifying.outcome = make_certificate(verdict="not_possible", reason=reason)
    version = (await publish(via=certified)).version
    assert (version.state, parity_of(version)["status"]) == ("ready", "not_possible")
    assert reason.rstrip(".") in parity_of(version)["detail"]
    await certified.certificate_backfill.sweep()
    assert len(certifying.asked) == 1


@pytest.mark.parametrize("verdict", ["degraded", "not_possible"])
async def test_strict_server_refuses_degraded_upload(
    verdict: str,
    publish: Any,
    database: Any,
    store: LocalStore,
    small_base: Any,
    certifying: Any,
    acme: TenantId,
    degraded: Certificate,
) -> None:
    registry = Registry(database, store, lambda: small_base, certify=certifying, is_certified_strictly=True)
    certifying.outcome = msgspec.structs.replace(degraded, verdict=verdict)
    with pytest.raises(AdapterUncertified, match="--strict-certificates") as caught:
        await publish(via=registry)
    assert "leaves 41% of" in caught.value.message
    with pytest.raises(AdapterNotFound):
        await registry.get(acme, "sql")
    certifying.outcome = msgspec.structs.replace(degraded, verdict="passed")
    assert (await publish(via=registry)).version.state == "ready"


async def test_strict_server_refuses_upload_without_engine(
    publish: Any, database: Any, store: LocalStore, small_base: Any, certifying: Any, acme: TenantId
) -> None:
    registry = Registry(database, store, lambda: small_base, certify=certifying, is_certified_strictly=True)
    certifying.outcome = Overloaded("Sixty-four verifications are running.")
    with pytest.raises(Overloaded, match="Sixty-four"):
        await publish(via=registry)
    with pytest.raises(AdapterNotFound):
        await registry.get(acme, "sql")


async def test_certificate_of_older_release_is_renewed_once(
    publish: Any, certified: Registry, certifying: Any, database: Any, acme: TenantId
) -> None:
    await publish(via=certified)
    known = {
        "verdict", "max_difference", "mean_difference", "base_difference", "tolerance", "max_effect",
        "top1_agreement", "precision_loss", "num_probe_tokens", "seconds", "reason", "base_digest",
    }  # fmt: skip
    async with database.write() as session:
        row = (await session.execute(select(AdapterVersion))).scalar_one()
        checks = [dict(check) for check in row.checks]
        old = next(check for check in checks if check["name"] == "parity")
        old["certificate"] = {name: value for name, value in old["certificate"].items() if name in known}
        old["holds_for"] = [old["holds_for"][0].partition(": ")[2]]
        row.checks = checks
    (version,) = (await certified.list_versions(acme, "sql")).items
    assert sdk.Certificate.model_validate(parity_of(version)["certificate"]).effect_kept is None
    for _ in range(2):
        await certified.certificate_backfill.sweep()
    assert len(certifying.asked) == 2
