"""A rate per minute, by a clock that the tests turn."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from loraserve.tenancy.limits.admission import LeakyBucket


def test_bucket_passes_only_single_minutes_worth_immediately() -> None:
    bucket = LeakyBucket(at=0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 60, now=0.0) == 0
        bucket.take(1, 60, now=0.0)
    assert bucket.wait_s(1, 60, now=0.0) == 1.0


def test_reported_wait_is_exact_wait() -> None:
    bucket = LeakyBucket(at=0.0)
    bucket.take(100, 120, now=0.0)
    wait_s = bucket.wait_s(50, 120, now=0.0)
    assert wait_s == 15.0
    assert bucket.wait_s(50, 120, now=wait_s - 0.01) > 0
    assert bucket.wait_s(50, 120, now=wait_s) == 0


def test_oversized_amount_passes_empty_bucket_and_is_repaid() -> None:
    bucket = LeakyBucket(at=0.0)
    assert bucket.wait_s(90, 60, now=0.0) == 0
    bucket.take(90, 60, now=0.0)
    assert bucket.wait_s(1, 60, now=0.0) == 31.0


def test_long_pause_saves_at_most_single_minutes_worth() -> None:
    bucket = LeakyBucket(at=0.0)
    bucket.take(60, 60, now=0.0)
    assert bucket.remaining(60, now=3600.0) == 60
    bucket.take(60, 60, now=3600.0)
    assert bucket.wait_s(1, 60, now=3600.0) == 1.0


def test_returned_amount_can_pass_again() -> None:
    bucket = LeakyBucket(at=0.0)
    bucket.take(60, 60, now=0.0)
    bucket.take(-20, 60, now=0.0)
    assert bucket.remaining(60, now=0.0) == 20


def test_zero_rate_never_passes_requests() -> None:
    assert math.isinf(LeakyBucket(at=0.0).wait_s(1, 0, now=10.0))


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_passed_amount_stays_within_minutes_worth_plus_rate(steps: list[tuple[float, int]]) -> None:
    bucket, now, taken = LeakyBucket(at=0.0), 0.0, 0.0
    for pause_s, amount in steps:
        now += pause_s
        if bucket.wait_s(amount, 30, now) == 0:
            bucket.take(amount, 30, now)
            taken += amount
            # one request over a minute's worth may be in debt
            assert taken <= 30 + 30 * now / 60 + 10 + 1e-6
