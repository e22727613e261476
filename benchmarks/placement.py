"""Where requests go among replicas, simulated: our placement beside others, on the same requests.

    python -m benchmarks.placement           # every scenario, seven policies: under 15 minutes
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
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import figures, reporting
from benchmarks.placement_costs import LOADS, STEPS, Costs, measured
from benchmarks.placement_load import (
    OUTPUT_TOKENS,
    OWN_TOKENS,
    PREFIX_TOKENS,
    UTILIZATION,
    Traffic,
    che_hit_share,
    offline_optimum,
)
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
    duration_s: float = 1800.0
    utilization: float = UTILIZATION
    load_scale: float = 1.0
    """Multiple of what a load from the store was measured to take."""
    change: str = ""
    """`lost` or `added`: a replica, in the middle of the run."""
    is_ours_alone: bool = False
    """Without the others: half an hour of many replicas takes long."""
    device_bytes: int = DEVICE_BYTES
    host_bytes: int = HOST_BYTES
    seed: int = 1

    def traffic(self, costs: Costs) -> Traffic:
        prompt = PREFIX_TOKENS + sum(OWN_TOKENS) / 2
        rate = self.utilization * self.num_replicas * costs.capacity(prompt, sum(OUTPUT_TOKENS) / 2)
        return Traffic(self.shape, self.num_adapters, self.zipf, rate, self.duration_s, self.seed)


CENTRE = Scenario("centre")
SMALL = replace(CENTRE, num_adapters=192, device_bytes=288 << 20, host_bytes=640 << 20)
"""Little memory: a replica holds 118 of 192 adapters."""
LARGE = replace(CENTRE, num_replicas=64, duration_s=480.0)
FLASH_64 = replace(LARGE, num_adapters=1_000, zipf=1.2, shape="flash")
MANY_64 = replace(LARGE, num_adapters=100_000, zipf=0.6)
SCENARIOS = (
    replace(CENTRE, duration_s=3600.0),
    *(
        replace(CENTRE, name=f"{n} replicas", num_replicas=n, duration_s=min(1800.0, 14_400 / n))
        for n in (2, 4, 16, 32)
    ),
    replace(CENTRE, name="2 replicas, 1,000 adapters", num_replicas=2, num_adapters=1_000),
    replace(SMALL, name="2 replicas with little memory", num_replicas=2),
    replace(SMALL, name="2 replicas with hardly enough memory", num_replicas=2, host_bytes=540 << 20),
    replace(SMALL, name="4 replicas with little memory", num_replicas=4, host_bytes=200 << 20),
    replace(
        CENTRE, name="8 replicas with little memory", num_adapters=1_000, device_bytes=288 << 20, host_bytes=900 << 20
    ),
    replace(LARGE, name="64 replicas"),
    *(replace(CENTRE, name=f"{n:,} adapters", num_adapters=n) for n in (1_000, 100_000)),
    *(replace(CENTRE, name=f"Zipf {zipf}", zipf=zipf) for zipf in (0.6, 1.2)),
    *(replace(CENTRE, name=shape, shape=shape) for shape in ("bursty", "diurnal", "flash")),
    replace(CENTRE, name="a tenth of the requests", utilization=UTILIZATION / 10),
    replace(CENTRE, name="loads ten times as slow", load_scale=10.0),
    replace(CENTRE, name="a replica lost", change="lost"),
    replace(CENTRE, name="a replica added", change="added"),
    replace(LARGE, name="64 replicas, one lost", change="lost"),
    replace(FLASH_64, name="64 replicas, 1,000 adapters, Zipf 1.2, flash"),
    replace(MANY_64, name="64 replicas, 100,000 adapters, Zipf 0.6"),
    replace(LARGE, name="64 replicas, half an hour", duration_s=1800.0, is_ours_alone=True),
    replace(
        FLASH_64,
        name="64 replicas, 1,000 adapters, Zipf 1.2, flash, half an hour",
        duration_s=1800.0,
        is_ours_alone=True,
    ),
    replace(
        MANY_64, name="64 replicas, 100,000 adapters, Zipf 0.6, half an hour", duration_s=1800.0, is_ours_alone=True
    ),
)
"""Each changes one thing of the centre; the last ones are the corners."""
QUICK = (
    replace(CENTRE, name="centre", duration_s=900.0),
    replace(SMALL, name="2 replicas with little memory", num_replicas=2),
    replace(CENTRE, name="2 replicas, 1,000 adapters", num_replicas=2, num_adapters=1_000, duration_s=1800.0),
    replace(CENTRE, name="flash", shape="flash", duration_s=900.0),
    replace(CENTRE, name="bursty, Zipf 1.2", shape="bursty", zipf=1.2, duration_s=900.0),
    replace(CENTRE, name="a replica lost", change="lost"),
    replace(CENTRE, name="a replica added", change="added"),
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
    costs = replace(costs, load_s=scenario.load_scale * costs.load_s)
    requests = scenario.traffic(costs).requests(costs)
    changes = [MembershipChange(scenario.duration_s / 2, scenario.change == "lost")] if scenario.change else []
    policy = policies(costs, scenario.seed)[name]()
    cluster = Cluster(
        scenario.num_replicas,
        policy,
        costs,
        device_bytes=scenario.device_bytes,
        host_bytes=scenario.host_bytes,
        changes=changes,
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


def misses(result: Result) -> list[str]:
    """Return which figures our policy doesn't reach in a scenario, and what was possible."""
    scenario, ours, found = result.scenario, result.ours, []
    if ours.load_ratio > MAX_LOAD_RATIO:
        found.append(f"the most work is {ours.load_ratio:.2f} × the mean")
    if ours.minute_ratio > MAX_LOAD_RATIO:
        found.append(f"the most requests of a minute are {ours.minute_ratio:.2f} × the mean, at the median of minutes")
    if ours.in_memory < MIN_IN_MEMORY:
        found.append(
            f"{figures.percent(ours.in_memory)} in memory: the replicas together hold {result.pooled_adapters:,} "
            f"adapters of {scenario.num_adapters:,}; at most {figures.percent(result.optimum)} is possible with the "
            f"future known, and {figures.percent(result.che)} by one pooled LRU memory in the long run"
        )
    if ours.loads_per_hour > MAX_LOADS:
        found.append(f"{ours.loads_per_hour:.2f} loads by adapter and hour, in a run of {scenario.duration_s:.0f} s")
    if scenario.change:
        ideal = 1 / (scenario.num_replicas + (scenario.change == "added"))
        if ours.moved > ideal + MAX_MOVED_MORE:
            found.append(f"{figures.percent(ours.moved)} moved, where {figures.percent(ideal)} is the least")
    return found


