"""S-LoRA's synthetic trace (arXiv:2311.03285, §7.1): requests for many adapters that arrive when
they arrive, whether earlier ones were answered or not.

    python -m benchmarks.trace                # cv 1 and 4, four skews of popularity, a minute
                                              # of each: about fifteen minutes on two cores
    python -m benchmarks.trace --quick        # two skews, 15 seconds of each: about two minutes

Gaps between arrivals are gamma distributed; popularity is a power law, of which alpha 1 is uniform
and 0.1 strongly skewed; lengths are uniform. The paper's lengths are from 8 to 512 on one GPU, with
2 requests a second and more: here they're shorter, and the rate is a part of what this machine was
just measured to do with them. Before each point a trace of another seed brings the popular adapters
in.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import figures, reporting
from benchmarks.asking import Asker, Summary
from benchmarks.make_model import SIZES
from benchmarks.registered import BUDGETS, TARGETS, budget_flags
from benchmarks.serving import Server, last_line, make_base, module, say, serve
from benchmarks.synthetic import Adapters
from benchmarks.traffic import slora_trace
from benchmarks.watching import TIERS, Seen, Watch

CVS = (1.0, 4.0)
ALPHAS = (1.0, 0.6, 0.3, 0.1)
QUICK_ALPHAS = (1.0, 0.1)
LENGTHS = {"tiny": (8, 32), "S": (8, 128), "M": (8, 64)}
"""The paper's are from 8 to 512."""
MIN_REQUESTS = 30
"""Requests of a point, which takes longer for them where the rate is low."""
FIRST_SEED, WARMING_SEEDS = 100, 1000
"""No point has the seed of what ran before it: its prompts would be in the prefix cache,
and its adapters in memory.
"""
CALIBRATION = {False: (128, 32), True: (48, 32)}
"""Requests and how many at a time, in full and quick."""


@dataclass(frozen=True, slots=True)
class Point:
    """One trace."""

    cv: float
    alpha: float
    summary: Summary
    seen: Seen
    hits: dict[str, float]

    def row(self) -> list[str]:
        one = self.summary
        return [
            f"{self.cv:g}",
            f"{self.alpha:g}",
            f"{one.offered_per_s:.2f}",
            f"{one.num_complete / one.wall_s:.2f}",
            f"{one.tokens_per_s:.1f}",
            figures.ms(one.ttft_p50_s),
            figures.ms(one.ttft_p99_s),
            figures.ms(one.gap_p50_s),
            figures.percent(one.refused_share),
            str(one.num_failed),
            " / ".join(figures.percent(self.hits[tier]) for tier in TIERS),
            self.seen.device_words(),
            figures.mib(self.seen.host),
            figures.mib(self.seen.engine_rss),
        ]


HEADER = [
    "cv",
    "alpha",
    "offered requests/s",
    "answered requests/s",
    "tokens/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "between tokens p50 ms",
    "refused",
    "failed",
    "found on device / host / disk",
    "device MiB: adapters + KV; together",
    "host MiB",
    "engine's RSS MiB",
]


@dataclass(slots=True)
class Bench:
    options: argparse.Namespace
    server: Server
    vocab: int
    lengths: tuple[int, int]

    def trace(self, alpha: float, rate: float, cv: float, duration_s: float, seed: int) -> Any:
        lengths = {"prompt_tokens": self.lengths, "output_tokens": self.lengths}
        return slora_trace(self.options.adapters, alpha, rate, cv, duration_s, seed, **lengths)

    async def capacity(self) -> float:
        """Requests a second that the machine does of these lengths, many at a time, of adapters
        that are equally popular.
        """
        count, concurrency = CALIBRATION[self.options.quick]
        async with Asker(self.server.url, self.server.key, self.vocab) as asker:
            # what is compiled or allocated on first use is behind it
            await asker.closed_loop(self.trace(1.0, concurrency, 1.0, 1.0, 1), concurrency)
            summary = Summary.of(await asker.closed_loop(self.trace(1.0, count, 1.0, 1.0, 2), concurrency))
        if summary.num_complete < summary.num_sent:
            raise SystemExit(f"{summary.num_sent - summary.num_complete} requests weren't answered: {summary.errors}")
        return summary.num_complete / summary.wall_s

    async def point(self, cv: float, alpha: float, rate: float, seed: int) -> Point:
        duration_s = max(self.options.duration, MIN_REQUESTS / rate)
        async with Asker(self.server.url, self.server.key, self.vocab) as asker:
            await asker.open_loop(self.trace(alpha, rate, 1.0, duration_s / 4, WARMING_SEEDS + seed))
            with Watch(self.server) as watch:
                answers = await asker.open_loop(self.trace(alpha, rate, cv, duration_s, seed))
        return Point(cv, alpha, Summary.of(answers), watch.seen, watch.hits())


