"""Properties of a placement that hold for any replicas, loads and requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.cluster.placement import Placement, PlacementPolicy, PlacementRequest, ReplicaView
from loraserve.cluster.placement.placement import LoadBounds
from loraserve.cluster.placement.views import spare_places
from loraserve.errors import InvariantViolation
from loraserve.types import Digest, TenantId, Tier


def make_request(number: int = 0, prefix: str | None = None, tenant: str = "acme") -> PlacementRequest:
    return PlacementRequest(TenantId(tenant), Digest(f"{number:064x}"), 1 << 20, prefix)


def make_replicas(loads: Sequence[int], **residency: dict[Digest, Tier]) -> list[ReplicaView]:
    return [
        ReplicaView(f"r{place}", residency.get(f"r{place}", {}), load, 0, 1 << 30) for place, load in enumerate(loads)
    ]


def give_room(replicas: Sequence[ReplicaView], rooms: Mapping[str, int]) -> None:
    for view in replicas:
        view.count_spare = partial(rooms.__getitem__, view.replica_id)


def homes(placement: Placement, replicas: Sequence[ReplicaView], count: int = 400) -> dict[int, str]:
    return {number: placement.rank(make_request(number), replicas, 0.0)[0] for number in range(count)}


def flood(placement: Placement, request: PlacementRequest, replicas: Sequence[ReplicaView], until_s: float) -> None:
    """Record a request for it each second, and one each for versions of no other use."""
    for second in range(int(until_s)):
        placement.record(request, placement.rank(request, replicas, second)[0], replicas, second)
        other = make_request(10_000 + second)
        placement.record(other, placement.rank(other, replicas, second)[0], replicas, second)


loads = st.lists(st.integers(0, 60), min_size=1, max_size=12)
requests = st.builds(make_request, st.integers(0, 30), st.sampled_from([None, "a", "b"]))


@given(loads, requests, st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30)), max_size=60))
@settings(deadline=None)
def test_replicas_are_ranked_once_and_deterministically(
    loads: list[int], request_: PlacementRequest, history: list[tuple[int, int]]
) -> None:
    replicas, first, second = make_replicas(loads), Placement(), Placement()
    for second_s, (place, number) in enumerate(history):
        for placement in (first, second):
            placement.record(make_request(number), f"r{place % len(loads)}", replicas, float(second_s))
    ranked = first.rank(request_, replicas, 100.0)
    assert sorted(ranked) == sorted(view.replica_id for view in replicas)
    assert ranked == first.rank(request_, replicas, 100.0) == second.rank(request_, replicas, 100.0)


@given(loads, requests, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_listing_order_of_replicas_does_not_matter(
    loads: list[int], request_: PlacementRequest, shuffler: random.Random
) -> None:
    replicas = make_replicas(loads)
    shuffled = list(replicas)
    shuffler.shuffle(shuffled)
    placement = Placement()
    assert placement.rank(request_, shuffled, 0.0) == placement.rank(request_, replicas, 0.0)


@given(loads, requests, st.lists(st.integers(0, 11), max_size=80))
@settings(deadline=None)
def test_replica_above_bound_is_avoided_while_capacity_remains(
    loads: list[int], request_: PlacementRequest, history: list[int]
) -> None:
    replicas, placement = make_replicas(loads), Placement()
    for place in history:
        placement.record(request_, f"r{place % len(loads)}", replicas, 0.0)
    bounds = LoadBounds(replicas, placement._given, placement.policy, 0.0)
    assert any(load < bounds.max_load for load in loads)
    by_id = {view.replica_id: view.load for view in replicas}
    ranked = placement.rank(request_, replicas, 0.0)
    assert by_id[ranked[0]] < bounds.max_load
    full = [by_id[name] >= bounds.max_load for name in ranked]
    assert full == sorted(full)


def test_load_bound_holds_for_thousand_requests_of_version() -> None:
    replicas, placement = make_replicas([0] * 8), Placement()
    for number in range(1000):
        first = placement.rank(make_request(), replicas, number / 100)[0]
        placement.record(make_request(), first, replicas, number / 100)
        replicas[int(first[1:])].running += 1
        mean = (number + 1) / 8
        assert max(view.load for view in replicas) <= max(4, 1.2 * mean + mean**0.5 + 1)


@given(st.integers(2, 12), st.integers(0, 11))
@settings(max_examples=30, deadline=None)
def test_lost_replica_moves_only_own_versions(count: int, lost: int) -> None:
    replicas, placement = make_replicas([0] * count), Placement()
    before = homes(placement, replicas, 100)
    name = f"r{lost % count}"
    left = [view for view in replicas if view.replica_id != name]
    after = homes(placement, left, 100)
    assert all(after[number] == home for number, home in before.items() if home != name)


@given(st.integers(2, 12), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_order_without_replica_equals_order_minus_replica(count: int, number: int) -> None:
    replicas, placement = make_replicas([0] * count), Placement()
    ranked = placement.rank(make_request(number), replicas, 0.0)
    gone = ranked[count // 2]
    left = [view for view in replicas if view.replica_id != gone]
    assert placement.rank(make_request(number), left, 0.0) == [name for name in ranked if name != gone]


@pytest.mark.parametrize("count", [2, 8, 32])
def test_lost_replica_held_only_fair_share_of_versions(count: int) -> None:
    found = list(homes(Placement(), make_replicas([0] * count), 4000).values())
    assert max(found.count(f"r{place}") for place in range(count)) / 4000 <= 1 / count + 0.05


def test_added_replica_takes_versions_without_moving_rest() -> None:
    replicas, placement = make_replicas([0] * 9), Placement()
    before, after = homes(placement, replicas[:8]), homes(placement, replicas)
    moved = {number for number in before if before[number] != after[number]}
    assert {after[number] for number in moved} == {"r8"}
    assert len(moved) / len(before) <= 1 / 9 + 0.05


def test_replica_with_double_memory_gets_double_versions() -> None:
    replicas = make_replicas([0, 0, 0])
    replicas[1].capacity_bytes *= 2
    found = list(homes(Placement(), replicas, 4000).values())
    assert found.count("r1") / 4000 == pytest.approx(0.5, abs=0.03)


def test_version_stays_when_home_is_as_busy() -> None:
    placement, empty = Placement(), make_replicas([0] * 4)
    home, second = placement.rank(make_request(), empty, 0.0)[:2]
    replicas = make_replicas([0] * 4, **{second: {make_request().digest: Tier.HOST}})
    for view in replicas:
        for _ in range(20):
            placement.record(make_request(99), view.replica_id, replicas, 0.0)
    assert placement.rank(make_request(), replicas, 0.0)[:2] == [second, home]


def test_version_moves_home_when_home_is_far_idler() -> None:
    placement, empty = Placement(), make_replicas([0] * 4)
    home, second = placement.rank(make_request(), empty, 0.0)[:2]
    replicas = make_replicas([0] * 4, **{second: {make_request().digest: Tier.DEVICE}})
    for view in replicas:
        for _ in range(5 if view.replica_id == home else 20):
            placement.record(make_request(99), view.replica_id, replicas, 0.0)
    assert placement.rank(make_request(), replicas, 0.0)[0] == home


def test_request_with_full_home_goes_to_holder() -> None:
    placement, empty = Placement(), make_replicas([0] * 4)
    order = placement.rank(make_request(), empty, 0.0)
    replicas = make_replicas([0] * 4, **{order[3]: {make_request().digest: Tier.HOST}})
    replicas[int(order[0][1:])].running = 30
    assert placement.rank(make_request(), replicas, 0.0) == [order[3], order[1], order[2], order[0]]


@pytest.mark.parametrize(("room_of_home", "room_of_second", "is_home"), [(5, 10, True), (4, 10, False), (0, 0, True)])
def test_unheld_version_is_loaded_without_dropping_adapters(
    room_of_home: int, room_of_second: int, is_home: bool
) -> None:
    replicas = make_replicas([0, 0, 0])
    home, second, third = Placement().rank(make_request(), replicas, 0.0)
    rooms = {home: room_of_home, second: room_of_second, third: 1000}
    give_room(replicas, rooms)
    first = Placement().rank(make_request(), replicas, 0.0)[0]
    assert first == (home if is_home else second)
    # one that lies somewhere goes home when that has far less to do, whatever room others have
    elsewhere, placement = make_replicas([0, 0, 0], **{third: {make_request().digest: Tier.HOST}}), Placement()  # type: ignore[dict-item]
    give_room(elsewhere, rooms)
    for second_s in range(40):
        placement.record(make_request(second_s), third, elsewhere, float(second_s))
    assert placement.rank(make_request(), elsewhere, 40.0)[0] == home
    # it stays where it is in memory, however much room others have
    for view in replicas:
        view.residency = {make_request().digest: Tier.HOST} if view.replica_id == home else {}  # type: ignore[dict-item]
    assert Placement().rank(make_request(), replicas, 0.0)[0] == home


def test_free_memory_excludes_adapters_without_second_copy() -> None:
    one, two, three = (Digest(name) for name in "abc")
    held = {"r0": ([one, two], 3), "r1": ([two, three], 1), "r2": ([two], 1), "r3": ([], 0)}
    assert spare_places(held) == {"r0": 2, "r1": 0, "r2": 1, "r3": 0}


def test_hot_version_goes_to_nearest_among_equal_loads() -> None:
    placement, replicas = Placement(PlacementPolicy(hot_share=0.5, cold_share=0.2)), make_replicas([0] * 2)
    flood(placement, make_request(), replicas, 60)
    digest = make_request().digest
    assert placement.hot_versions == {digest: 2}
    tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK, None)
    for nearer, farther in itertools.pairwise(tiers):
        for near, far in ((0, 1), (1, 0)):
            held = {f"r{near}": nearer, f"r{far}": farther}
            residency = {name: {digest: tier} for name, tier in held.items() if tier}
            assert placement.rank(make_request(), make_replicas([0, 0], **residency), 60.0)[0] == f"r{near}"


def test_base_goes_to_least_loaded_prefix_to_holder() -> None:
    placement, replicas = Placement(), make_replicas([3, 1, 2])
    assert placement.rank(PlacementRequest(TenantId("acme")), replicas, 0.0) == ["r1", "r2", "r0"]
    idle = make_replicas([0] * 8)
    chosen = {placement.rank(PlacementRequest(TenantId("acme"), prefix_key=f"p{n}"), idle, 0.0)[0] for n in range(50)}
    assert len(chosen) == 8


def test_prefix_of_different_tenant_is_different() -> None:
    placement, idle = Placement(), make_replicas([0] * 16)
    chosen = {
        placement.rank(PlacementRequest(TenantId(f"tenant-{n}"), prefix_key="same"), idle, 0.0)[0] for n in range(60)
    }
    assert len(chosen) > 8


def test_no_replicas_give_empty_ranking() -> None:
    assert Placement().rank(make_request(), [], 0.0) == []


@pytest.mark.parametrize(
    ("change", "message"), [({"replica_id": "r0"}, "listed twice"), ({"capacity_bytes": 0}, "0 bytes")]
)
def test_unrankable_replicas_are_refused(change: dict[str, object], message: str) -> None:
    replicas = make_replicas([0, 0])
    for name, value in change.items():
        setattr(replicas[1], name, value)
    with pytest.raises(InvariantViolation, match=message):
        Placement().rank(make_request(), replicas, 0.0)


def test_departed_replica_is_forgotten() -> None:
    placement, replicas = Placement(), make_replicas([0] * 3)
    for place in range(3):
        placement.record(make_request(), f"r{place}", replicas, 0.0)
    placement.record(make_request(), "r0", replicas[:2], 2.0)
    assert sorted(placement._given.names()) == ["r0", "r1"]
