"""Tallies of each tenant's requests, and of all."""

from __future__ import annotations

import dataclasses

import pytest
from stopped_clock import StoppedClock

from loraserve.api.metrics.activity import Activity, RequestTimer
from loraserve.api.metrics.durations import DURATION_BOUNDS_S
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk
from loraserve.limits import LIMITS
from loraserve.types import RequestId, SamplingParams, TenantId

ACME, GLOBEX = TenantId("1"), TenantId("2")


def make_request(tenant: TenantId = ACME, *, is_background: bool = False) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("cmpl-1-0"),
        tenant=tenant,
        adapter=None,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=9, seed=0),
        is_background=is_background,
    )


def make_chunk(num_tokens: int = 1) -> Chunk:
    return Chunk(
        text="a",
        token_ids=(7,) * num_tokens,
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=None,
        stop_reason=None,
        num_cached_tokens=2,
        queue_s=0.1,
        adapter_s=0.2,
        prefill_s=0.3,
    )


def add_first(timer: RequestTimer, first: Chunk) -> None:
    """Count the first chunk of an answer."""
    timer.num_tokens += len(first.token_ids)
    timer.begin(first)


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def activity(clock: StoppedClock) -> Activity:
    limits = dataclasses.replace(LIMITS, max_tallied_tenants=2)
    return Activity(limits=limits, monotonic=clock, clock=lambda: 1_000.0)


def test_request_is_counted_from_arrival_to_end(activity: Activity, clock: StoppedClock) -> None:
    timer = activity.begin(make_request(), tenant_name="acme", asked="sql")
    for tally in (activity.of(ACME), activity.of(None)):
        assert (tally.num_waiting, tally.num_running, tally.num_ended) == (1, 0, 0)
    clock.now_s = 0.5
    add_first(timer, make_chunk())
    clock.now_s = 2.5
    timer.num_tokens += 4
    for tally in (activity.of(ACME), activity.of(None)):
        assert (tally.num_waiting, tally.num_running, tally.num_ended) == (0, 1, 0)
        assert (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (3, 2, 5)
    for _ in range(2):
        timer.end("stop", answered_by="sql@1", is_failure=False)
    tally = activity.of(ACME)
    assert (tally.num_waiting, tally.num_running, tally.num_ended, tally.num_failed) == (0, 0, 1, 0)
    bucket = tally.first_token_counts.index(1)
    assert DURATION_BOUNDS_S[bucket - 1] < 0.5 <= DURATION_BOUNDS_S[bucket]
    bucket = tally.per_token_counts.index(1)
    assert DURATION_BOUNDS_S[bucket - 1] < 0.5 <= DURATION_BOUNDS_S[bucket]
    (slow,) = activity.slow.slowest(ACME, order="duration", limit=9)
    assert (slow.id, slow.first_token_s, slow.duration_s, slow.queue_s) == ("cmpl-1", 0.5, 2.5, 0.1)


def test_tenants_are_apart(activity: Activity) -> None:
    activity.begin(make_request(), tenant_name="acme", asked="sql")
    assert activity.of(GLOBEX).num_waiting == 0
    assert activity.of(None).num_waiting == 1


def test_background_request_is_counted_but_not_timed(activity: Activity, clock: StoppedClock) -> None:
    timer = activity.begin(make_request(is_background=True), tenant_name="acme", asked="sql")
    add_first(timer, make_chunk(2))
    timer.end("stop", answered_by="sql@1", is_failure=False)
    tally = activity.of(ACME)
    assert (tally.num_ended, tally.completion_tokens) == (1, 2)
    assert sum(tally.first_token_counts) == sum(tally.per_token_counts) == 0
    assert activity.slow.slowest(None, order="duration", limit=9) == []


def test_dropped_tenant_counts_request_to_end(activity: Activity) -> None:
    timer = activity.begin(make_request(), tenant_name="acme", asked="sql")
    for tenant in ("2", "3"):
        activity.begin(make_request(TenantId(tenant)), tenant_name=tenant, asked="sql")
    assert activity.of(ACME).num_waiting == 0
    assert activity.of(None).num_waiting == 3
    timer.end("abort", answered_by="sql@1", is_failure=False)
    assert activity.of(None).num_waiting == 2


def test_a_duration_beyond_all_bounds_has_a_bucket(activity: Activity, clock: StoppedClock) -> None:
    timer = activity.begin(make_request(), tenant_name="acme", asked="sql")
    clock.now_s = 1e9
    add_first(timer, make_chunk())
    assert activity.of(ACME).first_token_counts[-1] == 1


def test_tallies_have_tokens_of_live_requests_once(activity: Activity) -> None:
    timers = [activity.begin(make_request(), tenant_name="acme", asked="sql") for _ in range(2)]
    for timer in timers:
        add_first(timer, make_chunk(2))
    assert activity.of(ACME).completion_tokens == 4
    assert {tenant: tally.completion_tokens for tenant, tally in activity.tallies()} == {None: 4, ACME: 4}
    timers[0].num_tokens += 3
    timers[0].end("stop", answered_by="sql@1", is_failure=False)
    timers[1].num_tokens += 1
    assert activity.of(None).completion_tokens == 8
