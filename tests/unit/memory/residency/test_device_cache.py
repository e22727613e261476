"""The pool stays within its bytes, evicts the idle in order of use, and never what is pinned."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.devices.base import Footprint
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.residency.device_cache import DeviceCache


@pytest.fixture
def pool(make: Any) -> DeviceCache:
    pool = DeviceCache(CpuDevice(make.base, 8 * make.rank_bytes))
    pool.admit(make.digest("a"), make.loaded(4), 0.0)
    pool.admit(make.digest("b"), make.loaded(4), 0.0)
    return pool


def test_the_least_recently_used_idle_adapter_makes_room(pool: DeviceCache, make: Any) -> None:
    pool.touch(make.digest("a"), 1.0)
    evicted = pool.admit(make.digest("c"), make.loaded(4), 2.0)
    assert [e.digest for e in evicted] == [make.digest("b")]
    assert pool.check() == []


def test_pinned_adapter_stays_until_last_pin_release(pool: DeviceCache, make: Any) -> None:
    a, b = make.digest("a"), make.digest("b")
    first, second, other = pool.pin(a, 0.0), pool.pin(a, 0.0), pool.pin(b, 0.0)
    assert not pool.can_admit(Footprint(1))
    first.release()
    assert not pool.can_admit(Footprint(1))
    second.release()
    assert pool.can_admit(Footprint(4 * make.rank_bytes))
    assert [e.digest for e in pool.admit(make.digest("c"), make.loaded(4), 0.0)] == [a]
    other.release()
    assert pool.num_pins == 0
    assert pool.check() == []


def test_a_pin_can_be_released_only_once(pool: DeviceCache, make: Any) -> None:
    pin = pool.pin(make.digest("a"), 0.0)
    kept = pool.pin(make.digest("a"), 0.0)
    pin.release()
    assert pin.is_released
    with pytest.raises(InvariantViolation, match="released twice"):
        pin.release()
    assert pool.num_violations == 1
    assert pool.num_pins == 1
    assert not kept.is_released
    assert pool.check() == []


def test_operator_pinned_adapter_is_never_evicted(pool: DeviceCache, make: Any) -> None:
    pool.set_operator_pin(make.digest("a"), True)
    assert [e.digest for e in pool.admit(make.digest("c"), make.loaded(4), 0.0)] == [make.digest("b")]
    assert not pool.can_admit(Footprint(8 * make.rank_bytes))
    pool.set_operator_pin(make.digest("a"), False)
    assert pool.can_admit(Footprint(8 * make.rank_bytes))
    assert pool.check() == []


def test_protected_adapters_are_not_evicted(pool: DeviceCache, make: Any) -> None:
    a, b = make.digest("a"), make.digest("b")
    pool.protect([a, b])
    assert not pool.can_admit(Footprint(1))
    pool.protect([a])
    assert [e.digest for e in pool.admit(make.digest("c"), make.loaded(4), 0.0)] == [b]


def test_admission_without_capacity_raises_invariant_violation(pool: DeviceCache, make: Any) -> None:
    pins = [pool.pin(make.digest(name), 0.0) for name in "ab"]
    with pytest.raises(InvariantViolation):
        pool.admit(make.digest("c"), make.loaded(1), 0.0)
    with pytest.raises(InvariantViolation):
        pool.pin(make.digest("absent"), 0.0)
    assert pool.check() == []
    assert len(pins) == pool.num_pins


def test_check_sees_a_lost_pin(pool: DeviceCache, make: Any) -> None:
    pool.pin(make.digest("a"), 0.0)
    pool.num_pins -= 1
    assert pool.check() == ["adapter pool: 1 pins are counted as 0"]


def test_pin_without_use_leaves_popularity_unchanged(pool: DeviceCache, make: Any) -> None:
    digest = make.digest("a")
    pin = pool.pin(digest, 1.0, is_use=False)
    assert pool.num_pins == 1
    assert pool.popularity.per_second(digest, 1.0) == 0.0
    pin.release()
    pool.pin(digest, 2.0).release()
    assert pool.popularity.per_second(digest, 2.0) > 0.0
    assert pool.check() == []
