"""Points of the last hour: rates, percentiles of the last minute, and tenants apart."""

from __future__ import annotations

import math

import pytest
from stopped_clock import StoppedClock

from loraserve.api.metrics.activity import Activity
from loraserve.api.metrics.history import ActivityHistory
from loraserve.limits import LIMITS, Limits
from loraserve.types import EngineStats

from .test_activity import ACME, GLOBEX, add_first, make_chunk, make_request

STEP_S = LIMITS.history_interval_s


class World:
    """An activity and its history under one clock."""

    def __init__(self, **limits: int) -> None:
        self.clock = StoppedClock()
        self.stats = EngineStats()
        self.activity = Activity(limits=Limits(**limits), monotonic=self.clock, clock=self.clock)
        self.history = ActivityHistory(self.activity, lambda: self.stats, clock=self.clock)

    def answer(self, tenant: str = ACME, *, first_s: float = 0.1, num_tokens: int = 5) -> None:
        """Answer a request of a tenant."""
        timer = self.activity.begin(make_request(tenant), tenant_name="x", asked="sql")
        self.clock.now_s += first_s
        add_first(timer, make_chunk())
        timer.num_tokens += num_tokens - 1
        timer.end("stop", answered_by="sql@1", is_failure=False)

    async def pass_time(self, num_points: int = 1) -> None:
        for _ in range(num_points):
            self.clock.now_s += STEP_S
            await self.history.take()


async def test_points_count_tokens_and_requests() -> None:
    world = World()
    await world.history.take()
    for _ in range(4):
        world.answer(first_s=0.0)
    await world.pass_time(2)
    (_, start), (at, busy), (_, quiet) = world.history.of(None)
    assert start.tokens_per_s == 0.0
    assert at == world.clock.now_s - STEP_S
    assert (busy.tokens_per_s, busy.requests_per_minute) == (20 / STEP_S, 4 * 60 / STEP_S)
    assert (quiet.tokens_per_s, quiet.requests_per_minute) == (0.0, 4 * 60 / (2 * STEP_S))


async def test_percentiles_are_of_last_minute() -> None:
    world = World()
    await world.history.take()
    for first_s in (0.1, 0.1, 5.0):
        world.answer(first_s=first_s)
    await world.pass_time()
    point = world.history.of(None)[-1][1]
    assert point.first_p50 == pytest.approx(0.1, rel=0.25)
    assert point.first_p99 == pytest.approx(5.0, rel=0.25)
    await world.pass_time(3)
    assert math.isnan(world.history.of(None)[-1][1].first_p50)


async def test_running_requests_are_seen_without_end() -> None:
    world = World()
    timer = world.activity.begin(make_request(), tenant_name="x", asked="sql")
    await world.pass_time()
    add_first(timer, make_chunk())
    await world.pass_time()
    points = [point for _, point in world.history.of(ACME)]
    assert [(point.num_waiting, point.num_running) for point in points] == [(1, 0), (0, 1)]
    assert points[1].tokens_per_s == 1 / STEP_S


async def test_tenants_have_own_points() -> None:
    world = World()
    await world.history.take()
    world.answer(ACME)
    await world.pass_time(2)
    assert len(world.history.of(ACME)) == 2
    assert world.history.of(GLOBEX) == []
    assert len(world.history.of(None)) == 3


async def test_history_ends_after_an_hour() -> None:
    world = World()
    await world.pass_time(400)
    points = world.history.of(None)
    assert len(points) == LIMITS.history_s / STEP_S
    assert points[-1][0] - points[0][0] < LIMITS.history_s


async def test_dropped_tenant_leaves_no_points() -> None:
    world = World(max_tallied_tenants=1)
    world.answer(ACME)
    await world.pass_time()
    world.answer(GLOBEX)
    await world.pass_time()
    assert world.history.of(ACME) == []
    world.answer(ACME)
    await world.pass_time()
    assert len(world.history.of(ACME)) == 1
    assert world.history.of(ACME)[0][1].requests_per_minute >= 0


async def test_memory_is_in_points_of_all_requests() -> None:
    world = World()
    world.stats = EngineStats(device_bytes=100, kv_bytes_used=25, adapter_bytes_used=10, adapter_bytes_idle=5)
    world.answer(ACME)
    await world.pass_time()
    everything, own = world.history.of(None)[-1][1], world.history.of(ACME)[-1][1]
    assert (everything.kv_share, everything.adapters_share) == (0.25, 0.15)
    assert math.isnan(own.kv_share)
