"""Placement: each request's replicas, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loraserve.cluster.placement.demand import DecayingCounts
from loraserve.cluster.placement.hot_versions import HotVersions
from loraserve.cluster.placement.policy import PlacementPolicy
from loraserve.cluster.placement.rendezvous import RendezvousOrders
from loraserve.cluster.placement.views import PlacementRequest, ReplicaView
from loraserve.types import Tier

_MAX_REPLICAS = 4096
"""Replicas whose requests are counted; more than any cluster has."""
_IN_MEMORY = frozenset({Tier.DEVICE, Tier.HOST, Tier.LOADING})


class LoadBounds:
    """Room of each replica for one more request, at one moment.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv:1608.01350), over
    rendezvous orders instead of a ring: a request whose replica is full goes to the next in its
    key's own order, so that full replicas' keys spread over all others rather than over a
    neighbour.

    Two loads are bounded: the requests that a replica has now, and those that it was given lately.
    The first is what a client waits for; the second sees what few requests at a time can't show.
    """

    def __init__(
        self, replicas: Sequence[ReplicaView], given: DecayingCounts, policy: PlacementPolicy, now_s: float
    ) -> None:
        self.loads = [view.running + view.waiting for view in replicas]
        self.given = given.counts([view.replica_id for view in replicas], now_s)
        mean = (sum(self.loads) + 1) / len(replicas)
        chance = policy.chance_deviations
        # a replica has room with fewer: the bound counts the request that is placed
        self.max_load = max(policy.min_bound, math.ceil(policy.load_factor * mean + chance * math.sqrt(mean)))
        mean = sum(self.given) / len(replicas)
        self.max_given = policy.share_factor * mean + chance * math.sqrt(mean)


class Placement:
    """Policy and the demand that it has measured, of one router. One thread at a time.

    `rank` changes nothing and the same state gives the same answer; `record` notes which replica
    took a request. Times are seconds of any clock that doesn't go back. Several routers need no
    common state: each measures shares of its own requests, and hashing makes them agree.
    """

    def __init__(self, policy: PlacementPolicy | None = None) -> None:
        self.policy = policy or PlacementPolicy()
        self._orders = RendezvousOrders(self.policy.max_orders)
        self._hot = HotVersions(self.policy)
        self._given = DecayingCounts(self.policy.share_half_life_s, _MAX_REPLICAS)
        self._refreshed_s = 0.0

    @property
    def hot_versions(self) -> dict[str, int]:
        """Number of replicas of each version that has more than one."""
        return self._hot.all()

    def rank(self, request: PlacementRequest, replicas: Sequence[ReplicaView], now_s: float) -> list[str]:
        """Rank the ids of all replicas, the best for the request first; [] of none.

        A replica with room comes before one without. Among those with room: the version's own
        replicas, then others that have it in memory, then all others in the version's own order. Of
        those without room, the one with the fewest requests is first.

        Raises:
            InvariantViolation: two replicas have the same id, or one has no capacity.
        """
        if not replicas:
            return []
        bounds = LoadBounds(replicas, self._given, self.policy, now_s)
        order = self._orders.order(_key(request), replicas)
        num_own = len(replicas)
        if request.digest is not None:
            num_own = self._hot.num_replicas(request.digest, len(replicas))
        own = self._sort_own(request, order[:num_own], replicas, bounds)
        places = own + order[num_own:]
        if num_own == 1:
            places = self._prefer_memory(request, places, replicas, bounds)
        return [replicas[place].replica_id for place in self._by_room(request, places, num_own, replicas, bounds)]

    def home(self, request: PlacementRequest, replicas: Sequence[ReplicaView]) -> str | None:
        """Find the id of the replica that hashing alone gives a request; None of none."""
        if not replicas:
            return None
        return replicas[self._orders.order(_key(request), replicas)[0]].replica_id

    def record(self, request: PlacementRequest, replica_id: str, replicas: Sequence[ReplicaView], now_s: float) -> None:
        """Count the request for its version, and to the replica that took it."""
        self._given.add(replica_id, now_s)
        self._hot.num_places = min((view.num_places for view in replicas if view.num_places), default=0)
        if request.digest is not None:
            self._hot.record(request.digest, len(replicas), now_s)
        if now_s - self._refreshed_s >= 1:
            self._refreshed_s = now_s
            self._hot.refresh(len(replicas), now_s)
            present = {view.replica_id for view in replicas}
            for name in self._given.names():
                if name not in present:
                    self._given.remove(name)

    def _sort_own(
        self, request: PlacementRequest, own: list[int], replicas: Sequence[ReplicaView], bounds: LoadBounds
    ) -> list[int]:
        """Sort the version's replicas: by the prompt's prefix, or else the least loaded first."""
        if len(own) == 1:
            return own
        costs = {place: bounds.loads[place] + self._penalty(request, replicas[place]) for place in own}
        if request.prefix_key is not None:
            key = f"{request.tenant}/{request.digest}/{request.prefix_key}"
            nearest = self._orders.first(key, own)
            costs[nearest] -= self.policy.prefix_bonus
        # a stable sort: equals stay in the version's own order
        return sorted(own, key=costs.__getitem__)

    def _penalty(self, request: PlacementRequest, view: ReplicaView) -> float:
        tier = view.tier(request.digest)
        if tier is None:
            return self.policy.store_penalty
        return {Tier.HOST: self.policy.host_penalty, Tier.DISK: self.policy.disk_penalty}.get(tier, 0.0)

    def _prefer_memory(
        self, request: PlacementRequest, places: list[int], replicas: Sequence[ReplicaView], bounds: LoadBounds
    ) -> list[int]:
        """Put replicas that have the version in memory first, unless its home has far less to do.

        It matters after a replica came or went: adapters stay where they are until their home is
        worth a load.
        """
        home = places[0]
        if replicas[home].tier(request.digest) in _IN_MEMORY:
            return places
        in_memory = [place for place in places if replicas[place].tier(request.digest) in _IN_MEMORY]
        if not in_memory:
            return self._prefer_spare(places, replicas)
        worth_s = bounds.given[home] / self.policy.home_ratio
        nearer = [place for place in in_memory if bounds.given[place] < worth_s]
        return nearer + [place for place in places if place not in nearer]

    def _prefer_spare(self, places: list[int], replicas: Sequence[ReplicaView]) -> list[int]:
        """Put the second before the home where it has much more room for what has to be loaded.

        Hashing gives one replica more versions than another, and one that is full would drop
        adapters that have no other copy.
        """
        if len(places) < 2:
            return places
        home, second, *others = places
        if self.policy.spare_ratio * replicas[home].count_spare() < replicas[second].count_spare():
            return [second, home, *others]
        return places

    def _by_room(
        self,
        request: PlacementRequest,
        places: list[int],
        num_own: int,
        replicas: Sequence[ReplicaView],
        bounds: LoadBounds,
    ) -> list[int]:
        """Sort replicas with room before those without, each kept in order within its class."""
        own, in_memory, elsewhere, beyond_share, full = classes = tuple[list[int], ...]([] for _ in range(5))
        loads, given, digest = bounds.loads, bounds.given, request.digest
        for position, place in enumerate(places):
            if loads[place] >= bounds.max_load:
                full.append(place)
            elif given[place] > bounds.max_given:
                beyond_share.append(place)
            elif position < num_own:
                own.append(place)
            elif replicas[place].tier(digest) in _IN_MEMORY:
                in_memory.append(place)
            else:
                elsewhere.append(place)
        full.sort(key=loads.__getitem__)
        return [place for group in classes for place in group]


def _key(request: PlacementRequest) -> str:
    """Build what the order depends on: the version, or the tenant and prefix for the base."""
    return request.digest or f"{request.tenant}/{request.prefix_key}"
