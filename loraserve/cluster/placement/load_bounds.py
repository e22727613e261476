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
        self.loads = [view.running + view.waiting for view in replicas]
        self.given = given.counts([view.replica_id for view in replicas], now_s)
        mean = (sum(self.loads) + 1) / len(replicas)
        chance = policy.chance_deviations
        # a replica has room with fewer: the bound counts the request that is placed
        self.max_load = max(policy.min_bound, math.ceil(policy.load_factor * mean + chance * math.sqrt(mean)))
        mean = sum(self.given) / len(replicas)
        self.max_given = policy.share_factor * mean + chance * math.sqrt(mean)
