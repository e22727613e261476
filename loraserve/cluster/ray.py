"""The application for Ray Serve: ``serve run loraserve.cluster.ray:app model=DIR replicas=2``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from ray.serve.schema import LoggingConfig

from loraserve.cluster.autoscaling import QueueAndTtftPolicy
from loraserve.cluster.ingress import Ingress
from loraserve.cluster.options import ClusterOptions
from loraserve.cluster.replica import EngineReplica
from loraserve.cluster.routing.router import AffinityRouter
from loraserve.config import EngineConfig
from loraserve.model.checkpoint.source import local_draft_dir, resolve_model_dir
from loraserve.settings import Settings

APP_NAME = "loraserve"
ENGINE, INGRESS = "engine", "ingress"
"""Names of the two deployments."""
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
"""Serve's logs: the ingress has an access log of its own."""
_MAX_ONGOING = 100_000
"""Requests that Serve lets into a replica or the ingress: ours are bounded by tenant."""
_REPORT_PERIOD_S = 1.0
_LOOK_BACK_S = 12.0
"""Longer than the 10 s that Serve recommends."""
_METRICS_PERIOD_S = "2"
_STOP_S = 20.0
"""Seconds beyond a drain in which a replica ends its streams and its engine."""
_ENVIRONMENT = {
    # one event loop for Serve's part and ours: each token would change threads twice
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": _METRICS_PERIOD_S,
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": _METRICS_PERIOD_S,
}


@dataclass(frozen=True)
class ClusterParts:
    """Classes that a cluster is made of; a comparison puts others in their place."""

    ingress: type[Ingress] = Ingress
    replica: type[EngineReplica] = EngineReplica
    router: type[RequestRouter] = AffinityRouter


OURS = ClusterParts()


def app(args: dict[str, str]) -> Application:
    """Build what ``serve run`` deploys; its arguments are settings and options of a cluster.

    Raises:
        ConfigError: one is unknown or impossible.
    """
    options = {name: args[name] for name in args.keys() & ClusterOptions.model_fields.keys()}
    settings = {name: value for name, value in args.items() if name not in options}
    return build(Settings.load(**settings), ClusterOptions.load(**options))


def build(
    settings: Settings, options: ClusterOptions, parts: ClusterParts = OURS, listener_path: Path | None = None
) -> Application:
    """Build the ingress over the engine replicas, as Serve deploys it.

    Args:
        listener_path: where the ingress finds the socket that clients connect to; None: Serve's
            proxies answer clients.

    Raises:
        ConfigError: settings contradict each other.
        ModelError: there is no such model.
    """
    config = settings.engine_config(resolve_model_dir(settings.model), local_draft_dir(settings.draft_model))
    replica: Any = serve.deployment(
        parts.replica,
        name=ENGINE,
        **_scaling(options, config),
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={
            "num_cpus": options.cpus_per_replica,
            "num_gpus": options.gpus_per_replica,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
        request_router_config=RequestRouterConfig(
            request_router_class=parts.router, request_routing_stats_period_s=_REPORT_PERIOD_S
        ),
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.drain_s + settings.grace_s + _STOP_S,
        max_constructor_retry_count=3,
        logging_config=QUIET,
    )
    ingress: Any = serve.deployment(
        serve.ingress()(parts.ingress),
        name=INGRESS,
        max_ongoing_requests=_MAX_ONGOING,
        # a restart's new ingress takes requests before the old one goes
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ENVIRONMENT}},
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.grace_s + _STOP_S,
        max_constructor_retry_count=3,
        logging_config=QUIET,
    )
    application: Application = ingress.bind(
        settings, options.drain_s, listener_path, replica.bind(config, settings.engine_hang_timeout, settings.log_level)
    )
    return application


def _scaling(options: ClusterOptions, config: EngineConfig) -> dict[str, Any]:
    """Choose the part of a deployment that sets how many replicas there are."""
    if options.fewest == options.most:
        return {"num_replicas": options.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.fewest,
            initial_replicas=options.replicas,
            max_replicas=options.most,
            target_ongoing_requests=options.target_requests or max(1.0, 0.75 * config.max_num_seqs),
            look_back_period_s=_LOOK_BACK_S,
            upscale_delay_s=options.scale_up_delay,
            downscale_delay_s=options.scale_down_delay,
            policy=AutoscalingPolicy(
                policy_function=QueueAndTtftPolicy, policy_kwargs={"max_ttft_s": options.max_ttft}
            ),
        )
    }
