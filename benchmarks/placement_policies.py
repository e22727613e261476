"""Policies that the simulator compares, by the same view of the replicas."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

from benchmarks.placement_costs import Costs
from benchmarks.simulated_cluster import Policy, SimulatedReplica, SimulatedRequest, digest_of
from loraserve.cluster.placement import Placement, PlacementPolicy, ReplicaView
from loraserve.cluster.placement.rendezvous import RendezvousOrders, hash64
from loraserve.types import Tier

RING_POINTS = 100
"""Points of each replica on the ring of consistent hashing."""
BLOCK_TOKENS = 16
OVERLAP_WEIGHT, TEMPERATURE = 1.0, 0.0
"""Dynamo's defaults."""


class Random:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        return self._random.randrange(len(replicas))


class LeastLoaded:
    """The fewest requests; of equals, any."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        least = min(replica.load for replica in replicas)
        return self._random.choice([place for place, replica in enumerate(replicas) if replica.load == least])


class ConsistentHashing:
    """A ring with `RING_POINTS` points of each replica, without bounds on loads."""

    def __init__(self) -> None:
        self._members: tuple[int, ...] = ()
        self._ring: list[tuple[int, int]] = []

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        members = tuple(replica.number for replica in replicas)
        if members != self._members:
            self._members = members
            self._ring = sorted(
                (hash64(f"{number}#{point}"), place)
                for place, number in enumerate(members)
                for point in range(RING_POINTS)
            )
        at = bisect_right(self._ring, (hash64(digest_of(request.adapter)), len(replicas)))
        return self._ring[at % len(self._ring)][1]


class Rendezvous:
    """Rendezvous hashing alone."""

    def __init__(self) -> None:
        self._orders = RendezvousOrders(200_000)

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        return self._orders.order(digest_of(request.adapter), [replica.view for replica in replicas])[0]


class Dynamo:
    """The cost of NVIDIA Dynamo's KV router, with a missing adapter as a prompt that is computed.

    Published: ``cost = overlap_weight · prefill_blocks + decode_blocks``, where prefill blocks are
    those of prompts that wait on the worker and of the request, less the request's blocks that are
    cached there, and decode blocks those of its active sequences; the lowest cost, or at a
    temperature above 0 a softmax over ``-cost``. Adapted: a replica on which the adapter isn't
    resident has as many prefill blocks more as it could compute while it loads the adapter. Its
    hashes of blocks are salted by the adapter, as ours are, so that only the same adapter's prefix
    overlaps. What is cached where is exact here; there it comes by events.
    """

    def __init__(self, seed: int, costs: Costs) -> None:
        self._random = random.Random(seed)
        self._load_tokens = {
            "device": 0.0,
            "host": costs.promote_s / costs.prefill_s,
            "disk": costs.load_s / costs.prefill_s,
        }

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        costs = [self._cost(request, replica) for replica in replicas]
        if TEMPERATURE > 0:
            weights = [math.exp(-cost / TEMPERATURE) for cost in costs]
            return self._random.choices(range(len(replicas)), weights)[0]
        least = min(costs)
        return self._random.choice([place for place, cost in enumerate(costs) if cost == least])

    def _cost(self, request: SimulatedRequest, replica: SimulatedReplica) -> float:
        is_cached = (request.adapter, request.prefix) in replica.prefixes
        tier = replica.reported.get(digest_of(request.adapter), Tier.DISK).value
        new_tokens = request.own_tokens + (0 if is_cached else request.prefix_tokens) + self._load_tokens[tier]
        prefill_blocks = (replica.pending_tokens + new_tokens) / BLOCK_TOKENS
        return OVERLAP_WEIGHT * prefill_blocks + replica.context_tokens / BLOCK_TOKENS


class Multiplexed:
    """Ray Serve's `multiplexed`, as its default router places requests for models.

    A request goes to a replica that reported its model, or, if none did or they are full, to one of
    those with the fewest models; of two by chance, to the one with fewer requests. There, a full
    one is asked again for a second or two before others are; here, they are at once. Source:
    `PowerOfTwoChoicesRequestRouter` and `MultiplexMixin` of Ray 2.60.
    """

    def __init__(self, seed: int, max_ongoing: int) -> None:
        self._random = random.Random(seed)
        self._max_ongoing = max_ongoing

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        digest = digest_of(request.adapter)
        least = min(len(one.reported) for one in replicas)
        free = [place for place, one in enumerate(replicas) if one.load < self._max_ongoing]
        holders = [place for place in free if digest in replicas[place].reported]
        emptiest = [place for place in free if len(replicas[place].reported) == least]
        places = holders or emptiest or range(len(replicas))
        return min(self._random.sample(places, min(2, len(places))), key=lambda place: replicas[place].load)


class Ours:
    """The package that decides in the router."""

    def __init__(self, policy: PlacementPolicy | None = None) -> None:
        self.placement = Placement(policy)

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        views: list[ReplicaView] = [replica.view for replica in replicas]
        first = self.placement.rank(request.placement, views, now_s)[0]
        if request.number >= 0:
            # a first load before the run says nothing about demand
            self.placement.record(request.placement, first, views, now_s)
        return next(place for place, view in enumerate(views) if view.replica_id == first)


def policies(costs: Costs, seed: int) -> dict[str, Callable[[], Policy]]:
    """Return a maker of each policy by its name, ours last."""
    return {
        "random": lambda: Random(seed),
        "least-loaded": lambda: LeastLoaded(seed),
        "consistent hashing": ConsistentHashing,
        "rendezvous": Rendezvous,
        "Dynamo": lambda: Dynamo(seed, costs),
        "serve.multiplexed": lambda: Multiplexed(seed, 2 * costs.max_num_seqs),
        "loraserve": Ours,
    }
