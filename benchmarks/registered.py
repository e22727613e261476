"""Throughput with ten registered adapters, and with hundreds and thousands: the same requests, a
memory budget that holds only a part of them.

    python -m benchmarks.registered              # 10, 100, 1,000 and 5,000 adapters:
                                                 # about 20 minutes on two cores
    python -m benchmarks.registered --quick      # 10, 100 and 400: about two minutes

Two servers of one budget: one has ten adapters all along, the other has more and more. Each time,
both are warmed up with requests of the popularity to be measured, then they take turns with the
same stream: prompts, lengths and ranks of its requests are equal, and only which adapter of that
rank each asks for differs, drawn by Zipf's law from those registered. The ratio is the median over
the turns, since others may share the machine: two turns, one after the other, differ by up to a
quarter on a virtual one.

Some uploads go over the API, and what they took is reported; the others go past the engine's
certificates (`benchmarks.registering`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import figures, reporting
from benchmarks.asking import Asker, Summary
from benchmarks.figures import percentile
from benchmarks.make_model import SIZES
from benchmarks.pushing import Pushed, push
from benchmarks.serving import Server, last_line, make_base, module, say, serve
from benchmarks.synthetic import Adapters
from benchmarks.traffic import zipf_stream
from benchmarks.watching import Seen, Watch, engine_process

BUDGETS = {"tiny": ("64MiB", "4MiB"), "S": ("512MiB", "512MiB"), "M": ("1536MiB", "1GiB")}
"""The device's and the host cache's, so that thousands of adapters don't fit."""
QUICK_HOST_CACHE = "32MiB"
"""So that hundreds don't."""
TARGETS = "q_proj"
CONCURRENCY = 32
EXPONENT = 1.0
LENGTHS = {"prompt_tokens": (32, 97), "output_tokens": (32, 97)}
WARMING = {"prompt_tokens": (8, 9), "output_tokens": (1, 2)}


@dataclass(slots=True)
class Turn:
    """One run of the stream on one server."""

    summary: Summary
    seen: Seen
    hits: dict[str, float]

    @property
    def cpu_s_per_token(self) -> float:
        """The engine's, on all cores together."""
        return self.seen.engine_cpu_s / self.summary.num_tokens


