"""Who has just got a place keeps it until its request had one chance to pin it."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.devices.cpu import CpuDevice
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
    size = make.cpu.footprint_of(make.packed())
    assert pool.admit(A, make.loaded(), 0.0, is_protected=True) == []
    assert not pool.can_admit(size)
    with pytest.raises(InvariantViolation):
        pool.admit(B, make.loaded(), 0.0, is_protected=True)
    assert pool.take_landed() == [], "it was there at once"
    assert pool.can_admit(size)
    assert [evicted.digest for evicted in pool.admit(B, make.loaded(), 0.0, is_protected=True)] == [A]


def test_what_was_under_way_is_fresh_from_when_it_lands_and_its_time_counts_once(make: Any) -> None:
    device = SlowDevice(make.base, 4 * make.rank_bytes)
    pool, size = DeviceCache(device), make.cpu.footprint_of(make.packed())
    pool.admit(A, make.loaded(), 0.0, is_protected=True)
    assert pool.take_landed() == []
    assert pool.load_s.num == 0
    device.has_arrived = True
    assert pool.take_landed() == [A]
    assert pool.load_s.num == 1
    assert not pool.can_admit(size)
    assert pool.take_landed() == []
    assert pool.can_admit(size)
    assert pool.load_s.num == 1


def test_what_lands_is_kept_from_others_than_adapters_too(make: Any) -> None:
    device = SlowDevice(make.base, 4 * make.rank_bytes)
    pool = DeviceCache(device)
    pool.admit(A, make.loaded(), 0.0, is_protected=True)
    device.has_arrived = True
    pool.take_landed()
    assert pool.victim_value() is None
    pool.take_landed()
    assert pool.victim_value() is not None
