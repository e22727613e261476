"""Who has just got a place keeps it until its request had one chance to pin it."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.residency.arrivals import Arrivals
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.types import Digest

A, B = Digest("a"), Digest("b")


class SlowDevice(CpuDevice):
    """Copies arrive when they are told to."""

    has_arrived = False

    def is_ready(self, placed: object) -> bool:
        return self.has_arrived


@pytest.fixture
def pool(make: Any) -> DeviceCache:
    """Room for one adapter of rank 4."""
    return DeviceCache(CpuDevice(make.base, 4 * make.rank_bytes))


def test_what_is_fresh_is_not_evicted_before_the_second_look(make: Any, pool: DeviceCache) -> None:
    arrivals, size = Arrivals(pool), make.cpu.footprint_of(make.packed())
    assert arrivals.admit(A, make.loaded(), 0.0) == []
    assert not arrivals.can_admit(size)
    with pytest.raises(InvariantViolation):
        arrivals.admit(B, make.loaded(), 0.0)
    assert arrivals.take_landed() == [], "it was there at once"
    assert arrivals.can_admit(size)
    assert [evicted.digest for evicted in arrivals.admit(B, make.loaded(), 0.0)] == [A]


def test_what_was_under_way_is_fresh_from_when_it_lands_and_its_time_counts_once(make: Any) -> None:
    device = SlowDevice(make.base, 4 * make.rank_bytes)
    arrivals, size = Arrivals(DeviceCache(device)), make.cpu.footprint_of(make.packed())
    arrivals.admit(A, make.loaded(), 0.0)
    assert arrivals.take_landed() == []
    assert arrivals.load_s.num == 0
    device.has_arrived = True
    assert arrivals.take_landed() == [A]
    assert arrivals.load_s.num == 1
    assert not arrivals.can_admit(size)
    assert arrivals.take_landed() == []
    assert arrivals.can_admit(size)
    assert arrivals.load_s.num == 1


def test_what_lands_is_kept_from_others_than_adapters_too(make: Any) -> None:
    device = SlowDevice(make.base, 4 * make.rank_bytes)
    pool = DeviceCache(device)
    arrivals = Arrivals(pool)
    arrivals.admit(A, make.loaded(), 0.0)
    device.has_arrived = True
    arrivals.take_landed()
    assert pool.victim_value() is None
    arrivals.take_landed()
    assert pool.victim_value() is not None
