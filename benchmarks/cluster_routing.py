"""Other ways to route a cluster's requests, to compare ours with: by chance, and by the model
multiplexing of Ray Serve itself. The engines, the ingress and what they report are ours in all.

Ray is imported here: after `loraserve.cluster.local.prepare_ray` has set its variables.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# Serve exports its own default by no public name
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter  # isort: skip

from loraserve.cluster.ingress import Ingress
from loraserve.cluster.ray import OURS, ClusterParts
from loraserve.cluster.replica import EngineReplica
from loraserve.cluster.routing.router import PLACEMENT, AffinityRouter
from loraserve.settings import Settings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

NUM_MULTIPLEXED = 104
"""Models that Serve takes a replica to hold: as many adapters as were seen in one's memory."""


def is_for_any(pending_request: PendingRequest | None) -> bool:
    """Return whether any replica may take a request: calls of a certain one have no choice."""
    placement = None if pending_request is None else pending_request.kwargs.get(PLACEMENT)
    return placement is not None and placement.target is None


class RandomRouter(AffinityRouter):
    """Sends each request to a replica by chance."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if is_for_any(pending_request):
            return [[random.choice(candidate_replicas)]]
        return await super().choose_replicas(candidate_replicas, pending_request)


class StockRouter(AffinityRouter, PowerOfTwoChoicesRequestRouter):
    """Serve's default router, which prefers replicas that have said to hold a request's model.

    Of ours it has the notes alone: which replicas are there, and where a request went.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if is_for_any(pending_request):
            return await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        return await super().choose_replicas(candidate_replicas, pending_request)


class MultiplexedReplica(EngineReplica):
    """An engine replica that tells Serve which adapters it holds, by `serve.multiplexed`."""

    @serve.multiplexed(max_num_models_per_replica=NUM_MULTIPLEXED)
    async def hold(self, digest: str) -> str:
        # The engine loads it with the request, several at a time: better than in here, one by one.
        return digest

    async def compute(self, request: bytes, ingress: str, placement: object = None) -> None:
        if digest := serve.get_multiplexed_model_id():
            await self.hold(digest)
        await super().compute(request, ingress, placement)


class MultiplexedHandle:
    """Names each request's adapter to Serve as its model."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def options(self, **options: Any) -> MultiplexedHandle:
        return MultiplexedHandle(self._handle.options(**options))

    def remote(self, message: bytes, **arguments: Any) -> Any:
        placement = arguments[PLACEMENT]
        handle = self._handle
        if placement.target is None and placement.digest is not None:
            handle = handle.options(multiplexed_model_id=placement.digest)
        return handle.remote(message, **arguments)


class MultiplexedIngress(Ingress):
    """The ingress, whose requests carry model ids."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, drain_s: float, listener_path: Path | None, replicas: DeploymentHandle[Any]
    ) -> None:
        handle: Any = MultiplexedHandle(replicas)
        await super().__init__(settings, drain_s, listener_path, handle)


def parts(routing: str) -> ClusterParts:
    """Return what a cluster of this routing is made of."""
    routers: dict[str, type[RequestRouter]] = {"random": RandomRouter, "multiplexed": StockRouter}
    if routing == "multiplexed":
        return ClusterParts(MultiplexedIngress, MultiplexedReplica, StockRouter)
    return ClusterParts(router=routers.get(routing, OURS.router))
