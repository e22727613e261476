"""Versions that were published without a certificate, since the engine was away,
get theirs later, by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from adapters_store import LocalStore
from loraserve.db.models import Adapter, AdapterVersion
from loraserve.db.session import Database, utc_now
from loraserve.errors import (
    AdapterNotReady,
    AdapterQuarantined,
    AdapterRejected,
    EngineDied,
    EngineUnavailable,
    Overloaded,
)
from loraserve.limits import LIMITS, Limits
from loraserve.registry.health import certificate_backfill
from loraserve.registry.health.certificate_backfill import MAX_RETRY_S, RETRY_S
from loraserve.registry.health.outcome import DIED_ONCE, DIED_TWICE, MAX_SETUPS
from loraserve.registry.model_name import parse_model
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import BaseSpec, Certificate, TenantId

Make = Callable[..., Certificate]
AWAY = EngineUnavailable("The engine isn't up.")
DIED = EngineDied("The engine died; try again.")


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make_server(
    database: Database, store: LocalStore, small_base: BaseSpec, certifying: Any, time: Time
) -> Callable[..., Registry]:
    """A function that makes one of the servers of a database."""

    def make(base: BaseSpec = small_base, **how: Any) -> Registry:
        return Registry(database, store, lambda: base, certify=certifying, monotonic=time, **how)

    return make


@pytest.fixture
def server(make_server: Callable[..., Registry]) -> Registry:
    return make_server()


async def parity(registry: Registry, tenant: TenantId, name: str = "sql") -> str:
    checks = (await registry.get_version(tenant, name, 1)).checks
    return str(next(check["status"] for check in checks if check["name"] == "parity"))


async def detail(registry: Registry, tenant: TenantId) -> str:
    checks = (await registry.get_version(tenant, "sql", 1)).checks
    return str(next(check["detail"] for check in checks if check["name"] == "parity"))


async def until_asked(certifying: Any, num_times: int) -> None:
    async with asyncio.timeout(5):
        while len(certifying.asked) < num_times:
            await asyncio.sleep(0.001)


async def test_version_published_without_engine_is_verified_later(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = make_certificate()
    await publish("whole", 1, via=server)
    assert await parity(server, acme) == "skipped"
    num_asked = len(certifying.asked)
    assert await server.certificate_backfill.sweep()
    assert await parity(server, acme) == "passed"
    assert server.certificate_backfill.num_by_verdict == {"passed": 1}
    rows = [row for row in (await server.list_audit(acme)).items if row.action == "version.verify"]
    assert [(row.target, row.actor) for row in rows] == [("sql@1", "server")]
    # once: neither it again, nor the one that had its certificate
    assert await server.certificate_backfill.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["sql"]


@pytest.mark.parametrize("is_rejected", [False, True])
async def test_failed_late_certificate_quarantines_version(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, make_certificate: Make, is_rejected: bool
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    sql = parse_model("sql", "base")
    assert (await server.resolve(acme, sql)).version == 1
    failed = make_certificate(verdict="failed", max_difference=0.31)
    certifying.outcome = AdapterRejected("It takes 4 MiB.") if is_rejected else failed
    await server.certificate_backfill.sweep()
    with pytest.raises(AdapterQuarantined):
        await server.resolve(acme, sql)
    # counted as in the other metric, of which this one is a part
    verdict = "rejected" if is_rejected else "failed"
    assert server.certificate_backfill.num_by_verdict == {verdict: 1}
    assert server.certificates.num_by_verdict == {"skipped": 1, verdict: 1}


@pytest.mark.parametrize("at_upload", [AWAY, DIED])
async def test_version_killing_engine_is_tried_twice_across_servers(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    certifying: Any,
    time: Time,
    acme: TenantId,
    make_certificate: Make,
    at_upload: Exception,
) -> None:
    certifying.outcome = at_upload
    await publish(via=server)
    certifying.outcome = DIED
    for one in [server] if at_upload is DIED else [server, make_server()]:
        assert await detail(server, acme) != DIED_TWICE
        with pytest.raises(EngineDied):
            await one.certificate_backfill.sweep()
    assert (await parity(server, acme), await detail(server, acme)) == ("skipped", DIED_TWICE)
    num_asked = len(certifying.asked)
    time.now += MAX_RETRY_S
    for one in (server, make_server()):
        assert await one.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked
    # it is served, and whoever asks for a certificate may have one
    assert (await server.resolve(acme, parse_model("sql", "base"))).version == 1
    with pytest.raises(EngineDied):
        await server.certificates.verify(acme, "sql", 1, actor="x")
    certifying.outcome = make_certificate()
    await server.certificates.verify(acme, "sql", 1, actor="x")
    assert await parity(server, acme) == "passed"


async def test_earlier_engine_outage_does_not_blame_version(
    publish: Any, server: Registry, certifying: Any, time: Time, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = DIED
    await publish(via=server)
    assert await detail(server, acme) == DIED_ONCE
    certifying.outcome = AWAY
    for _ in range(3):
        time.now += MAX_RETRY_S
        with pytest.raises(EngineUnavailable):
            await server.certificate_backfill.sweep()
    assert await detail(server, acme) == DIED_ONCE
    time.now += MAX_RETRY_S
    certifying.outcome = make_certificate()
    assert await server.certificate_backfill.sweep()
    assert await parity(server, acme) == "passed"


async def test_engine_death_keeps_existing_certificate(
    publish: Any, server: Registry, certifying: Any, acme: TenantId
) -> None:
    await publish(via=server)
    before = (await server.get_version(acme, "sql", 1)).checks
    certifying.outcome = DIED
    for _ in range(2):
        with pytest.raises(EngineDied):
            await server.certificates.verify(acme, "sql", 1, actor="x")
    assert (await server.get_version(acme, "sql", 1)).checks == before


async def test_backfill_skips_versions_left_to_requests(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, acme: TenantId
) -> None:
    on_request = make_server(is_certified_at_upload=False)
    await publish(via=on_request)
    await server.certificate_backfill.sweep()
    assert (await parity(server, acme), certifying.asked) == ("skipped", [])


async def test_foreign_base_and_deleted_adapter_versions_are_skipped(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    small_base: BaseSpec,
    certifying: Any,
    acme: TenantId,
    make_certificate: Make,
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    await publish("gone", 1, via=server)
    await server.delete(acme, "gone", actor="x")
    certifying.outcome = make_certificate()
    num_asked = len(certifying.asked)
    other = make_server(_other(small_base))
    assert await other.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked
    assert await server.certificate_backfill.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["sql"]


def _other(base: BaseSpec) -> BaseSpec:
    return msgspec.structs.replace(base, digest="f" * 64)  # type: ignore[arg-type]


async def test_server_without_loaded_base_verifies_no_version(database: Database, store: LocalStore) -> None:
    def base() -> BaseSpec:
        raise AWAY

    assert not await Registry(database, store, base).certificate_backfill.sweep()


async def test_two_servers_do_not_verify_the_same(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = asyncio.create_task(server.certificate_backfill.sweep())
    await until_asked(certifying, num_asked + 1)
    async with asyncio.timeout(5):
        assert not await make_server().certificate_backfill.sweep()
    certifying.gate.set()
    assert await sweeping
    assert len(certifying.asked) == num_asked + 1


async def test_lease_lasts_through_each_slow_certificate(
    publish: Any, make_server: Callable[..., Registry], certifying: Any, make_certificate: Make
) -> None:
    passed_s = 0.0
    start = utc_now()
    one, other = (make_server(clock=lambda: start + timedelta(seconds=passed_s)) for _ in range(2))
    certifying.outcome = AWAY
    for number in range(3):
        await publish(f"a{number}", number, via=one)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = asyncio.create_task(one.certificate_backfill.sweep())
    for number in range(1, 4):
        await until_asked(certifying, num_asked + number)
        passed_s += LIMITS.verification_timeout_s
        async with asyncio.timeout(5):
            assert not await other.certificate_backfill.sweep()
        certifying.gate.set()
        certifying.gate.clear()
    assert await sweeping
    # one that ended keeps it no longer
    certifying.gate.set()
    certifying.outcome = AWAY
    await publish("a3", 3, via=one)
    certifying.outcome = make_certificate()
    passed_s += 3 * LIMITS.verification_timeout_s
    assert await other.certificate_backfill.sweep()
    assert other.certificate_backfill.num_by_verdict == {"passed": 1}


@pytest.mark.parametrize("failure", [AWAY, Overloaded("It has too much to do.")])
async def test_unavailable_engine_is_tried_with_single_version(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, failure: Exception
) -> None:
    certifying.outcome = failure
    for number in range(3):
        await publish(f"a{number}", number, via=server)
    num_asked = len(certifying.asked)
    with pytest.raises(type(failure)):
        await server.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 1
    # the next sweep begins with another: one that takes too long doesn't keep the rest
    with pytest.raises(type(failure)):
        await server.certificate_backfill.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["a0", "a1"]


async def test_unverifiable_version_is_retried_with_growing_delay(
    publish: Any, server: Registry, certifying: Any, time: Time, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = AdapterNotReady("No place is free.")
    await publish(via=server)
    await publish("other", 1, via=server)

    async def num_asked(after_s: float) -> int:
        before = len(certifying.asked)
        time.now += after_s
        assert await server.certificate_backfill.sweep()
        return len(certifying.asked) - before

    assert [await num_asked(s) for s in (0, RETRY_S - 1, 1, RETRY_S, RETRY_S)] == [2, 0, 2, 0, 2]
    # up to an hour
    for _ in range(10):
        assert await num_asked(MAX_RETRY_S) == 2
    assert await num_asked(MAX_RETRY_S - 1) == 0
    certifying.outcome = make_certificate()
    assert await num_asked(1) == 2
    assert [await parity(server, acme, name) for name in ("sql", "other")] == ["passed", "passed"]


async def test_every_version_is_examined_across_windows(
    publish: Any, server: Registry, certifying: Any, make_certificate: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_backfill, "_WINDOW", 2)
    for number in range(5):
        certifying.outcome = AWAY if number in (1, 4) else make_certificate()
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    num_asked = len(certifying.asked)
    assert await server.certificate_backfill.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["a1", "a4"]


async def test_versions_are_verified_singly_until_close(
    publish: Any,
    server: Registry,
    certifying: Any,
    acme: TenantId,
    make_certificate: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificate_backfill, "LIMITS", replace(Limits(), late_certificates_interval_s=0.001))
    certifying.outcome = AWAY
    for number in range(2):
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    server.certificate_backfill.start()
    await until_asked(certifying, num_asked + 1)
    await asyncio.sleep(0.05)
    assert len(certifying.asked) == num_asked + 1
    async with asyncio.timeout(5):
        await server.certificate_backfill.close()
    certifying.gate.set()
    await asyncio.sleep(0.05)
    assert len(certifying.asked) == num_asked + 1
    assert [await parity(server, acme, name) for name in ("a0", "a1")] == ["skipped", "skipped"]


async def test_a_failure_does_not_end_the_sweeps(
    publish: Any,
    server: Registry,
    certifying: Any,
    acme: TenantId,
    make_certificate: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificate_backfill, "LIMITS", replace(Limits(), late_certificates_interval_s=0.001))
    for number in range(3):
        certifying.outcome = AWAY
        await publish(f"a{number}", number, via=server)
    num_asked = len(certifying.asked)
    server.certificate_backfill.start()
    await until_asked(certifying, num_asked + 1)
    look, num_broken = server.certificate_backfill._look, 0

    async def break_once(after: str, base: Any) -> Any:
        nonlocal num_broken
        num_broken += 1
        if num_broken == 1:
            raise ValueError("a bug of ours")
        return await look(after, base)

    monkeypatch.setattr(server.certificate_backfill, "_look", break_once)
    certifying.outcome = make_certificate()
    async with asyncio.timeout(5):
        while await parity(server, acme, "a2") != "passed":
            await asyncio.sleep(0.001)
        await server.certificate_backfill.close()


@pytest.mark.parametrize("outcome", [None, AdapterNotReady("No place is free."), ValueError("a bug of ours")])
async def test_engine_keeps_half_of_time_for_requests(
    publish: Any, server: Registry, certifying: Any, time: Time, make_certificate: Make, outcome: Exception | None
) -> None:
    certifying.outcome = AWAY
    for number in range(2):
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate() if outcome is None else outcome
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = asyncio.create_task(server.certificate_backfill.sweep())
    await until_asked(certifying, num_asked + 1)
    time.now += 0.2
    certifying.gate.set()
    certified = asyncio.get_running_loop().time()
    await until_asked(certifying, num_asked + 2)
    assert asyncio.get_running_loop().time() - certified > 0.19
    assert await sweeping


@pytest.mark.parametrize("failure", [AWAY, Overloaded("It took too long.")])
async def test_pause_follows_failure_and_delays_no_other_server(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    certifying: Any,
    time: Time,
    make_certificate: Make,
    failure: Exception,
) -> None:
    certifying.outcome = failure
    await publish(via=server)
    certifying.gate.clear()
    sweeping = asyncio.create_task(server.certificate_backfill.sweep())
    await until_asked(certifying, 2)
    time.now += 30.0
    certifying.gate.set()
    other = make_server()
    async with asyncio.timeout(5):
        while not server.certificate_backfill._retries._failures:
            await asyncio.sleep(0.001)
        certifying.outcome = make_certificate()
        while not await other.certificate_backfill.sweep():
            await asyncio.sleep(0.001)
    assert other.certificate_backfill.num_by_verdict == {"passed": 1}
    assert not sweeping.done()
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)


async def test_sick_server_does_not_block_healthy_servers(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    with pytest.raises(EngineUnavailable):
        await server.certificate_backfill.sweep()
    certifying.outcome = make_certificate()
    other = make_server()
    assert await other.certificate_backfill.sweep()
    assert other.certificate_backfill.num_by_verdict == {"passed": 1}


async def test_servers_of_two_bases_do_not_wait_mutually(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    small_base: BaseSpec,
    certifying: Any,
    make_certificate: Make,
) -> None:
    other = make_server(_other(small_base))
    certifying.outcome = AWAY
    await publish(via=server)
    await publish("other", 1, via=other)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = [asyncio.create_task(one.certificate_backfill.sweep()) for one in (server, other)]
    await until_asked(certifying, num_asked + 2)
    certifying.gate.set()
    assert await asyncio.gather(*sweeping) == [True, True]


async def test_internal_error_on_version_leaves_other_versions_verified(
    publish: Any,
    server: Registry,
    acme: TenantId,
    certifying: Any,
    time: Time,
    make_certificate: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certifying.outcome = AWAY
    for number in range(2):
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    asked, verify = [], server.certificates.verify

    async def break_on_the_first(tenant: TenantId, name: str, number: int, *, actor: str) -> Any:
        asked.append(name)
        if name == "a0":
            raise ValueError("a bug of ours")
        return await verify(tenant, name, number, actor=actor)

    monkeypatch.setattr(server.certificates, "verify", break_on_the_first)
    assert await server.certificate_backfill.sweep()
    assert await parity(server, acme, "a1") == "passed"
    assert "a bug of ours" in caplog.text
    # put off as any other
    assert await server.certificate_backfill.sweep()
    time.now += RETRY_S
    assert await server.certificate_backfill.sweep()
    assert asked == ["a0", "a1", "a0"]


async def test_deleted_or_quarantined_version_is_not_verified(
    database: Database,
    publish: Any,
    server: Registry,
    certifying: Any,
    acme: TenantId,
    globex: TenantId,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certifying.outcome = AWAY
    for seed, name in enumerate(("adapter", "damaged", "there")):
        await publish(name, seed, via=server)
    await publish("version", 3, via=server)
    await publish("version", 4, via=server)
    await publish("tenant", 5, via=server, tenant=globex)
    await server.delete(acme, "adapter", actor="x")
    await server.delete_version(acme, "version", 1, actor="x")
    damaged = await server.get_version(acme, "damaged", 1)
    await server.corruption.quarantine(damaged.digest, damaged.weights_blob)
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    await authenticator.tenants.delete("globex", actor="test")
    asked = []

    async def verify(_tenant: TenantId, name: str, number: int, *, actor: str) -> Any:
        asked.append((name, number))
        raise AdapterNotReady("No place is free.")

    monkeypatch.setattr(server.certificates, "verify", verify)
    assert await server.certificate_backfill.sweep()
    assert asked == [("there", 1), ("version", 2)]


async def test_retries_of_deleted_versions_are_forgotten(
    publish: Any, server: Registry, certifying: Any, acme: TenantId
) -> None:
    certifying.outcome = AdapterNotReady("No place is free.")
    await publish(via=server)
    await server.certificate_backfill.sweep()
    assert len(server.certificate_backfill._retries._failures) == 1
    await server.delete(acme, "sql", actor="x")
    await server.certificate_backfill.sweep()
    assert server.certificate_backfill._retries._failures == {}


async def test_deletion_during_verification_is_no_failure(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    for number in range(2):
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = asyncio.create_task(server.certificate_backfill.sweep())
    await until_asked(certifying, num_asked + 1)
    await server.delete(acme, "a0", actor="x")
    certifying.gate.set()
    assert await sweeping
    assert await parity(server, acme, "a1") == "passed"
    assert server.certificate_backfill._retries._failures == {}


async def test_automatic_quarantine_is_logged_as_error(
    publish: Any, server: Registry, certifying: Any, make_certificate: Make, caplog: pytest.LogCaptureFixture
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = make_certificate(verdict="failed", max_difference=0.31)
    await server.certificate_backfill.sweep()
    assert [record.levelname for record in caplog.records if "quarantined" in record.message] == ["ERROR"]


async def test_on_request_server_verifies_only_after_settings_change(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, acme: TenantId
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = None
    certifying.asked.clear()
    on_request = make_server(is_certified_at_upload=False)
    assert not await on_request.certificate_backfill.sweep()
    assert certifying.asked == []
    on_request.certificate_backfill.start()
    assert on_request.certificate_backfill._task.is_running
    await on_request.certificate_backfill.close()
    on_request.certificates.is_at_upload = True
    assert await on_request.certificate_backfill.sweep()
    assert len(certifying.asked) == 1


def computed(base: BaseSpec, **how: str) -> BaseSpec:
    """Return the base with the same weights, computed in another way."""
    return msgspec.structs.replace(base, **how)


@pytest.mark.parametrize(
    "how",
    [
        {"quantization": "int8", "arithmetic": "w8a8-row"},
        {"dtype": "bfloat16"},
        {"instructions": "avx512_core_vnni"},
        {"device": "cuda"},
    ],
)
async def test_version_is_served_and_reverified_under_changed_arithmetic(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    small_base: BaseSpec,
    certifying: Any,
    acme: TenantId,
    how: dict[str, str],
) -> None:
    version = (await publish(via=server)).version
    other = make_server(computed(small_base, **how))
    num_asked = len(certifying.asked)
    # served meanwhile
    assert (await other.resolve(acme, parse_model("sql", "base"))).digest == version.digest
    assert await other.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 1
    assert other.certificate_backfill.num_by_verdict == {"passed": 1}
    # both ways are remembered: servers of one base that compute it differently don't take turns
    for one in (server, other, make_server(), make_server(computed(small_base, **how))):
        assert await one.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 1


async def test_certificate_without_arithmetic_is_renewed_once(
    publish: Any, server: Registry, database: Database, certifying: Any, acme: TenantId
) -> None:
    await publish(via=server)
    async with database.write() as session:
        row = (await session.scalars(select(AdapterVersion))).one()
        row.checks = [{key: value for key, value in check.items() if key != "holds_for"} for check in row.checks]
    num_asked = len(certifying.asked)
    for _ in range(2):
        assert await server.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 1


async def test_failure_under_changed_arithmetic_quarantines_and_voids_pass(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    small_base: BaseSpec,
    certifying: Any,
    acme: TenantId,
    make_certificate: Make,
) -> None:
    await publish(via=server)
    other = make_server(computed(small_base, quantization="int8"))
    certifying.outcome = make_certificate(verdict="failed", max_difference=0.31)
    assert await other.certificate_backfill.sweep()
    with pytest.raises(AdapterQuarantined):
        await other.resolve(acme, parse_model("sql", "base"))
    certifying.outcome = make_certificate()
    await server.certificates.verify(acme, "sql", 1, actor="x")
    num_asked = len(certifying.asked)
    # what it passed on before the failure counts no more
    assert await other.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 1


async def test_version_killing_changed_arithmetic_engine_is_tried_twice(
    publish: Any,
    server: Registry,
    make_server: Callable[..., Registry],
    small_base: BaseSpec,
    certifying: Any,
    time: Time,
    acme: TenantId,
) -> None:
    await publish(via=server)
    certifying.outcome = DIED
    num_asked = len(certifying.asked)
    for _ in range(3):
        other = make_server(computed(small_base, quantization="int8"))
        with contextlib.suppress(EngineDied):
            await other.certificate_backfill.sweep()
    assert len(certifying.asked) == num_asked + 2
    assert await detail(server, acme) == DIED_TWICE
    assert (await server.resolve(acme, parse_model("sql", "base"))).version == 1


async def test_of_many_ways_the_oldest_is_forgotten(
    publish: Any, server: Registry, make_server: Callable[..., Registry], small_base: BaseSpec, acme: TenantId
) -> None:
    await publish(via=server)
    for number in range(MAX_SETUPS):
        await make_server(computed(small_base, instructions=f"isa-{number}")).certificate_backfill.sweep()
    checks = (await server.get_version(acme, "sql", 1)).checks
    held = next(check["holds_for"] for check in checks if check["name"] == "parity")
    assert [setup.split("(")[1].split(")")[0] for setup in held] == [f"isa-{number}" for number in range(MAX_SETUPS)]


async def lose_certificate(database: Database, name: str) -> None:
    """Make a version's certificate one that was skipped, as no call of the registry does."""
    async with database.write() as session:
        query = select(AdapterVersion).join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        row = (await session.scalars(query.where(Adapter.name == name))).one()
        row.checks = [
            {"name": "parity", "status": "skipped", "detail": "away"} if check["name"] == "parity" else check
            for check in row.checks
        ]


