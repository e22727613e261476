"""Metrics of a cluster, beside those of its servers: replicas, routing, replays, loads."""

from __future__ import annotations

from loraserve.api.metrics.table import Table, counter, gauge
from loraserve.cluster.engine import ClusterEngine

CLUSTER: Table[ClusterEngine] = (
    gauge("loraserve_cluster_replicas", "Engine replicas by state.", lambda e: e.replica_states(), "state"),
    counter(
        "loraserve_cluster_routed",
        "Requests sent to a replica, by reason: it had the adapter (resident), had computed the beginning"
        " (prefix), was the adapter's first (hash), or had the most room (load).",
        lambda e: {reason: float(num) for reason, num in e.members.num_routed.items()},
        "reason",
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
