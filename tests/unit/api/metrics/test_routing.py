"""Routers are told of adapters by the names that they request, wherever the engine has each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from stopped_clock import StoppedClock

from loraserve.api.metrics.adapter_load import AdapterLoad
from loraserve.api.metrics.routing import MAX_AGE_S, AdapterRouting
from loraserve.errors import EngineUnavailable
from loraserve.types import AdapterRef, AdapterResidency, Digest, EngineStats, TenantId, Tier


def make_row(digest: str, tier: Tier, *, is_pinned: bool = False) -> AdapterResidency:
    return AdapterResidency(
        digest=Digest(digest),
        tier=tier,
        device_bytes=0,
        host_bytes=0,
        num_pins=0,
        is_pinned=is_pinned,
        last_used_s=0.0,
    )


@dataclass
class Engine:
    rows: list[AdapterResidency] = field(default_factory=list)
    failure: Exception | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    asked: list[set[Digest]] = field(default_factory=list)
    base_id: str | None = "org/base"

    @property
    def base(self) -> Any:
        if self.base_id is None:
            raise EngineUnavailable("The base model isn't loaded yet.")
        return SimpleNamespace(id=self.base_id)

    async def residency(self, only: Collection[Digest]) -> tuple[AdapterResidency, ...]:
        self.asked.append(set(only))
        if self.failure is not None:
            raise self.failure
        return tuple(row for row in self.rows if row.digest in only)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def routing(engine: Any, clock: StoppedClock) -> AdapterRouting:
    load = AdapterLoad()
    for name in ("a", "b", "c", "d"):
        ref = AdapterRef(
            tenant=TenantId("1"),
            name=name,
            version=1,
            digest=Digest(f"digest-{name}"),
            config_blob=Digest(""),
            weights_blob=Digest(""),
        )
        load.begin(ref, [name], ["acme"]).end()
    return AdapterRouting(engine, load, 64, clock=clock)


async def test_adapters_in_memory_are_named_with_tier(routing: AdapterRouting, engine: Engine) -> None:
    engine.rows = [
        make_row("digest-a", Tier.DEVICE, is_pinned=True),
        make_row("digest-b", Tier.HOST),
        make_row("digest-c", Tier.LOADING),
        make_row("digest-nobody-asked-for", Tier.DEVICE),
    ]
    await routing.refresh()
    assert routing.loaded() == {("a", "gpu", "true", "acme"): 1.0, ("b", "cpu", "false", "acme"): 1.0}
    assert engine.asked == [{f"digest-{name}" for name in "abcd"}]


async def test_engine_is_polled_rarely_despite_frequent_scrapes(
    routing: AdapterRouting, engine: Engine, clock: StoppedClock
) -> None:
    for _ in range(5):
        await routing.refresh()
    assert len(engine.asked) == 1
    clock.now_s += MAX_AGE_S
    await routing.refresh()
    assert len(engine.asked) == 2


async def test_no_adapters_are_reported_while_engine_is_unavailable(
    routing: AdapterRouting, engine: Engine, clock: StoppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.rows = [make_row("digest-a", Tier.DEVICE)]
    await routing.refresh()
    assert routing.loaded()
    clock.now_s += MAX_AGE_S
    engine.failure = EngineUnavailable("It restarts.")
    await routing.refresh()
    assert routing.loaded() == {}

    async def hang(only: Collection[Digest]) -> tuple[AdapterResidency, ...]:
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr(engine, "residency", hang)
    monkeypatch.setattr("loraserve.api.metrics.routing._TIMEOUT_S", 0.01)
    clock.now_s += MAX_AGE_S
    await routing.refresh()
    assert routing.loaded() == {}


def test_number_of_loaded_adapters_names_base(routing: AdapterRouting, engine: Engine) -> None:
    assert routing.num_loaded() == {"org/base": 0}
    engine.stats = EngineStats(device_adapters=5, num_arriving_adapters=2)
    assert routing.num_loaded() == {"org/base": 3}
    engine.base_id = None
    assert routing.num_loaded() == {}


def test_max_lora_is_bounded_by_memory_and_step(routing: AdapterRouting, engine: Engine) -> None:
    ((unknown, _, _),) = routing.requests_info()
    assert (unknown, routing.max_lora) == ("64", 64)
    engine.stats = EngineStats(max_device_adapters=812)
    ((known, running, waiting),) = routing.requests_info()
    assert (known, running, waiting) == ("812", "", "")