HEADER = [
    "policy",
    "work, most ÷ mean",
    "requests at a time, most ÷ mean, of a minute: p50 / p95",
    "in memory",
    "loads by adapter and hour",
    "moved",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "prefix hits",
]


def row(outcome: Outcome) -> list[str]:
    return [
        outcome.policy,
        f"{outcome.load_ratio:.2f}",
        f"{outcome.minute_ratio:.2f} / {outcome.minute_ratio_p95:.2f}",
        figures.percent(outcome.in_memory),
        f"{outcome.loads_per_hour:.2f}",
        figures.percent(outcome.moved),
        figures.ms(outcome.ttft_p50_s),
        figures.ms(outcome.ttft_p99_s),
        figures.percent(outcome.prefix_hits),
    ]


def section(result: Result) -> str:
    one = result.scenario
    change = f"; in the middle a replica is {one.change}, which the bounds below leave out" if one.change else ""
    slow = f"; a load takes {one.load_scale:g} times what was measured" if one.load_scale != 1 else ""
    return f"""## {one.name}

{one.num_replicas} replicas, {one.num_adapters:,} adapters, Zipf {one.zipf:g}, {one.shape}, {result.rate_per_s:.1f} \
requests/s for {one.duration_s:.0f} s{change}{slow}. The replicas together hold {result.pooled_adapters:,} adapters; \
in memory at most {figures.percent(result.optimum)} with the future known, {figures.percent(result.che)} by one pooled \
LRU memory in the long run.

{figures.table(HEADER, [row(outcome) for outcome in result.outcomes])}
"""


