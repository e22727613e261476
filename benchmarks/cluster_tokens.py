"""Cost of a streamed token's way through a cluster of one replica, beside one server.

    python -m benchmarks.cluster_tokens                    # 1, 8 and 32 streams
    python -m benchmarks.cluster_tokens --beside OTHER     # also another tree's cluster

The same streams in alternating turns, over plain sockets: tokens a second, and the processor time
of each kind of process, divided by the tokens. On the tiny base a step is short, so that what is
around it shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks import figures, reporting
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, make_base, say, serve
from benchmarks.token_costs import importing, make_streams, processor_s

SIZE = "tiny"
STREAMS = (1, 8, 32)
SERVER, CLUSTER, OTHER = "one server", "a cluster of one replica", "the other tree's cluster"
FLAGS = ("--memory-budget", "256MiB", "--host-cache", "64MiB", "--speculation", "off", "--max-num-seqs", "64")
CLUSTER_FLAGS = ("--replicas", "1", "--cpus-per-replica", "0.5")
KINDS = {
    "engine": "loraserve.engine.worker.main",
    "replica": "ray::ServeReplica:loraserve:engine",
    "ingress": "ray::ServeReplica:loraserve:ingress",
    "Serve's proxy": "ray::ProxyActor",
    "server": "loraserve.cli.main serve",
}
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Turn:
    """One burst of streams.

    Attributes:
        costs: processor time by kind of process, in µs a token.
        tokens_per_chunk: more than one where the way is behind the engine, and joins tokens.
    """

    tokens_per_s: float
    costs: dict[str, float]
    tokens_per_chunk: float


def processors_s(pid: int) -> dict[str, float]:
    """Return the seconds that a process and its descendants have had of the processors, by kind."""
    found = dict.fromkeys((*KINDS, OTHERS), 0.0)
    root = psutil.Process(pid)
    for one in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(one.cmdline())
            kind = next((kind for kind, text in KINDS.items() if text in command), OTHERS)
            found[kind] += processor_s(one.pid)
    return found


async def turn(server: Server, num_streams: int, num_tokens: int) -> Turn:
    streams = make_streams(server, num_streams, num_tokens, vocab=SIZES[SIZE].vocab)
    before, began = processors_s(server.pid), time.monotonic()
    await asyncio.gather(*(stream.run() for stream in streams))
    took_s = time.monotonic() - began
    spent = {kind: seconds - before[kind] for kind, seconds in processors_s(server.pid).items()}
    total = num_streams * num_tokens
    return Turn(
        total / took_s,
        {kind: 1e6 * seconds / total for kind, seconds in spent.items()},
        total / sum(stream.num_chunks for stream in streams),
    )


def measure(options: argparse.Namespace) -> dict[str, dict[int, list[Turn]]]:
    """Return the turns by what served them and the number of streams, without the first round."""
    model = make_base(SIZE)
    with contextlib.ExitStack() as stack:

        def start(words: Sequence[str], flags: Sequence[str]) -> Server:
            return stack.enter_context(serve(model, "none", flags=flags, words=words))

        say("starting …")
        servers = {SERVER: start(("serve",), FLAGS), CLUSTER: start(("cluster", "up"), (*FLAGS, *CLUSTER_FLAGS))}
        if options.beside is not None:
            with importing(options.beside):
                servers[OTHER] = start(("cluster", "up"), (*FLAGS, *CLUSTER_FLAGS))
        turns: dict[str, dict[int, list[Turn]]] = {name: {count: [] for count in STREAMS} for name in servers}
        for number in range(-1, options.turns):
            for count in STREAMS:
                for name, server in servers.items():
                    found = asyncio.run(turn(server, count, options.tokens))
                    # the first round warms up
                    if number >= 0:
                        turns[name][count].append(found)
                        say(f"{name}, {count} streams: {found.tokens_per_s:.0f} tokens/s, {json.dumps(found.costs)}")
    return turns


def table(turns: dict[str, dict[int, list[Turn]]]) -> str:
    """Medians, a row for each number of streams and what served them."""
    header = [
        "streams",
        "",
        "tokens/s ÷ one server's",
        "µs a token: engine",
        "others",
        "of which",
        "tokens a chunk",
    ]
    rows = []
    for count in STREAMS:
        for name, by_count in turns.items():
            found = by_count[count]
            ratio = statistics.median(
                one.tokens_per_s / server.tokens_per_s for one, server in zip(found, turns[SERVER][count], strict=True)
            )
            costs = {kind: statistics.median(one.costs[kind] for one in found) for kind in found[0].costs}
            engine = costs.pop("engine")
            parts = ", ".join(f"{kind} {cost:.0f}" for kind, cost in costs.items() if cost >= 1)
            joined = statistics.median(one.tokens_per_chunk for one in found)
            cells = [figures.number(ratio, 2), f"{engine:.0f}", f"{sum(costs.values()):.0f}", parts]
            rows.append([str(count), name, *cells, figures.number(joined, 2)])
    return figures.table(header, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="the length of each answer")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--beside", help="a folder that another tree's packages are imported from (its .editable)")
    options = parser.parse_args(arguments)
    options.turns, options.size = 2 if options.quick else options.turns, SIZE
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    turns = measure(options)
    reporting.finish(
        "cluster_tokens",
        "A streamed token's way through a cluster",
        table(turns) + "\n",
        machine,
        options,
        arguments,
        turns={name: {str(count): found for count, found in by.items()} for name, by in turns.items()},
    )


if __name__ == "__main__":
    main()
