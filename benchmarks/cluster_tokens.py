"""What a cluster's way costs a streamed token: one server, and a cluster with one replica.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, reporting
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, make_base, say, serve
from benchmarks.token_costs import PROMPT_TOKENS, Stream, processor_s

SIZE = "tiny"
STREAMS = (1, 8, 32)
SERVER, CLUSTER, OTHER = "one server", "a cluster of one replica", "the other tree's cluster"
FLAGS = ("--memory-budget", "256MiB", "--host-cache", "64MiB", "--speculation", "off", "--max-num-seqs", "64")
CLUSTER_FLAGS = ("--replicas", "1", "--cpus-per-replica", "0.5")
KINDS = {
    "engine": b"loraserve.engine.worker.main",
    "replica": b"ray::ServeReplica:loraserve:engine",
    "ingress": b"ray::ServeReplica:loraserve:ingress",
    "Serve's proxy": b"ray::ProxyActor",
    "server": b"loraserve.cli.main serve",
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
    children: dict[int, list[int]] = {}
    commands: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = dict.fromkeys((*KINDS, OTHERS), 0.0), [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        kind = next((kind for kind, text in KINDS.items() if text in commands.get(one, b"")), OTHERS)
        with contextlib.suppress(OSError):
            found[kind] += processor_s(one)
    return found


async def turn(server: Server, num_streams: int, num_tokens: int) -> Turn:
    fields = {"model": "base", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    vocab = SIZES[SIZE].vocab
    streams = []
    for number in range(num_streams):
        prompt = [(7 * number + 11 * place) % (vocab - 10) + 10 for place in range(PROMPT_TOKENS)]
        streams.append(Stream(server.url, server.key, fields | {"prompt": prompt}, "/v1/completions"))
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


@contextlib.contextmanager
def importing(tree: str) -> Iterator[None]:
    """Let what starts meanwhile import another tree."""
    os.environ["PYTHONPATH"] = str(Path(tree).resolve())
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]


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
