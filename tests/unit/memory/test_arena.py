"""An arena's pages are free or somebody's, and what is worth least gives way, whoever's it is."""

from __future__ import annotations

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Arena, Lease, Tenure
from loraserve.memory.cost_estimate import Pace


class Tenant:
    """A renter of things of some pages each, with their values; what is worth nothing leaves together."""

    def __init__(self, lease: Lease, *things: tuple[int, float]) -> None:
        self.lease, self.things = lease, list(things)
        self.log: list[tuple[tuple[int, float], Tenure, int]] = []
        lease.rent(self.num_idle_pages)
        lease.join(self)

    @property
    def num_idle_pages(self) -> int:
        return sum(count for count, _ in self.things)

    def least_value(self) -> float | None:
        return min((value for _, value in self.things), default=None)

    def evict_least(self, cause: Tenure, num_wanted: int) -> None:
        thing = min(self.things, key=lambda thing: thing[1])
        self.things.remove(thing)
        self.log.append((thing, cause, num_wanted))
        self.lease.give_back(thing[0])


def test_the_least_valuable_leaves_first_whoever_has_it() -> None:
    arena = Arena(10, 4096)
    kv = Tenant(arena.lease(Tenure.KV), (2, 3.0), (2, 1.0))
    adapters = Tenant(arena.lease(Tenure.ADAPTERS), (3, 2.0), (1, 5.0))
    assert arena.num_free == 2
    assert kv.lease.num_obtainable == 6
    assert adapters.lease.make_room(6)
    assert kv.log == [((2, 1.0), Tenure.ADAPTERS, 4)]
    assert adapters.log == [((3, 2.0), Tenure.ADAPTERS, 2)]
    assert arena.num_free == 7
    assert arena.check() == []


def test_room_that_cannot_be_made_costs_nobody_anything() -> None:
    arena = Arena(10, 4096)
    kv = Tenant(arena.lease(Tenure.KV), (2, 3.0))
    arena.lease(Tenure.ADAPTERS).rent(5)
    assert not arena.lease(Tenure.ADAPTERS).make_room(6)
    assert kv.log == []
    assert arena.lease(Tenure.ADAPTERS).make_room(5)


def test_pages_with_places_are_of_one_renter() -> None:
    arena = Arena(4, 4096, has_places=True)
    kv, adapters = arena.lease(Tenure.KV), arena.lease(Tenure.ADAPTERS)
    first, second = kv.take(2), adapters.take(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(InvariantViolation, match="wants"):
        kv.take(1)
    for wrong in (second, [first[0], first[0]]):
        with pytest.raises(InvariantViolation, match="doesn't rent"):
            kv.put_back(wrong)
    kv.put_back(first)
    assert (arena.num_free, kv.num_rented, adapters.num_rented) == (2, 0, 2)
    assert arena.check() == []


def test_pages_are_counted_or_have_places() -> None:
    counted, placed = Arena(4, 4096).lease(Tenure.KV), Arena(4, 4096, has_places=True).lease(Tenure.KV)
    with pytest.raises(InvariantViolation, match="only counted"):
        counted.take(1)
    with pytest.raises(InvariantViolation, match="by number"):
        placed.rent(1)
    with pytest.raises(InvariantViolation, match="wants"):
        counted.rent(5)
    with pytest.raises(InvariantViolation, match="wants"):
        counted.give_back(1)


def test_check_sees_what_is_lost_shared_or_overstated() -> None:
    arena = Arena(4, 4096, has_places=True)
    kv, adapters = arena.lease(Tenure.KV), arena.lease(Tenure.ADAPTERS)
    adapters.pages.add(kv.take(1)[0])
    assert arena.check() == [
        "arena: a page is free and rented, or rented twice, or lost",
        "arena: pages are counted otherwise than they are rented",
    ]
    lost = Arena(4, 4096)
    lost.num_free -= 1
    assert lost.check() == ["arena: free 3 + rented 0 != 4 pages"]
    overstated = Arena(4, 4096)
    Tenant(overstated.lease(Tenure.KV), (1, 1.0)).things.append((1, 1.0))
    assert overstated.check() == ["arena: kv offers more pages than it rents"]


def test_a_renter_that_counts_as_idle_what_it_keeps_is_our_own_bug() -> None:
    arena = Arena(4, 4096)
    tenant = Tenant(arena.lease(Tenure.KV), (4, 1.0))
    tenant.evict_least = lambda cause, num_wanted: None  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="no page is free by that"):
        arena.lease(Tenure.ADAPTERS).make_room(1)
    tenant.least_value = lambda: None  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="offer none"):
        arena.lease(Tenure.ADAPTERS).make_room(1)


def test_a_pace_is_that_of_the_last_measurements() -> None:
    pace = Pace(0.5)
    assert pace.seconds_per_unit == 0.5
    pace.note(10, 1.0)
    assert pace.seconds_per_unit == pytest.approx(0.1)
    for _ in range(200):
        pace.note(1000, 10.0)
    assert pace.seconds_per_unit == pytest.approx(0.01, rel=1e-3)
    pace.note(0, 5.0)
    assert pace.seconds_per_unit == pytest.approx(0.01, rel=1e-3)
