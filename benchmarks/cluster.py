"""Two replicas with our routing, beside one replica, Ray Serve's model multiplexing, and chance.

    python -m benchmarks.cluster            # about 15 minutes on two cores
    python -m benchmarks.cluster --quick    # one round: about five minutes

Each turn is a cluster of its own on Ray Serve (`benchmarks.cluster_turn`): several tenants, more
adapters than one replica's memory holds, drawn by Zipf's law, prompts whose beginnings others of
their adapter share. The turns alternate and each has the same requests in a round: one for each
adapter and some by Zipf's law to warm up, and then those that are measured.

Everything runs on one machine, so that two replicas have no more processors than one: throughput
isn't compared. Loads and prefix hits don't depend on that; times to the first token do, and are
given as ratios alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, reporting
from benchmarks.cluster_turn import (
    CONCURRENCY,
    EXPONENT,
    HOST_CACHE,
    MEMORY_BUDGET,
    NUM_TENANTS,
    PREFIX_TOKENS,
    PREFIXES_PER_ADAPTER,
    RANK,
    SIZE,
)
from benchmarks.serving import last_line, make_base, module, say

ARMS = {
    "two replicas, our routing": ("ours", 2),
    "one replica": ("ours", 1),
    "two replicas, serve.multiplexed": ("multiplexed", 2),
    "two replicas, by chance": ("random", 2),
}
OURS = next(iter(ARMS))
NUM_ADAPTERS = 192
Turn = dict[str, Any]
"""`benchmarks.cluster_turn.Turn`, as another process prints it."""


def run(options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Each arm's turns, one a round."""
    model = make_base(SIZE)
    turns: dict[str, list[Turn]] = {name: [] for name in ARMS}
    for number in range(options.rounds):
        # who is first in one round is last in the next
        order = list(ARMS.items())[:: 1 if number % 2 == 0 else -1]
        for name, (routing, num_replicas) in order:
            common: tuple[str | int, ...] = ("--adapters", options.adapters, "--seed", options.seed + number)
            common += ("--warming", options.requests // 2, "--requests", options.requests)
            turn = _turn("--model", model, "--routing", routing, "--replicas", num_replicas, *common)
            turns[name].append(turn)
            say(
                f"round {number + 1}, {name}: {turn['disk_loads']:.0f} loads from the disk, {turn['device_loads']:.0f}"
                f" onto a device, held {turn['held']}, found {turn['found']}, prefix hits"
                f" {figures.percent(hit_share(turn))}, TTFT p50 {figures.ms(turn['summary']['ttft_p50_s'])} ms"
            )
    return turns


def _turn(*arguments: str | int | Path) -> Turn:
    """Return what a turn in a process of its own found; it ends with this one."""
    process = module("cluster_turn", *arguments)
    try:
        turn: Turn = last_line(process)
    finally:
        # Ray's driver aborts at a SIGTERM, and leaves its cluster
        process.send_signal(signal.SIGINT)
        process.wait()
    return turn


def hit_share(turn: Turn) -> float:
    return float(turn["prefix_hits"] / turn["prefix_tokens"]) if turn["prefix_tokens"] else math.nan


MEASURES = {
    "loads disk → host": lambda turn: turn["disk_loads"],
    "loads → device": lambda turn: turn["device_loads"],
    "prompt tokens found in a prefix cache": hit_share,
    "TTFT p50": lambda turn: turn["summary"]["ttft_p50_s"],
    "TTFT p99": lambda turn: turn["summary"]["ttft_p99_s"],
}


def ratios(turns: dict[str, list[Turn]], name: str) -> dict[str, float]:
    """Return each measure of an arm ÷ ours: the median over the rounds."""
    pairs = list(zip(turns[name], turns[OURS], strict=True))
    found = {}
    for measure, of in MEASURES.items():
        found[measure] = statistics.median(of(turn) / of(ours) if of(ours) else math.nan for turn, ours in pairs)
    return found


def _sums(turns: Sequence[Turn]) -> list[str]:
    """Return an arm's own figures, which are no times: all rounds together."""
    num = sum(turn["summary"]["num_sent"] for turn in turns)
    found = {tier: sum(turn["found"][tier] for turn in turns) for tier in turns[0]["found"]}
    held = {tier: statistics.mean(turn["held"][tier] for turn in turns) for tier in turns[0]["held"]}
    whole = sum(found.values())
    return [
        f"{sum(turn['disk_loads'] for turn in turns) / num:.3f}",
        f"{sum(turn['device_loads'] for turn in turns) / num:.3f}",
        " / ".join(figures.percent(count / whole) for count in found.values()),
        figures.percent(sum(turn["prefix_hits"] for turn in turns) / sum(turn["prefix_tokens"] for turn in turns)),
        f"{held['device']:.0f} + {held['host']:.0f}",
    ]


def text(options: argparse.Namespace, turns: dict[str, list[Turn]]) -> str:
    counted = [[name, *_sums(of_arm)] for name, of_arm in turns.items()]
    compared = [
        [name, *(figures.number(ratio, 2) for ratio in ratios(turns, name).values())] for name in turns if name != OURS
    ]
    header = [
        "",
        "loads disk → host a request",
        "loads → device a request",
        "adapter found on device / in host / on disk",
        "prompt tokens found in a prefix cache",
        "adapters held on device + in host, all replicas",
    ]
    return f"""Size {SIZE}, {options.adapters} adapters of rank {RANK} on all seven linears, {NUM_TENANTS} tenants, \
Zipf {EXPONENT:g}; {PREFIXES_PER_ADAPTER} beginnings of {PREFIX_TOKENS} tokens an adapter; per replica {MEMORY_BUDGET} \
for KV and adapters and {HOST_CACHE} in the host. {options.requests} requests after one for each adapter \
and {options.requests // 2} of the same kind, \
{CONCURRENCY} at a time, {options.rounds} rounds, each turn a fresh cluster on Ray Serve.

{figures.table(header, counted)}

Each divided by ours, the median over the rounds (below 1 is better than ours, but for prefix hits):

{figures.table(["÷ ours", *MEASURES], compared)}

- Loads → device: copies onto a device, from the host's memory or right after a read.
- serve.multiplexed: Serve's default router (the power of two choices among the replicas that said to hold the model), \
with the adapter's digest as the model's id, our engines and our ingress.
- Both replicas share this machine's processors with Ray's own processes: throughput can't be compared here, and times \
to the first token hold more of Ray's way than of loads.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of fewer requests")
    parser.add_argument("--adapters", type=int, default=NUM_ADAPTERS)
    parser.add_argument("--requests", type=int, help="measured (default: 600)")
    parser.add_argument("--rounds", type=int, help="turns of each (default: 3)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("ray") is None:
        raise SystemExit('This needs Ray Serve, which isn\'t installed: pip install "loraserve[ray]"')
    options.size = SIZE
    options.requests = options.requests or (300 if options.quick else 600)
    options.rounds = options.rounds or (1 if options.quick else 3)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = reporting.facts()
    turns = run(options)
    compared = {name: ratios(turns, name) for name in turns if name != OURS}
    title = "Routing of a cluster's requests"
    reporting.finish("cluster", title, text(options, turns), machine, options, arguments, ratios=compared, turns=turns)


if __name__ == "__main__":
    main()