@dataclass(slots=True)
class Point:
    """All turns with one number of registered adapters,
    and the turns of the server with ten between them.
    """

    num_adapters: int
    turns: list[Turn] = field(default_factory=list)
    peers: list[Turn] = field(default_factory=list)
    rss_before_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Tokens a second, to those with ten registered."""
        pairs = zip(self.turns, self.peers, strict=True)
        return statistics.median(own.summary.tokens_per_s / peer.summary.tokens_per_s for own, peer in pairs)

    @property
    def cpu_ratio(self) -> float:
        """Processor time a token, to that with ten registered: below 1 is less."""
        pairs = zip(self.turns, self.peers, strict=True)
        return statistics.median(own.cpu_s_per_token / peer.cpu_s_per_token for own, peer in pairs)

    def row(self) -> list[str]:
        best = max(self.turns, key=lambda turn: turn.summary.tokens_per_s).summary
        seen = Seen.largest(turn.seen for turn in self.turns)
        failed = sum(turn.summary.num_sent - turn.summary.num_complete for turn in self.turns)
        hits = {tier: statistics.mean(turn.hits[tier] for turn in self.turns) for tier in self.turns[0].hits}
        return [
            f"{self.num_adapters:,}",
            f"{best.tokens_per_s:.1f}",
            f"{self.ratio:.3f}",
            f"{figures.ms(statistics.median(turn.cpu_s_per_token for turn in self.turns))} ({self.cpu_ratio:.3f})",
            figures.ms(statistics.median(turn.summary.ttft_p50_s for turn in self.turns)),
            figures.ms(statistics.median(turn.summary.ttft_p99_s for turn in self.turns)),
            " / ".join(figures.percent(hits[tier]) for tier in hits),
            seen.device_words(),
            f"{figures.mib(seen.host)} of {figures.mib(seen.host_budget)}",
            seen.over_words(),
            f"{figures.mib(seen.engine_rss)} ({(seen.engine_rss - self.rss_before_bytes) / 2**20:+,.0f})",
            str(failed),
            " ".join(f"{turn.summary.tokens_per_s:.0f}" for turn in self.turns),
        ]


HEADER = [
    "registered",
    "tokens/s",
    "to 10",
    "engine's CPU ms a token (to 10)",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "found on device / host / disk",
    "device MiB: adapters + KV; together",
    "host MiB",
    "over budget",
    "engine's RSS MiB (since its start)",
    "not answered",
    "runs",
]


@dataclass(slots=True)
class Bench:
    """The two servers, and what they're measured with."""

    options: argparse.Namespace
    model: Path
    adapters: Adapters
    vocab: int

    async def turn(self, server: Server, num_adapters: int, seed: int) -> Turn:
        stream = zipf_stream(
            self.options.requests, num_adapters, len(self.adapters.ranks), seed, exponent=EXPONENT, **LENGTHS
        )
        async with Asker(server.url, server.key, self.vocab) as asker:
            with Watch(server) as watch:
                answers = await asker.closed_loop(stream, CONCURRENCY)
        summary = Summary.of(answers)
        if summary.errors:
            say(f"  {summary.num_failed} requests failed: {summary.errors}")
        return Turn(summary, watch.seen, watch.hits())

    async def warm(self, server: Server, num_adapters: int) -> None:
        """The popular adapters are where they'll be in the measured stream."""
        count = min(max(200, 2 * num_adapters), self.options.warm_requests)
        short = zipf_stream(count, num_adapters, len(self.adapters.ranks), 1, exponent=EXPONENT, **WARMING)
        real = zipf_stream(CONCURRENCY, num_adapters, len(self.adapters.ranks), 2, exponent=EXPONENT, **LENGTHS)
        async with Asker(server.url, server.key, self.vocab) as asker:
            await asker.closed_loop(short, CONCURRENCY)
            await asker.closed_loop(real, CONCURRENCY)

    def push(self, server: Server, count: int) -> Pushed:
        return asyncio.run(push(server.url, server.key, range(count), self.adapters.name, self.adapters.files))

    def register(self, server: Server, first: int, end: int) -> float:
        """Adapters `first` to `end` are registered; the seconds that took."""
        arguments: list[str | int | Path] = [server.data, "--model", self.model, "--size", self.options.size]
        arguments += ["--quantize", self.options.quantize, "--targets", TARGETS]
        arguments += ["--ranks", ",".join(map(str, self.adapters.ranks)), "--first", first, "--count", end - first]
        return float(last_line(module("registering", *arguments))["wall_s"])


