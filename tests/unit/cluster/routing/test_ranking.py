"""Replicas in the order in which a request tries them."""

from __future__ import annotations

from collections import Counter

from loraserve.cluster.routing.ranking import PlacementRequest, ReplicaView, rank
from loraserve.types import Digest, RequestId, TenantId, Tier


def request(name: str = "a", *, prefixes: tuple[int, ...] = ()) -> PlacementRequest:
    return PlacementRequest(
        request_id=RequestId("1"), tenant=TenantId("t"), digest=Digest(name.ljust(64, "0")), prefixes=prefixes
    )


def replicas(num: int) -> list[ReplicaView]:
    return [ReplicaView(id=f"replica-{i}", num_slots=8) for i in range(num)]


def test_a_lost_replica_moves_its_own_adapters_alone() -> None:
    names = [f"adapter-{i}" for i in range(2000)]
    before = {name: rank(request(name), replicas(4))[0] for name in names}
    after = {name: rank(request(name), replicas(3))[0] for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert {before[name] for name in moved} == {"replica-3"}
    assert len(moved) <= 1.1 * len(names) / 4


def test_adapters_are_spread_evenly() -> None:
    counts = Counter(rank(request(f"adapter-{i}"), replicas(4))[0] for i in range(2000))
    assert max(counts.values()) <= 1.15 * 500


def test_the_device_comes_before_the_host_and_the_host_before_disk() -> None:
    asked = request()
    first, second, third = rank(asked, replicas(3))
    views = [
        ReplicaView(id=first, num_slots=8),
        ReplicaView(id=second, num_slots=8, residency={asked.digest: Tier.HOST}),  # type: ignore[dict-item]
        ReplicaView(id=third, num_slots=8, residency={asked.digest: Tier.DEVICE}),  # type: ignore[dict-item]
    ]
    assert rank(asked, views) == [third, second, first]


def test_a_full_replica_passes_a_hot_adapter_on() -> None:
    asked = request()
    home, other = rank(asked, replicas(2))
    full = ReplicaView(id=home, num_slots=8, num_running=8, num_waiting=4, residency={asked.digest: Tier.DEVICE})  # type: ignore[dict-item]
    assert rank(asked, [full, ReplicaView(id=other, num_slots=8)]) == [other, home]


def test_a_computed_beginning_draws_a_request() -> None:
    asked = request(prefixes=(1, 2))
    home, other = rank(asked, replicas(2))
    residency = {asked.digest: Tier.DEVICE}
    views = [
        ReplicaView(id=home, num_slots=8, residency=residency),  # type: ignore[arg-type]
        ReplicaView(id=other, num_slots=8, residency=residency, num_cached_prefixes=2),  # type: ignore[arg-type]
    ]
    assert rank(asked, views) == [other, home]
