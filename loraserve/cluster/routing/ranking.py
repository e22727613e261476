"""Rank replicas for a request: where its adapter is, its prompt's beginning, and room.

Knows nothing of Ray: what decides is a function of views of the request and of the replicas.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from loraserve.types import Digest, RequestId, Struct, TenantId, Tier

TOKENS_PER_PREFIX = 64
"""Tokens by which one hashed beginning is longer than the one before."""
_MAX_PREFIXES = 16
_MISS_COSTS = {Tier.DEVICE: 0.0, Tier.LOADING: 0.05, Tier.HOST: 0.1, Tier.DISK: 0.5}
"""Cost of an adapter's place, in parts of a full replica's load."""
_PREFIX_GAIN = 0.3
"""Gain of a prompt whose every hashed beginning was computed there."""
_DISPLACEMENT_COST = 0.25
"""Cost of a replica that isn't the adapter's first by hash, and doesn't have it."""


class PlacementRequest(Struct, frozen=True):
    """A request as the router sees it.

    Attributes:
        digest: of its adapter; None: it is for the base alone.
        num_bytes: of the adapter's files; 0: unknown.
        prefixes: hashes of the beginnings of its prompt, from the shortest to the longest, each of
            its tenant and adapter alone.
        tokens_per_prefix: tokens by which one beginning is longer than the one before.
        target: replica that it is for, and no other; None: any.
        node_id: machine whose memory has its adapter, for an ephemeral one; None: the store has it.
    """

    request_id: RequestId
    tenant: TenantId
    digest: Digest | None = None
    num_bytes: int = 0
    prefixes: tuple[int, ...] = ()
    tokens_per_prefix: int = 0
    target: str | None = None
    node_id: str | None = None


class ReplicaView(Struct, frozen=True):
    """A replica as the router knows it when it places one request.

    Attributes:
        residency: tier by digest of the adapters in its memory; one that isn't here is on disk.
        num_running, num_waiting: requests in its engine's steps and queue, with those that were
            sent and not yet reported.
        num_slots: sequences that it computes at once.
        num_cached_prefixes: how many of the request's `prefixes` it has computed of late.
        recent_load: requests per second that were sent to it of late.
    """

    id: str
    residency: Mapping[Digest, Tier] = {}
    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 1
    num_cached_prefixes: int = 0
    recent_load: float = 0.0


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


def prefix_hashes(tenant: TenantId, digest: Digest | None, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a hash of each beginning of a prompt, of its tenant and adapter, the shortest first.

    A part that isn't full has none, and no more than `_MAX_PREFIXES` have one.
    """
    num = min(len(token_ids) // TOKENS_PER_PREFIX, _MAX_PREFIXES)
    if not num:
        return ()
    state = hashlib.blake2b(f"{tenant}\0{digest or ''}\0".encode(), digest_size=8)
    hashes = []
    for start in range(0, num * TOKENS_PER_PREFIX, TOKENS_PER_PREFIX):
        state.update(array("q", token_ids[start : start + TOKENS_PER_PREFIX]).tobytes())
        hashes.append(int.from_bytes(state.digest()))
    return tuple(hashes)