def budget_flags(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the server's memory flags: those asked for, or too little for all adapters."""
    device, host = BUDGETS[options.size]
    host = QUICK_HOST_CACHE if options.quick else host
    return ("--memory-budget", options.memory_budget or device, "--host-cache", options.host_cache or host)


def run(options: argparse.Namespace) -> tuple[list[Point], Pushed, float]:
    """The points by number of adapters, what uploads over the API took, and the seconds that
    registering the others took.
    """
    size = SIZES[options.size]
    bench = Bench(options, make_base(options.size), Adapters(size, targets=(TARGETS,)), size.vocab)
    flags = budget_flags(options)
    counts = [int(count) for count in options.counts.split(",")]
    points, register_s, seed = [], 0.0, 100
    with ExitStack() as stack:
        say("starting two servers …")
        few = stack.enter_context(serve(bench.model, options.quantize, flags=flags))
        many = stack.enter_context(serve(bench.model, options.quantize, flags=flags))
        rss = {server.url: engine_process(server).memory_info().rss for server in (few, many)}
        say(f"pushing {counts[0]} adapters to one, registering them with the other …")
        pushed = bench.push(few, counts[0])
        register_s += bench.register(many, 0, counts[0])
        asyncio.run(bench.warm(few, counts[0]))
        first = Point(counts[0], rss_before_bytes=rss[few.url])
        points.append(first)
        for before, count in itertools.pairwise(counts):
            say(f"registering adapters {before:,} to {count:,} …")
            register_s += bench.register(many, before, count)
            asyncio.run(bench.warm(many, count))
            point = Point(count, rss_before_bytes=rss[many.url])
            for number in range(options.repeat):
                seed += 1
                pair = [(few, counts[0], point.peers), (many, count, point.turns)]
                # whose turn is first alternates: a machine that becomes slower all the while
                # favours neither
                for server, num_adapters, turns in pair if number % 2 == 0 else reversed(pair):
                    turns.append(asyncio.run(bench.turn(server, num_adapters, seed)))
            say(f"  {count:,}: {point.turns[-1].summary.tokens_per_s:.1f} tokens/s, {point.ratio:.3f} of ten's")
            first.turns += point.peers
            first.peers += point.peers
            points.append(point)
    return points, pushed, register_s


def text(options: argparse.Namespace, points: list[Point], pushed: Pushed, register_s: float) -> str:
    size, num_registered = SIZES[options.size], points[-1].num_adapters
    adapters = Adapters(size, targets=(TARGETS,))
    mean_mib = statistics.mean(adapters.num_bytes(i) for i in range(len(adapters.ranks))) / 2**20
    upload_s = percentile(pushed.upload_s, 50)
    return f"""Size {options.size}, base {options.quantize}; adapters of ranks {", ".join(map(str, adapters.ranks))} \
on {TARGETS} ({mean_mib:.1f} MiB on average, {num_registered * mean_mib:,.0f} MiB all {num_registered:,}); \
{options.requests} requests a turn, {CONCURRENCY} at a time, {LENGTHS["prompt_tokens"][0]} to \
{LENGTHS["prompt_tokens"][1] - 1} tokens in and as many out, greedy, streamed; popularity by Zipf's law, exponent \
{EXPONENT:g}, within each rank.

{figures.table(HEADER, [point.row() for point in points])}

- tokens/s: the best turn; all are in the last column. To 10: the median over turns of the same stream, one after the \
other, with the server that has {points[0].num_adapters} registered.
- CPU: of the engine's process on all cores; others on the machine change it less than the time on the clock.
- Found: where a request's adapter was when it came. Device, host: the largest of samples every quarter of a second, \
of what adapters and KV together, or the host cache, may hold.
- Over the API: {len(pushed.upload_s)} uploads with their certificates ({dict(pushed.parity) or "none made"}) took \
{pushed.wall_s:.1f} s, {upload_s:.2f} s each at the median with 8 at a time; at that rate {num_registered:,} take \
{pushed.wall_s / max(1, len(pushed.upload_s)) * num_registered / 60:.0f} minutes. Without certificates, the \
{num_registered:,} of the other server were registered in {register_s:.0f} s.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(BUDGETS))
    parser.add_argument("--quick", action="store_true", help="10, 100 and 400 adapters, one short turn of each")
    parser.add_argument("--counts", help="numbers of adapters, rising (default: 10,100,1000,5000)")
    parser.add_argument("--requests", type=int, help="of a turn (default: 160)")
    parser.add_argument("--warm-requests", type=int, help="short ones before a point, at most (default: 4000)")
    parser.add_argument("--repeat", type=int, help="turns of each point (default: 7)")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--memory-budget", help="the device's")
    parser.add_argument("--host-cache")
    options = parser.parse_args(arguments)
    usual = ("10,100,400", 48, 200, 1) if options.quick else ("10,100,1000,5000", 160, 4000, 7)
    for name, value in zip(("counts", "requests", "warm_requests", "repeat"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    points, pushed, register_s = run(options)
    page = text(options, points, pushed, register_s)
    reporting.finish(
        "registered",
        "Tokens a second by registered adapters",
        page,
        machine,
        options,
        arguments,
        points=points,
        pushed=pushed.as_dict(),
    )


if __name__ == "__main__":
    main()
