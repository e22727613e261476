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


def test_fresh_adapter_is_kept_until_second_look(make: Any, pool: DeviceCache) -> None:
    size = make.cpu.footprint_of(make.packed())
    assert pool.admit(A, make.loaded(), 0.0, is_protected=True) == []
    assert not pool.can_admit(size)
    with pytest.raises(InvariantViolation):
        pool.admit(B, make.loaded(), 0.0, is_protected=True)
    assert pool.take_landed() == [], "it was there at once"
    assert pool.can_admit(size)
    assert [evicted.digest for evicted in pool.admit(B, make.loaded(), 0.0, is_protected=True)] == [A]


def test_landed_adapter_is_fresh_and_load_timed_once(make: Any) -> None:
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


def test_landed_adapter_is_protected_from_kv_too(make: Any) -> None:
    device = SlowDevice(make.base, 4 * make.rank_bytes)
    pool = DeviceCache(device)
    pool.admit(A, make.loaded(), 0.0, is_protected=True)
    device.has_arrived = True
    pool.take_landed()
    assert pool.victim_value() is None
    pool.take_landed()
    assert pool.victim_value() is not None
