"""The application for Ray Serve: ``serve run loraserve.cluster.ray:app model=DIR replicas=2``."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from loraserve.cluster.ingress import Ingress
from loraserve.cluster.options import ClusterOptions
from loraserve.cluster.replica import EngineReplica
from loraserve.cluster.router import AffinityRouter
from loraserve.model.checkpoint.source import resolve_model_dir
from loraserve.settings import Settings

APP_NAME = "loraserve"
_MAX_ONGOING = 100_000
"""Requests that Serve lets into a replica or the ingress: ours bound them by tenant."""
_REPORT_PERIOD_S = 1.0
_ENVIRONMENT = {
    # one event loop for Serve's part and ours: each token would change threads twice
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def app(args: dict[str, str]) -> Application:
    """Build the application of ``serve run``, whose arguments are settings and options of a cluster."""
    options = {name: args.pop(name) for name in list(args) if name in ClusterOptions.model_fields}
    return build(Settings.load(**args), ClusterOptions.model_validate(options))


def build(settings: Settings, options: ClusterOptions) -> Application:
    """Return the ingress over the engine replicas, as Serve deploys it."""
    config = settings.engine_config(resolve_model_dir(settings.model))
    shutdown_s = options.drain_s + 20.0
    replica: Any = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=options.replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={
            "num_cpus": options.cpus_per_replica,
            "num_gpus": options.gpus_per_replica,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter, request_routing_stats_period_s=_REPORT_PERIOD_S
        ),
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=shutdown_s,
        max_constructor_retry_count=3,
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ENVIRONMENT}},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.grace_s + 10.0,
        max_constructor_retry_count=3,
    )
    return ingress.bind(settings, options.drain_s, replica.bind(config, settings.engine_hang_timeout))  # type: ignore[no-any-return]