def text(results: Sequence[Result], costs: Costs) -> str:
    missed = [f"- {result.scenario.name}: {'; '.join(found)}." for result in results if (found := misses(result))]
    steps = ", ".join(f"{1e3 * seconds:.0f} ms with {count}" for count, seconds in costs.step_points)
    return f"""Simulated replicas of a size-S base in float32: a step takes {steps} sequences \
(benchmarks/results/{STEPS}), a prompt token {1e3 * costs.prefill_s:.1f} ms; reading, verifying and copying an adapter \
of {costs.adapter_bytes / 1e6:.1f} MB {1e3 * costs.load_s:.0f} ms (benchmarks/results/{LOADS}), of which what isn't \
reading and verifying, {1e3 * costs.promote_s:.0f} ms, stands for a load from host memory. {costs.max_num_seqs} slots, \
{DEVICE_BYTES >> 30} GiB on the device and {HOST_BYTES >> 30} GiB in the host for adapters, or little: \
{SMALL.device_bytes >> 20} MiB on the device. Prompts of \
{PREFIX_TOKENS} tokens that an adapter's four prefixes share unevenly and {OWN_TOKENS[0]} to {OWN_TOKENS[1]} others, \
answers of {OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}. Offered: {UTILIZATION:.0%} of what full slots serve.

- Work: prompts and tokens that each replica was given, by their costs. Requests at a time: running and waiting.
- In memory: on the device or in the host when the request came to its replica. Each adapter had its first load before \
the run, so that all loads are repeated ones; they are counted after the first {WARM_SHARE:.0%} of the run, by adapter \
that was asked for.
- Moved: of the adapters in memory when a replica was lost or added, and asked for after that, those whose first \
request went to a replica that didn't hold it.

Figures to reach: most work and requests of a minute {MAX_LOAD_RATIO} × the mean, {MIN_IN_MEMORY:.0%} in memory, \
{MAX_LOADS} loads by adapter and hour, moved 1/N + {MAX_MOVED_MORE:.0%}. Of {len(results)} scenarios, \
{len(results) - len(missed)} reach all. The others:

{chr(10).join(missed) or "- none."}

{chr(10).join(section(result) for result in results)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few short scenarios, under two minutes")
    parser.add_argument("--seed", type=int, default=1, help="another stream of requests of the same kind")
    options = parser.parse_args(arguments)
    machine, costs = reporting.facts(), measured()
    results = []
    for scenario in QUICK if options.quick else SCENARIOS:
        say(f"{scenario.name} …")
        names = ["loraserve"] if scenario.is_ours_alone else list(policies(costs, options.seed))
        results.append(run_scenario(replace(scenario, seed=options.seed), costs, names))
    typed = list(sys.argv[1:] if arguments is None else arguments)
    typed = typed[1:] if typed[:1] == ["placement"] else typed
    head = reporting.describe(machine, reporting.command("placement", typed), os.getloadavg()[0], reporting.today())
    page = f"{head}\n{text(results, costs)}"
    print(page)
    name = f"placement-{reporting.today()}{'-quick' if options.quick else ''}"
    numbers: dict[str, Any] = {"options": vars(options), "costs": costs, "results": results}
    written = reporting.write(name, "Placement among simulated replicas", page, numbers, machine)
    say(f"written: {' and '.join(f'benchmarks/results/{path.name}' for path in written)}")


if __name__ == "__main__":
    main()
