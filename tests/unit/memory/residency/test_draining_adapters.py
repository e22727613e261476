"""Residents give way: as many as it takes, the least recently used first,
and never what an operator keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraserve.memory.devices.base import Footprint
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.types import Digest

NAMES = tuple(Digest(name) for name in "abc")


@pytest.fixture
def pool(make: Any) -> DeviceCache:
    """Three pinned adapters of rank 4, the least recently used first, where four have room."""
    pool = DeviceCache(CpuDevice(make.base, 16 * make.rank_bytes))
    for name in NAMES:
        pool.admit(name, make.loaded(), 0.0)
        pool.pin(name, 0.0)
    return pool


@pytest.fixture
def footprint(make: Any) -> Callable[[int], Footprint]:
    return lambda rank: make.cpu.footprint_of(make.packed(rank))


def test_fitting_footprint_drains_no_adapter(pool: DeviceCache, footprint: Callable[[int], Footprint]) -> None:
    pool.drain_for(footprint(4))
    assert list(pool.draining) == []


def test_drain_takes_fewest_least_recently_used_adapters(
    pool: DeviceCache, footprint: Callable[[int], Footprint]
) -> None:
    pool.drain_for(footprint(8))
    assert list(pool.draining) == [NAMES[0]]
    pool.drain_for(footprint(8))
    assert list(pool.draining) == [NAMES[0]], "those that are drained count"
    pool.drain_for(footprint(12))
    assert set(pool.draining) == set(NAMES[:2])
    assert pool.check() == []


def test_operator_pinned_adapter_is_not_drained(pool: DeviceCache, footprint: Callable[[int], Footprint]) -> None:
    pool.set_operator_pin(NAMES[0], True)
    pool.drain_for(footprint(8))
    assert list(pool.draining) == [NAMES[1]]


def test_drain_ends_for_single_adapter_or_all(pool: DeviceCache, footprint: Callable[[int], Footprint]) -> None:
    pool.drain_for(footprint(16))
    assert set(pool.draining) == set(NAMES)
    pool.set_operator_pin(NAMES[1], True)
    assert NAMES[1] not in pool.draining
    assert NAMES[0] in pool.draining
    pool.end_drain()
    assert list(pool.draining) == []
