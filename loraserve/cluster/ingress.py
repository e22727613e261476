"""The HTTP application as a deployment of Ray Serve, before the engine replicas."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraserve.api.app import create_app
from loraserve.api.batch_lines import BatchLines
from loraserve.api.logs import configure_logging
from loraserve.api.metrics.table import Table, TableCollector, counter, gauge
from loraserve.api.server import background_threads, open_services
from loraserve.cluster.engine import ClusterEngine
from loraserve.cluster.front_door import FrontDoor
from loraserve.cluster.loopback import keep_to_loopback
from loraserve.cluster.shared_listener import take_listener
from loraserve.config import EngineConfig
from loraserve.settings import Settings
from loraserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = structlog.stdlib.get_logger("loraserve.cluster")

_LOOK_S = 0.5
"""Seconds between two looks whether another ingress still answers."""

CLUSTER: Table[ClusterEngine] = (
    gauge("loraserve_cluster_replicas", "Engine replicas by state.", lambda e: e.replica_states(), "state"),
    counter(
        "loraserve_cluster_routed",
        "Requests sent to a replica, by reason: it had the adapter (resident), is the home of the prompt's"
        " beginning (prefix) or of the version (hash), or had more room than these (load).",
        lambda e: {reason: float(num) for reason, num in e.members.num_routed.items()},
        "reason",
    ),
    gauge(
        "loraserve_cluster_hot_versions",
        "Versions with so many requests that several replicas serve them.",
        lambda e: e.members.num_hot_versions,
    ),
    counter(
        "loraserve_cluster_replays",
        "Requests that went on at another replica, because theirs was lost or they were moved from it.",
        lambda e: {cause: float(num) for cause, num in e.num_replays.items()},
        "cause",
    ),
    gauge(
        "loraserve_cluster_replica_requests",
        "Requests by replica and state.",
        lambda e: {
            (one, state): float(num)
            for one, report in e.members.reports.items()
            for state, num in (("running", report.stats.num_running), ("waiting", report.stats.num_waiting))
        },
        "replica",
        "state",
    ),
    counter(
        "loraserve_cluster_replica_loads",
        "Adapter loads by replica.",
        lambda e: {one: float(report.stats.adapter_loads) for one, report in e.members.reports.items()},
        "replica",
    ),
)
"""Metrics of a cluster, in addition to those of its servers."""


class Ingress:
    """Our HTTP application, whose engine is the cluster's."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, drain_s: float, listener_path: Path | None, replicas: DeploymentHandle[Any]
    ) -> None:
        """Open the services; the engine becomes ready with the first replica.

        Where another ingress answers clients, return once this one's engine is ready too: Serve
        ends the other then.

        Args:
            drain_s: seconds that streams may stay at a replica that leaves.
            listener_path: where the socket is to be had that clients connect to; None: Serve's
                proxies answer clients.
        """
        self._listener_path = listener_path
        self._door: FrontDoor | None = None
        configure_logging(settings.log_level)
        keep_to_loopback()
        asyncio.get_running_loop().set_default_executor(background_threads("server"))

        def make_engine(
            config: EngineConfig, tokenizer: Tokenizer, *, hang_timeout_s: float, on_damage: Any
        ) -> ClusterEngine:
            # replicas watch their engines themselves
            del hang_timeout_s
            self._engine = ClusterEngine(replicas, config, tokenizer, drain_s=drain_s, on_damage=on_damage)
            return self._engine

        self._ending = contextlib.AsyncExitStack()
        self._services = await self._ending.enter_async_context(open_services(settings, make_engine))
        self._starting = asyncio.create_task(self._services.engine.start(), name="engine-start")
        self._starting.add_done_callback(_tell_started)
        while not self._starting.done() and await asyncio.to_thread(_another_answers):
            await asyncio.wait({self._starting}, timeout=_LOOK_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._services)
        self._services.metrics.registry.register(TableCollector(CLUSTER, lambda: self._engine))
        self._services.batch_runner.start(BatchLines(self._services, app))
        if self._listener_path is None:
            app.add_middleware(_OneRequestId)
        else:
            self._door = FrontDoor(app, self._services, take_listener(self._listener_path))
        return app

    def replicas(self) -> list[dict[str, Any]]:
        """Build a record of each replica that takes requests, for `loraserve cluster status`."""
        return [
            {
                "replica": replica_id,
                "node": report.node_id[:12],
                "pid": report.pid,
                "engine_pid": report.engine_pid,
                "state": report.status or "ready",
                "running": report.stats.num_running,
                "waiting": report.stats.num_waiting,
                "on_device": len(report.device),
                "loads": report.stats.adapter_loads,
                "restarts": report.num_restarts,
            }
            for replica_id, report in sorted(self._engine.members.reports.items())
        ]

    async def __del__(self) -> None:
        # Serve awaits it once no request is left
        if hasattr(self, "_starting"):
            self._starting.cancel()
            # which ends what would continue for as long as it may
            self._services.is_draining = True
            if self._door is not None:
                await self._door.close(self._services.settings.grace_s)
            self._services.is_closed = True
            await self._services.shadows.close()
            await self._ending.aclose()


class _OneRequestId:
    """Leaves the answer's request id to Serve's proxy, which adds the same one to ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_without)


def _another_answers() -> bool:
    """Check whether an ingress is in service; one that is being made isn't."""
    own = serve.get_replica_context()
    application = serve.status().applications.get(own.app_name)
    deployment = None if application is None else application.deployments.get(own.deployment)
    return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0


def _tell_started(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        logger.error("the replicas don't answer", error=str(error))
    else:
        logger.info("ready")
