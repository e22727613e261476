"""Requests summed by the version that answered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from stopped_clock import StoppedClock

from loraserve.api.metrics.durations import DURATION_BOUNDS_S, bucket, empty_counts, quantile
from loraserve.api.metrics.version_traffic import EndedRequest, Role, TrafficTally, VersionKey, VersionTraffic
from loraserve.limits import LIMITS
from loraserve.types import AdapterPart, AdapterRef, Digest, TenantId

ACME, GLOBEX = TenantId("1"), TenantId("2")


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(1_000_000.0)


@pytest.fixture
def traffic(clock: StoppedClock) -> VersionTraffic:
    return VersionTraffic(limits=dataclasses.replace(LIMITS, max_traffic_versions=3), clock=clock)


def version(number: int = 1, *, name: str = "sql", tenant: TenantId = ACME, **how: Any) -> AdapterRef:
    digest = Digest(f"{number:064x}")
    return AdapterRef(tenant, name, number, digest, digest, digest, **how)


def ended(**how: Any) -> EndedRequest:
    fields = {"is_failure": False, "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 5}
    return EndedRequest(**{**fields, "first_token_s": 0.5, "per_token_s": 0.01, **how})


def sums(
    traffic: VersionTraffic, tenant: TenantId = ACME, seconds: float = 3600
) -> dict[tuple[int, str], TrafficTally]:
    return {(key.version, key.role): tally for key, tally in traffic.of(tenant, "sql", seconds).items()}


def test_versions_and_roles_are_summed_apart(traffic: VersionTraffic) -> None:
    traffic.add(ACME, version(1), Role.ANSWER, ended())
    traffic.add(ACME, version(1), Role.ANSWER, ended(is_failure=True, first_token_s=None, per_token_s=None))
    traffic.add(ACME, version(2), Role.SHADOW, ended())
    found = sums(traffic)
    assert set(found) == {(1, "answer"), (2, "shadow")}
    one = found[1, "answer"]
    assert (one.num_requests, one.num_failed) == (2, 1)
    assert (one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (6, 2, 10)
    assert (sum(one.first_token_counts), sum(one.per_token_counts)) == (1, 1)
    assert one.first_token_counts[bucket(0.5)] == 1


def test_only_requests_of_owner_for_versions_are_counted(traffic: VersionTraffic) -> None:
    traffic.add(GLOBEX, version(1), Role.ANSWER, ended())
    traffic.add(ACME, None, Role.ANSWER, ended())
    traffic.add(ACME, version(1, parts=(AdapterPart(version(2), 1.0),)), Role.ANSWER, ended())
    assert sums(traffic) == sums(traffic, GLOBEX) == {}


def test_version_of_deleted_namesake_is_counted_apart(traffic: VersionTraffic) -> None:
    first = version(1)
    traffic.add(ACME, first, Role.ANSWER, ended())
    other = AdapterRef(ACME, "sql", 1, Digest("f" * 64), first.config_blob, first.weights_blob)
    traffic.add(ACME, other, Role.ANSWER, ended())
    assert [key.digest for key in traffic.of(ACME, "sql", 3600)] == [first.digest, other.digest]


def test_requests_older_than_hour_are_forgotten(traffic: VersionTraffic, clock: StoppedClock) -> None:
    traffic.add(ACME, version(1), Role.ANSWER, ended())
    clock.now_s += 1200
    traffic.add(ACME, version(1), Role.ANSWER, ended())
    assert sums(traffic)[1, "answer"].num_requests == 2
    assert sums(traffic, seconds=600)[1, "answer"].num_requests == 1
    assert clock.now_s - 600 < traffic.since(600) <= clock.now_s - 300
    clock.now_s += 2500
    assert sums(traffic)[1, "answer"].num_requests == 1
    clock.now_s += 3600
    assert sums(traffic) == {}
    traffic.add(ACME, version(1), Role.ANSWER, ended())
    (slots,) = traffic._tenants[ACME].values()
    assert len(slots) == 1


def test_tenant_with_many_versions_evicts_own_versions(traffic: VersionTraffic) -> None:
    traffic.add(GLOBEX, version(1, tenant=GLOBEX), Role.ANSWER, ended())
    for number in (1, 2, 1, 3):
        traffic.add(ACME, version(number), Role.ANSWER, ended())
    assert set(sums(traffic)) == {(1, "answer"), (3, "answer")}
    assert set(sums(traffic, GLOBEX)) == {(1, "answer")}


def test_percentile_is_bound_of_bucket() -> None:
    counts = empty_counts()
    assert quantile(counts, 0.5) is None
    for seconds, count in ((0.01, 90), (0.1, 9), (1e9, 1)):
        counts[bucket(seconds)] += count
    for part, seconds in ((0.5, 0.01), (0.9, 0.01), (0.95, 0.1), (0.99, 0.1)):
        found = quantile(counts, part)
        assert found is not None
        assert seconds <= found <= 1.25 * seconds
    assert quantile(counts, 1.0) == DURATION_BOUNDS_S[-1]


def test_keys_sort_by_number() -> None:
    keys = [VersionKey("sql", number, Digest("a"), Role.ANSWER) for number in (10, 9)]
    assert [key.version for key in sorted(keys)] == [9, 10]
