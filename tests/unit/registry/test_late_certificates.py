"""Versions that were published without a certificate, since the engine was away, get theirs later, by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.errors import AdapterNotReady, AdapterQuarantined, AdapterRejected, EngineUnavailable
from loraserve.limits import Limits
from loraserve.registry import late_certificates
from loraserve.registry.late_certificates import RETRY_S
from loraserve.registry.model_name import parse_model
from loraserve.registry.service import Registry
from loraserve.types import BaseSpec, Certificate, TenantId

Make = Callable[..., Certificate]
AWAY = EngineUnavailable("The engine isn't up.")


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


async def until_asked(certifying: Any, num_times: int) -> None:
    async with asyncio.timeout(5):
        while len(certifying.asked) < num_times:
            await asyncio.sleep(0.001)


async def test_a_version_published_while_the_engine_was_away_is_verified_once_it_is_there(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = make_certificate()
    await publish("whole", 1, via=server)
    assert await parity(server, acme) == "skipped"
    num_asked = len(certifying.asked)
    assert await server.late_certificates.sweep()
    assert await parity(server, acme) == "passed"
    assert server.late_certificates.num_by_verdict == {"passed": 1}
    rows = [row for row in (await server.list_audit(acme)).items if row.action == "version.verify"]
    assert [(row.target, row.actor) for row in rows] == [("sql@1", "server")]
    # once: neither it again, nor the one that had its certificate
    assert await server.late_certificates.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["sql"]


@pytest.mark.parametrize("is_rejected", [False, True])
async def test_a_late_certificate_that_failed_is_a_quarantine(
    publish: Any, server: Registry, certifying: Any, acme: TenantId, make_certificate: Make, is_rejected: bool
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    sql = parse_model("sql", "base")
    assert (await server.resolve(acme, sql)).version == 1
    failed = make_certificate(verdict="failed", max_difference=0.31)
    certifying.outcome = AdapterRejected("It takes 4 MiB.") if is_rejected else failed
    await server.late_certificates.sweep()
    with pytest.raises(AdapterQuarantined):
        await server.resolve(acme, sql)
    assert server.late_certificates.num_by_verdict == {"failed": 1}


async def test_what_was_left_to_whoever_asks_stays_so(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, acme: TenantId
) -> None:
    on_request = make_server(is_certified_at_upload=False)
    await publish(via=on_request)
    await server.late_certificates.sweep()
    assert (await parity(server, acme), certifying.asked) == ("skipped", [])


async def test_versions_of_another_base_and_of_deleted_adapters_are_left_alone(
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
    assert await other.late_certificates.sweep()
    assert len(certifying.asked) == num_asked
    assert await server.late_certificates.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["sql"]


def _other(base: BaseSpec) -> BaseSpec:
    return msgspec.structs.replace(base, digest="f" * 64)  # type: ignore[arg-type]


async def test_a_server_whose_base_is_not_loaded_asks_nothing(database: Database, store: LocalStore) -> None:
    def base() -> BaseSpec:
        raise AWAY

    assert not await Registry(database, store, base).late_certificates.sweep()


async def test_two_servers_do_not_verify_the_same(
    publish: Any, server: Registry, make_server: Callable[..., Registry], certifying: Any, make_certificate: Make
) -> None:
    certifying.outcome = AWAY
    await publish(via=server)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    sweeping = asyncio.create_task(server.late_certificates.sweep())
    await until_asked(certifying, num_asked + 1)
    assert not await make_server().late_certificates.sweep()
    certifying.gate.set()
    assert await sweeping
    assert len(certifying.asked) == num_asked + 1


async def test_an_engine_that_is_away_is_asked_for_one_version(
    publish: Any, server: Registry, certifying: Any, acme: TenantId
) -> None:
    certifying.outcome = AWAY
    for number in range(3):
        await publish(f"a{number}", number, via=server)
    num_asked = len(certifying.asked)
    with pytest.raises(EngineUnavailable):
        await server.late_certificates.sweep()
    assert len(certifying.asked) == num_asked + 1
    # the next sweep begins with another: one that takes too long doesn't keep the rest
    with pytest.raises(EngineUnavailable):
        await server.late_certificates.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["a0", "a1"]


async def test_a_version_that_can_not_be_verified_is_asked_for_more_and_more_seldom(
    publish: Any, server: Registry, certifying: Any, time: Time, acme: TenantId, make_certificate: Make
) -> None:
    certifying.outcome = AdapterNotReady("No place is free.")
    await publish(via=server)
    await publish("other", 1, via=server)

    async def num_asked(after_s: float) -> int:
        before = len(certifying.asked)
        time.now += after_s
        assert await server.late_certificates.sweep()
        return len(certifying.asked) - before

    assert [await num_asked(s) for s in (0, RETRY_S - 1, 1, RETRY_S, RETRY_S)] == [2, 0, 2, 0, 2]
    certifying.outcome = make_certificate()
    assert await num_asked(4 * RETRY_S) == 2
    assert [await parity(server, acme, name) for name in ("sql", "other")] == ["passed", "passed"]


async def test_every_version_is_looked_at_however_many_there_are(
    publish: Any, server: Registry, certifying: Any, make_certificate: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_certificates, "_WINDOW", 2)
    for number in range(5):
        certifying.outcome = AWAY if number in (1, 4) else make_certificate()
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    num_asked = len(certifying.asked)
    assert await server.late_certificates.sweep()
    assert [ref.name for ref in certifying.asked[num_asked:]] == ["a1", "a4"]


async def test_one_is_verified_at_a_time_and_none_after_the_end(
    publish: Any,
    server: Registry,
    certifying: Any,
    acme: TenantId,
    make_certificate: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_certificates, "LIMITS", replace(Limits(), late_certificates_interval_s=0.001))
    certifying.outcome = AWAY
    for number in range(2):
        await publish(f"a{number}", number, via=server)
    certifying.outcome = make_certificate()
    certifying.gate.clear()
    num_asked = len(certifying.asked)
    server.late_certificates.start()
    await until_asked(certifying, num_asked + 1)
    await asyncio.sleep(0.05)
    assert len(certifying.asked) == num_asked + 1
    async with asyncio.timeout(5):
        await server.late_certificates.close()
    assert [await parity(server, acme, name) for name in ("a0", "a1")] == ["skipped", "skipped"]


async def test_a_server_that_certifies_on_request_begins_nothing(make_server: Callable[..., Registry]) -> None:
    server = make_server(is_certified_at_upload=False)
    server.late_certificates.start()
    assert server.late_certificates._task is None
    await server.late_certificates.close()
