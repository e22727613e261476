"""Rank replicas for a request: where its adapter is, its prompt's beginning, and room."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from loraserve.cluster.views import PlacementRequest, ReplicaView
from loraserve.types import Tier

_MISS_COSTS = {Tier.DEVICE: 0.0, Tier.LOADING: 0.05, Tier.HOST: 0.1, Tier.DISK: 0.5}
"""Cost of an adapter's place, in parts of a full replica's load."""
_PREFIX_GAIN = 0.3
"""Gain of a prompt whose every hashed beginning was computed there."""
_DISPLACEMENT_COST = 0.25
"""Cost of a replica that isn't the adapter's first by hash, and doesn't have it."""


def rank(request: PlacementRequest, replicas: Sequence[ReplicaView]) -> list[str]:
    """Return the replicas' ids from the best to the worst for a request.

    A replica's cost is its load, plus the cost of loading the adapter, less what a cached beginning
    saves. Equal costs are ordered by rendezvous hashing: if a replica is lost, only the adapters
    whose first it was move.
    """
    order = sorted(replicas, key=lambda replica: _weight(request, replica.id), reverse=True)
    costs = {
        replica.id: _cost(request, replica, is_first=position == 0 or request.digest is None)
        for position, replica in enumerate(order)
    }
    return sorted(costs, key=costs.__getitem__)


def _cost(request: PlacementRequest, replica: ReplicaView, *, is_first: bool) -> float:
    cost = (replica.num_running + replica.num_waiting) / max(1, replica.num_slots)
    if request.digest is not None:
        tier = replica.residency.get(request.digest, Tier.DISK)
        cost += _MISS_COSTS[tier]
        if tier is Tier.DISK and not is_first:
            cost += _DISPLACEMENT_COST
    if request.prefixes:
        cost -= _PREFIX_GAIN * replica.num_cached_prefixes / len(request.prefixes)
    return cost


def _weight(request: PlacementRequest, replica_id: str) -> bytes:
    key = request.digest or request.tenant
    return hashlib.blake2b(f"{key}\0{replica_id}".encode(), digest_size=8).digest()
