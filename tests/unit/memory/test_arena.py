"""An arena's pages are free or somebody's, and what is worth least gives way, whoever's it is."""

from __future__ import annotations

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Arena, ArenaClient, Owner
from loraserve.memory.eviction import CostEstimate


class Tenant:
    """A renter of things of some pages each, with their values;
    what is worth nothing leaves together.
    """

    def __init__(self, client: ArenaClient, *things: tuple[int, float]) -> None:
        self.client, self.things = client, list(things)
        self.log: list[tuple[tuple[int, float], Owner, int]] = []
        client.allocate(self.num_idle_pages)
        client.register(self)

    @property
    def num_idle_pages(self) -> int:
        return sum(count for count, _ in self.things)

    def victim_value(self) -> float | None:
        return min((value for _, value in self.things), default=None)

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        thing = min(self.things, key=lambda thing: thing[1])
        self.things.remove(thing)
        self.log.append((thing, cause, num_pages))
        self.client.free(thing[0])


def test_least_valuable_memory_is_evicted_first_across_renters() -> None:
    arena = Arena(10, 4096)
    kv = Tenant(arena.client(Owner.KV), (2, 3.0), (2, 1.0))
    adapters = Tenant(arena.client(Owner.ADAPTERS), (3, 2.0), (1, 5.0))
    assert arena.num_free == 2
    assert kv.client.num_obtainable == 6
    assert adapters.client.make_room(6)
    assert kv.log == [((2, 1.0), Owner.ADAPTERS, 4)]
    assert adapters.log == [((3, 2.0), Owner.ADAPTERS, 2)]
    assert arena.num_free == 7
    assert arena.check() == []


def test_impossible_request_evicts_no_memory() -> None:
    arena = Arena(10, 4096)
    kv = Tenant(arena.client(Owner.KV), (2, 3.0))
    arena.client(Owner.ADAPTERS).allocate(5)
    assert not arena.client(Owner.ADAPTERS).make_room(6)
    assert kv.log == []
    assert arena.client(Owner.ADAPTERS).make_room(5)


def test_indexed_pages_belong_to_single_renter() -> None:
    arena = Arena(4, 4096, is_indexed=True)
    kv, adapters = arena.client(Owner.KV), arena.client(Owner.ADAPTERS)
    first, second = kv.allocate_pages(2), adapters.allocate_pages(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(InvariantViolation, match="needs"):
        kv.allocate_pages(1)
    for wrong in (second, [first[0], first[0]]):
        with pytest.raises(InvariantViolation, match="doesn't hold"):
            kv.free_pages(wrong)
    kv.free_pages(first)
    assert (arena.num_free, kv.num_allocated, adapters.num_allocated) == (2, 0, 2)
    assert arena.check() == []


def test_pages_are_counted_or_have_places() -> None:
    counted, indexed = Arena(4, 4096).client(Owner.KV), Arena(4, 4096, is_indexed=True).client(Owner.KV)
    with pytest.raises(InvariantViolation, match="only counted"):
        counted.allocate_pages(1)
    with pytest.raises(InvariantViolation, match="by number"):
        indexed.allocate(1)
    with pytest.raises(InvariantViolation, match="needs"):
        counted.allocate(5)
    with pytest.raises(InvariantViolation, match="needs"):
        counted.free(1)


def test_check_finds_lost_shared_and_overstated_pages() -> None:
    arena = Arena(4, 4096, is_indexed=True)
    kv, adapters = arena.client(Owner.KV), arena.client(Owner.ADAPTERS)
    adapters.pages.add(kv.allocate_pages(1)[0])
    assert arena.check() == [
        "arena: a page is free and allocated, or allocated twice, or lost",
        "arena: the counts of pages differ from the allocated pages",
    ]
    lost = Arena(4, 4096)
    lost.num_free -= 1
    assert lost.check() == ["arena: free 3 + allocated 0 != 4 pages"]
    overstated = Arena(4, 4096)
    Tenant(overstated.client(Owner.KV), (1, 1.0)).things.append((1, 1.0))
    assert overstated.check() == ["arena: kv counts more idle pages than it holds"]


def test_renter_overstating_idle_memory_raises_invariant_violation() -> None:
    arena = Arena(4, 4096)
    tenant = Tenant(arena.client(Owner.KV), (4, 1.0))
    tenant.evict_victim = lambda cause, num_pages: None  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="no page became free"):
        arena.client(Owner.ADAPTERS).make_room(1)
    tenant.victim_value = lambda: None  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="have no victim"):
        arena.client(Owner.ADAPTERS).make_room(1)


def test_pace_follows_latest_measurements() -> None:
    pace = CostEstimate(0.5)
    assert pace.seconds_per_unit == 0.5
    pace.note(10, 1.0)
    assert pace.seconds_per_unit == pytest.approx(0.1)
    for _ in range(200):
        pace.note(1000, 10.0)
    assert pace.seconds_per_unit == pytest.approx(0.01, rel=1e-3)
    pace.note(0, 5.0)
    assert pace.seconds_per_unit == pytest.approx(0.01, rel=1e-3)