async def test_new_versions_are_always_swept_old_versions_hourly(
    publish: Any, make_server: Callable[..., Registry], certifying: Any, time: Time, acme: TenantId, database: Database
) -> None:
    start = utc_now()
    server = make_server(clock=lambda: start + timedelta(seconds=time.now))
    await publish(via=server)
    assert await server.certificate_backfill.sweep()
    # its version is older than what counts as new
    time.now += 1000
    assert await server.certificate_backfill.sweep()
    await lose_certificate(database, "sql")
    await publish("fresh", 1, via=server)
    await lose_certificate(database, "fresh")
    time.now += 10
    assert await server.certificate_backfill.sweep()
    assert [await parity(server, acme, name) for name in ("sql", "fresh")] == ["skipped", "passed"]
    time.now += certificate_backfill._FULL_INTERVAL_S
    assert await server.certificate_backfill.sweep()
    assert await parity(server, acme) == "passed"


@pytest.mark.parametrize("is_closed", [False, True])
async def test_single_server_examines_all_versions_each_hour(
    publish: Any,
    make_server: Callable[..., Registry],
    time: Time,
    acme: TenantId,
    database: Database,
    is_closed: bool,
) -> None:
    start = utc_now()
    first, second = (make_server(clock=lambda: start + timedelta(seconds=time.now)) for _ in range(2))
    await publish(via=first)
    # older than what another server's sweep over all versions may have missed
    time.now += certificate_backfill._FULL_INTERVAL_S + 1000
    assert await first.certificate_backfill.sweep()
    await lose_certificate(database, "sql")
    if is_closed:
        await first.certificate_backfill.close()
    else:
        for _ in range(2):
            time.now += 100
            assert await second.certificate_backfill.sweep()
        assert await parity(second, acme) == "skipped"
        time.now += certificate_backfill._FULL_INTERVAL_S
    assert await second.certificate_backfill.sweep()
    assert await parity(second, acme) == "passed"


