"""Bounded loads: a replica takes no more than so many times the mean while another has room.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv:1608.01350), over
rendezvous orders instead of a ring: a request whose replica is full goes to the next in its key's
own order, so that full replicas' keys spread over all others rather than over a neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loraserve.cluster.placement.demand import DecayingCounts
from loraserve.cluster.placement.policy import PlacementPolicy
from loraserve.cluster.placement.views import ReplicaView


class LoadBounds:
    """Room of each replica for one more request, at one moment.

    Two loads are bounded: the requests that a replica has now, and those that it was given lately.
    The first is what a client waits for; the second sees what few requests at a time can't show.
    """

    def __init__(
        self, replicas: Sequence[ReplicaView], given: DecayingCounts, policy: PlacementPolicy, now_s: float
    ) -> None:
        self.loads = [view.load for view in replicas]
        self.given = [given.count(view.replica_id, now_s) for view in replicas]
        total = sum(self.loads) + 1
        # the bound counts the request that is placed: one replica at least is below it
        self.max_load = max(policy.min_bound, math.ceil(policy.load_factor * total / len(replicas)))
        mean = sum(self.given) / len(replicas)
        # what chance explains is no imbalance: a count's standard deviation is its root
        self.max_given = policy.share_factor * mean + math.sqrt(mean)

    def has_room(self, place: int) -> bool:
        """Return whether the replica may take one more request within both bounds."""
        return self.is_below_max_load(place) and self.given[place] <= self.max_given

    def is_below_max_load(self, place: int) -> bool:
        """Return whether one more request keeps the replica within the bound of the moment."""
        return self.loads[place] < self.max_load
