"""Who may come while others wait: a tenant's own bound, and its part of a queue that is full."""

from __future__ import annotations

import pytest

from loraserve.engine_client.admission import MAX_OVERFILL, QueueBounds
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import Overloaded, RateLimited
from loraserve.types import RequestId, SamplingParams, TenantId

A, B = TenantId("a"), TenantId("b")


def make(tenant: TenantId, max_queued: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        tenant=tenant,
        adapter=None,
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=1),
        max_queued=max_queued,
    )


def enter(bounds: QueueBounds, tenant: TenantId, count: int, max_queued: int = 0) -> int:
    """How many of so many got in."""
    num_entered = 0
    for _ in range(count):
        try:
            bounds.enter(make(tenant, max_queued))
        except (Overloaded, RateLimited):
            continue
        num_entered += 1
    return num_entered


def test_tenant_queue_bound_applies_once_batch_is_full() -> None:
    bounds = QueueBounds(4, 100)
    assert enter(bounds, A, 10, max_queued=3) == 4
    with pytest.raises(
        RateLimited,
        match="4 of the tenant's requests are in the queue, before their first token; at most 3 are allowed",
    ):
        bounds.enter(make(A, 3))
    bounds.note_began(A)
    bounds.note_began(A)
    assert enter(bounds, A, 10, max_queued=3) == 1
    assert enter(bounds, B, 10) == 10


def test_refusal_estimates_when_tenants_next_request_begins() -> None:
    now = 0.0
    bounds = QueueBounds(1, 100, clock=lambda: now)
    enter(bounds, A, 50, max_queued=50)
    for _ in range(20):
        now += 3.0
        bounds.note_began(A)
    enter(bounds, A, 20, max_queued=50)
    with pytest.raises(RateLimited) as caught:
        bounds.enter(make(A, 50))
    assert caught.value.retry_after_s == pytest.approx(3.0, rel=0.05)


def test_full_queue_admits_tenant_below_fair_share() -> None:
    bounds = QueueBounds(4, 20)
    assert enter(bounds, A, 30) == 20
    assert enter(bounds, B, 30) == 10
    assert enter(bounds, A, 1) == 0


def test_many_tenants_never_exceed_overfill_bound() -> None:
    bounds = QueueBounds(4, 20)
    assert enter(bounds, A, 30) == 20
    num_entered = sum(enter(bounds, TenantId(f"t{number}"), 30) for number in range(100))
    assert 20 + num_entered <= MAX_OVERFILL * 20


def test_tenant_without_requests_is_forgotten() -> None:
    bounds = QueueBounds(4, 20)
    enter(bounds, A, 20)
    bounds.note_began(A)
    bounds.leave(A, has_begun=True)
    for _ in range(19):
        bounds.leave(A, has_begun=False)
    assert bounds.num_alive == 0
    assert not bounds._tenants
