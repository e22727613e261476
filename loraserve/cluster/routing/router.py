"""Ray Serve's router of requests to engine replicas.

Serve pickles this module by value into every process that sends requests: whatever it keeps is in
`loraserve.cluster.routing.members`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from loraserve.cluster.routing.members import members
from loraserve.cluster.routing.routed_request import RoutedRequest

PLACEMENT = "placement"
"""Keyword argument of a call with what the router may use of it."""


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that the placement ranks first of those with room."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose one replica per rank, the best first."""
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        placement = _placement(pending_request)
        if placement is None:
            return [candidate_replicas]
        return [[by_id[one]] for one in members().order(placement) if one in by_id]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where a request went."""
        placement = _placement(pending_request)
        if placement is not None:
            members().note_routed(placement, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas and their reports."""
        super().update_replicas(replicas)
        members().update((one.replica_id.unique_id, one.routing_stats) for one in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica at once."""
        super().on_replica_actor_died(replica_id)
        members().remove(replica_id.unique_id)


def _placement(pending_request: PendingRequest | None) -> RoutedRequest | None:
    found = None if pending_request is None else pending_request.kwargs.get(PLACEMENT)
    return found if isinstance(found, RoutedRequest) else None