async def test_server_finds_versions_published_since_other_servers_sweep(
    publish: Any, make_server: Callable[..., Registry], time: Time, acme: TenantId, database: Database
) -> None:
    start = utc_now()
    first, second = (make_server(clock=lambda: start + timedelta(seconds=time.now)) for _ in range(2))
    assert await first.certificate_backfill.sweep()
    time.now += 10
    await publish(via=first)
    await lose_certificate(database, "sql")
    # the first one is killed: its lease stays
    time.now += certificate_backfill._FULL_INTERVAL_S - 100
    assert await second.certificate_backfill.sweep()
    assert await parity(second, acme) == "passed"


async def test_unverified_old_version_is_retried_by_each_sweep(
    publish: Any,
    make_server: Callable[..., Registry],
    certifying: Any,
    time: Time,
    acme: TenantId,
    make_certificate: Make,
) -> None:
    start = utc_now()
    server = make_server(clock=lambda: start + timedelta(seconds=time.now))
    certifying.outcome = AdapterNotReady("No place is free.")
    await publish(via=server)
    for _ in range(2):
        time.now += 1000
        assert await server.certificate_backfill.sweep()
    certifying.outcome = make_certificate()
    time.now += 1000
    assert await server.certificate_backfill.sweep()
    assert await parity(server, acme) == "passed"
