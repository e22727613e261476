"""Where requests go among replicas, simulated: our placement beside others, on the same requests.

    python -m benchmarks.placement           # every scenario, six policies: under 15 minutes on a core
    python -m benchmarks.placement --quick   # a few scenarios: under two minutes

No server runs: replicas are simulated with costs that this project measured, by events, without a
clock. The same seed gives the same numbers. The placement that decides is the router's own code.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import figures, reporting
from benchmarks.placement_costs import LOADS, STEPS, Costs, measured
from benchmarks.placement_load import OUTPUT_TOKENS, OWN_TOKENS, PREFIX_TOKENS, UTILIZATION, Traffic
from benchmarks.placement_load import che_hit_share, offline_optimum
from benchmarks.placement_policies import policies
from benchmarks.serving import say
from benchmarks.simulated_cluster import Cluster, MembershipChange

DEVICE_BYTES, HOST_BYTES = 2 << 30, 16 << 30
"""Memory of a replica for adapters."""
WARM_SHARE = 0.2
"""Part of a run that isn't counted: the policies' memories fill."""
WINDOW_S = 60.0
MAX_LOAD_RATIO, MIN_IN_MEMORY, MAX_MOVED_MORE, MAX_LOADS = 1.2, 0.95, 0.05, 1.1
"""Figures to reach."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    num_replicas: int = 8
    num_adapters: int = 10_000
    zipf: float = 0.9
    shape: str = "steady"
    duration_s: float = 3600.0
    utilization: float = UTILIZATION
    change: str = ""
    """`lost` or `added`: a replica, in the middle of the run."""
    seed: int = 1

    def traffic(self, costs: Costs) -> Traffic:
        prompt = PREFIX_TOKENS + sum(OWN_TOKENS) / 2
        rate = self.utilization * self.num_replicas * costs.capacity(prompt, sum(OUTPUT_TOKENS) / 2)
        return Traffic(self.shape, self.num_adapters, self.zipf, rate, self.duration_s, self.seed)


