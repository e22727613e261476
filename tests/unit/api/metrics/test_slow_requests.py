"""The slowest requests of the last hour, within bounds."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from stopped_clock import StoppedClock

from loraserve.api.metrics.slow_requests import DURATION, FIRST_TOKEN, SlowRequest, SlowRequests
from loraserve.limits import LIMITS
from loraserve.types import TenantId

ACME, GLOBEX = TenantId("1"), TenantId("2")


def make_request(duration_s: float, first_token_s: float | None = 0.1, tenant: TenantId = ACME) -> SlowRequest:
    return SlowRequest(
        id=f"cmpl-{duration_s:g}",
        tenant=tenant,
        tenant_name="acme",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        asked="sql",
        answered_by="sql@1",
        outcome="stop",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        queue_s=0.0,
        adapter_s=0.0,
        prefill_s=0.0,
        first_token_s=first_token_s,
        duration_s=duration_s,
    )


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(10_000.0)


@pytest.fixture
def slow(clock: StoppedClock) -> SlowRequests:
    limits = dataclasses.replace(LIMITS, max_slow_requests_per_minute=3, max_slow_request_minutes=4)
    return SlowRequests(limits=limits, clock=clock)


def durations(
    slow: SlowRequests, tenant: TenantId | None = ACME, order: str = DURATION, limit: int = 99
) -> list[float]:
    return [one.duration_s for one in slow.slowest(tenant, order=order, limit=limit)]


def test_the_slowest_of_a_minute_stay(slow: SlowRequests) -> None:
    for duration_s in (3.0, 1.0, 5.0, 2.0, 4.0):
        slow.add(make_request(duration_s))
    assert durations(slow) == [5.0, 4.0, 3.0]
    assert durations(slow, limit=1) == [5.0]


def test_late_first_token_is_slow_in_quick_answer(slow: SlowRequests) -> None:
    for duration_s in (9.0, 8.0, 7.0):
        slow.add(make_request(duration_s))
    slow.add(make_request(2.0, first_token_s=1.9))
    slow.add(make_request(1.0, first_token_s=None))
    assert durations(slow) == [9.0, 8.0, 7.0]
    assert durations(slow, order=FIRST_TOKEN)[:2] == [2.0, 1.0]


def test_each_tenant_has_own_slow_requests(slow: SlowRequests) -> None:
    for duration_s in range(1, 10):
        slow.add(make_request(float(duration_s), tenant=GLOBEX))
    slow.add(make_request(0.5))
    assert durations(slow) == [0.5]
    assert durations(slow, None) == [9.0, 8.0, 7.0, 0.5]


def test_slow_requests_expire_after_hour(slow: SlowRequests, clock: StoppedClock) -> None:
    slow.add(make_request(1.0))
    clock.now_s += LIMITS.slow_requests_s - 60
    assert durations(slow) == [1.0]
    clock.now_s += 180
    assert durations(slow) == []
    assert not slow._minutes


def test_kept_minutes_are_bounded(slow: SlowRequests, clock: StoppedClock) -> None:
    for duration_s in range(1, 10):
        slow.add(make_request(float(duration_s)))
        clock.now_s += 60
    assert len(slow._minutes) == 4
    assert durations(slow) == [9.0, 8.0, 7.0, 6.0]