def run(options: argparse.Namespace) -> tuple[float, list[Point]]:
    """The machine's requests a second, and the points."""
    size, model = SIZES[options.size], make_base(options.size)
    flags = budget_flags(options)
    points: list[Point] = []
    with ExitStack() as stack:
        say("starting the server …")
        server = stack.enter_context(serve(model, options.quantize, flags=flags))
        say(f"registering {options.adapters:,} adapters …")
        common = (server.data, "--model", model, "--size", options.size, "--quantize", options.quantize)
        last_line(module("registering", *common, "--targets", TARGETS, "--count", options.adapters))
        bench = Bench(options, server, size.vocab, LENGTHS[options.size])
        capacity = asyncio.run(bench.capacity())
        rate = options.rate or options.load * capacity
        say(f"the machine does {capacity:.2f} requests/s; {rate:.2f} are offered")
        for cv in CVS:
            for alpha in QUICK_ALPHAS if options.quick else ALPHAS:
                points.append(asyncio.run(bench.point(cv, alpha, rate, seed=FIRST_SEED + len(points))))
                one = points[-1].summary
                say(f"  cv {cv:g}, alpha {alpha:g}: {one.tokens_per_s:.1f} tokens/s, {one.errors or 'no errors'}")
    return capacity, points


def text(options: argparse.Namespace, capacity: float, points: list[Point], plot: str) -> str:
    adapters = Adapters(SIZES[options.size], targets=(TARGETS,))
    held = sum(adapters.num_bytes(i) for i in range(len(adapters.ranks))) / len(adapters.ranks) * options.adapters
    seen = Seen.largest(point.seen for point in points)
    low, high = LENGTHS[options.size]
    return f"""Size {options.size}, base {options.quantize}; {options.adapters:,} adapters of ranks \
{", ".join(map(str, adapters.ranks))} on {TARGETS}, {figures.mib(held)} MiB in all; the device may hold \
{figures.mib(seen.device_budget)} MiB of them and of KV, and the host {figures.mib(seen.host_budget)} MiB (over \
budget: {seen.over_words()}). Prompts and answers of {low} to {high - 1} tokens, greedy, streamed; \
{options.duration:g} s a point or more, for {MIN_REQUESTS} requests at least. With 32 at a time the machine did \
{capacity:.2f} requests/s of these lengths.

{figures.table(HEADER, [point.row() for point in points])}

![the same as a plot]({plot})

- Offered: from the first arrival to the last; with cv 4 few arrivals leave chance a large part. Answered: complete \
answers until the last of them ended. Refused: with 429 or 503.
- Times count from when a request was due.
- Found: where a request's adapter was when it came.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(BUDGETS))
    parser.add_argument("--quick", action="store_true", help="two skews, 12 s of each point")
    parser.add_argument("--adapters", type=int, help="registered (default: 1000)")
    parser.add_argument("--duration", type=float, help="seconds of a point (default: 60)")
    parser.add_argument("--load", type=float, default=0.7, help="the rate, as a part of what the machine does")
    parser.add_argument("--rate", type=float, help="the rate itself, in requests a second")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--memory-budget", help="the device's")
    parser.add_argument("--host-cache")
    options = parser.parse_args(arguments)
    options.adapters = options.adapters or (400 if options.quick else 1000)
    options.duration = options.duration or (12.0 if options.quick else 60.0)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from benchmarks.plotting import plot_trace

    machine = reporting.facts()
    capacity, points = run(options)
    name = f"{reporting.dated('trace', options.size, is_quick=options.quick)}.svg"
    reporting.RESULTS.mkdir(exist_ok=True)
    plot_trace(points, reporting.RESULTS / name)
    page = text(options, capacity, points, name)
    numbers = {"capacity_per_s": capacity, "points": points}
    reporting.finish("trace", "S-LoRA's trace", page, machine, options, arguments, **numbers)


if __name__ == "__main__":
    main()