CENTRE = Scenario("centre")
SCENARIOS = (
    CENTRE,
    *(replace(CENTRE, name=f"{n} replicas", num_replicas=n, duration_s=min(3600.0, 28_800 / n)) for n in (2, 4, 16, 32, 64)),
    *(replace(CENTRE, name=f"{n:,} adapters", num_adapters=n) for n in (1_000, 100_000)),
    *(replace(CENTRE, name=f"Zipf {zipf}", zipf=zipf) for zipf in (0.6, 1.2)),
    *(replace(CENTRE, name=shape, shape=shape) for shape in ("bursty", "diurnal", "flash")),
    replace(CENTRE, name="a tenth of the load", utilization=UTILIZATION / 10),
    replace(CENTRE, name="a replica lost", change="lost"),
    replace(CENTRE, name="a replica added", change="added"),
    replace(CENTRE, name="64 replicas, 1,000 adapters, Zipf 1.2, flash", num_replicas=64, num_adapters=1_000, zipf=1.2, shape="flash", duration_s=600.0),
    replace(CENTRE, name="64 replicas, 100,000 adapters, Zipf 0.6", num_replicas=64, num_adapters=100_000, zipf=0.6, duration_s=450.0),
    replace(CENTRE, name="64 replicas, one lost", num_replicas=64, change="lost", duration_s=600.0),
)
QUICK = (
    replace(CENTRE, name="centre", duration_s=900.0),
    replace(CENTRE, name="2 replicas, 1,000 adapters", num_replicas=2, num_adapters=1_000, duration_s=1800.0),
    replace(CENTRE, name="flash", shape="flash", duration_s=900.0),
    replace(CENTRE, name="bursty, Zipf 1.2", shape="bursty", zipf=1.2, duration_s=900.0),
    replace(CENTRE, name="a replica lost", change="lost", duration_s=900.0),
    replace(CENTRE, name="a replica added", change="added", duration_s=900.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy did with one scenario's requests."""

    policy: str
    num_requests: int
    load_ratio: float
    """Most work that a replica was given, to the mean."""
    minute_ratio: float
    """The same of requests at a time, averaged over a minute: the median of minutes."""
    minute_ratio_p95: float
    in_memory: float
    loads_per_hour: float
    """Loads by adapter that was asked for, and hour, the first load not counted."""
    moved: float
    """Share of adapters in memory that a lost or added replica moved; NaN without a change."""
    ttft_p50_s: float
    ttft_p99_s: float
    prefix_hits: float
    num_promotions: int
    num_hot: int


def simulate(scenario: Scenario, name: str, costs: Costs) -> tuple[Outcome, Cluster]:
    """Run one policy on the scenario's requests, which are made anew from its seed."""
    traffic = scenario.traffic(costs)
    requests = traffic.requests(costs)
    changes = [MembershipChange(scenario.duration_s / 2, scenario.change == "lost")] if scenario.change else []
    policy = policies(costs, scenario.seed)[name]()
    cluster = Cluster(
        scenario.num_replicas, policy, costs, device_bytes=DEVICE_BYTES, host_bytes=HOST_BYTES, changes=changes
    )
    cluster.warm(scenario.num_adapters)
    cluster.run(requests, WINDOW_S)
    warm_s = WARM_SHARE * scenario.duration_s
    counted = [request for request in requests if request.at_s >= warm_s]
    hours = (scenario.duration_s - warm_s) / 3600
    asked = len({request.adapter for request in counted})
    loads = sum(at_s >= warm_s for at_s, _, _ in cluster.loads)
    waits = [request.first_token_s - request.at_s for request in counted]
    samples = [sample for sample in cluster.samples if sample.at_s > warm_s]
    minutes = [max(sample.loads) / statistics.fmean(sample.loads) for sample in samples if sum(sample.loads)]
    placement = getattr(policy, "placement", None)
    outcome = Outcome(
        name,
        len(counted),
        _work_ratio(cluster, warm_s),
        figures.percentile(minutes, 50),
        figures.percentile(minutes, 95),
        sum(request.tier in ("device", "host") for request in counted) / len(counted),
        loads / asked / hours,
        moved_share(cluster) if scenario.change else math.nan,
        figures.percentile(waits, 50),
        figures.percentile(waits, 99),
        sum(request.is_prefix_hit for request in counted) / len(counted),
        cluster.num_promotions,
        len(placement.hot_versions) if placement is not None else 0,
    )
    return outcome, cluster


def _work_ratio(cluster: Cluster, warm_s: float) -> float:
    """Return the most work to the mean, of intervals in which the same replicas were there."""
    ratios, weights = [], []
    samples = [sample for sample in cluster.samples if sample.at_s > warm_s]
    start = 0
    for end in range(1, len(samples) + 1):
        if end == len(samples) or samples[end].members != samples[start].members:
            first, last = samples[start].work_s, samples[end - 1].work_s
            if end - 1 > start:
                done = [after - before for before, after in zip(first, last, strict=True)]
                ratios.append(max(done) / statistics.fmean(done))
                weights.append(end - 1 - start)
            start = end
    return sum(ratio * weight for ratio, weight in zip(ratios, weights, strict=True)) / sum(weights)


def moved_share(cluster: Cluster) -> float:
    """Return the share of adapters that were in memory at the change, and were asked for after it,
    whose first request after it went to a replica that didn't hold it.
    """
    moved = [number not in cluster.held_at_change[adapter] for adapter, number in cluster.first_after.items()]
    return sum(moved) / len(moved)


@dataclass(frozen=True, slots=True)
class Result:
    scenario: Scenario
    rate_per_s: float
    pooled_adapters: int
    optimum: float
    """Share in memory that no policy on demand betters."""
    che: float
    outcomes: list[Outcome]

    @property
    def ours(self) -> Outcome:
        return self.outcomes[-1]


def run_scenario(scenario: Scenario, costs: Costs, names: Sequence[str]) -> Result:
    traffic = scenario.traffic(costs)
    outcomes, clusters = [], []
    for name in names:
        outcome, cluster = simulate(scenario, name, costs)
        outcomes.append(outcome)
        clusters.append(cluster)
    pooled = scenario.num_replicas * (clusters[0].device_slots + clusters[0].host_slots)
    requests = traffic.requests(costs)
    first = next(place for place, one in enumerate(requests) if one.at_s >= WARM_SHARE * scenario.duration_s)
    held = min(pooled, scenario.num_adapters)
    optimum = offline_optimum([request.adapter for request in requests], held, first)
    return Result(scenario, traffic.rate_per_s, pooled, optimum, che_hit_share(traffic.popularity(), pooled), outcomes)
