"""Processor time that a streamed token costs beside the forward pass: the server's, and that of the
engine's main thread.

    python -m benchmarks.token_costs                        # 1, 8 and 32 streams
    python -m benchmarks.token_costs --beside OTHER         # alternating turns with another tree

Streams of one length start together, over plain sockets. From the moment when each has begun until
the last one ends, the processor time of the server's process and of the engine's main thread is
read from the system and divided by the tokens that came meanwhile. Processor time moves less than
wall time with what else is on the machine. On the tiny base most of the engine's time is what
surrounds the forward pass, which is why it is the default. The engine sleeps between two of its
steps, as if they took as long as a larger base's: otherwise a server on a busy machine falls
behind, and joins the tokens of several steps, which costs less a token. What a server without
requests takes in the same time is subtracted.
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
from typing import Any
from urllib.parse import urlsplit

from benchmarks import reporting
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, make_base, say, serve

STREAMS = (1, 8, 32)
PROMPT_TOKENS = 8
RECEIVE_BYTES = 1 << 16
_IDLE_S = 5.0
_EVENT = b"data: {"


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of a turn, in µs a token."""

    server_us: float
    engine_us: float
    """Time of the engine's main thread, forward pass included."""
    tokens_per_chunk: float
    """More than one where the server fell behind the engine, and joined the tokens of steps."""


class Stream:
    """One streamed answer over a socket of its own."""

    def __init__(self, url: str, key: str, body: dict[str, Any], path: str) -> None:
        self.num_chunks = 0
        self.has_begun = asyncio.Event()
        self._url, self._key, self._body, self._path = urlsplit(url), key, body, path

    async def run(self) -> None:
        """Read to the end.

        Raises:
            SystemExit: the answer is an error, or has one.
        """
        data = json.dumps(self._body).encode()
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._key}\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        last = b""
        while more := await reader.read(RECEIVE_BYTES):
            self.num_chunks += more.count(_EVENT)
            if self.num_chunks:
                self.has_begun.set()
            last = (last + more)[-1000:]
        writer.close()
        if b"data: [DONE]" not in last or b'"error"' in last:
            raise SystemExit(f"a stream ended with {last.decode(errors='replace')!r}")


def processor_s(pid: int, thread: int | None = None) -> float:
    """Return the seconds that the process, or one thread of it, has had of the processors."""
    if thread is not None:
        return _scheduled_s(Path(f"/proc/{pid}/task/{thread}"))
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += _scheduled_s(task)
    return total


def _scheduled_s(task: Path) -> float:
    # nanoseconds; `stat` counts hundredths of a second
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def engine_pid(server_pid: int) -> int:
    """Return the process id of the server's engine."""
    for task in Path(f"/proc/{server_pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"loraserve.engine.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise SystemExit("the server has no engine")


def idle_share(pid: int) -> float:
    """Return the part of a processor that a server without requests takes."""
    before, began = processor_s(pid), time.monotonic()
    time.sleep(_IDLE_S)
    return (processor_s(pid) - before) / (time.monotonic() - began)


def make_streams(
    server: Server, num_streams: int, num_tokens: int, *, vocab: int, is_chat: bool = False
) -> list[Stream]:
    """Return so many streams of so many tokens each, with different prompts."""
    fields = {"model": "base", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    streams = []
    for number in range(num_streams):
        prompt = [(7 * number + 11 * place) % (vocab - 10) + 10 for place in range(PROMPT_TOKENS)]
        asked = {"messages": [{"role": "user", "content": f"Say {number}"}]} if is_chat else {"prompt": prompt}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        streams.append(Stream(server.url, server.key, fields | asked, path))
    return streams


async def turn(
    server: Server, num_streams: int, num_tokens: int, *, is_chat: bool, vocab: int, idle: float = 0.0
) -> Cost:
    """Measure so many streams of so many tokens each.

    Args:
        idle: the part of a processor that the server takes without them.
    """
    engine = engine_pid(server.pid)
    streams = make_streams(server, num_streams, num_tokens, vocab=vocab, is_chat=is_chat)
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
    num_before = sum(stream.num_chunks for stream in streams)
    before = processor_s(server.pid), processor_s(engine, engine)
    began = time.monotonic()
    await asyncio.gather(*tasks)
    after = processor_s(server.pid), processor_s(engine, engine)
    idle_s = idle * (time.monotonic() - began)
    num_chunks = sum(stream.num_chunks for stream in streams)
    # tokens before the first reading: as many as a chunk has on average
    per_chunk = num_streams * num_tokens / num_chunks
    measured = num_streams * num_tokens - num_before * per_chunk
    return Cost(
        server_us=1e6 * (after[0] - before[0] - idle_s) / measured,
        engine_us=1e6 * (after[1] - before[1]) / measured,
        tokens_per_chunk=per_chunk,
    )


@contextlib.contextmanager
def importing(tree: str | None, pause_s: float | None = None) -> Iterator[None]:
    """Let servers that start meanwhile import another tree, and their engines pause."""
    before = dict(os.environ)
    if pause_s is not None:
        os.environ["LORASERVE_FAULTS"] = f"engine.after_outputs=delay:{pause_s}"
    if tree is not None:
        # servers run in folders of their own
        os.environ["PYTHONPATH"] = str(Path(tree).resolve())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(options: argparse.Namespace, streams: Sequence[int]) -> dict[str, dict[int, list[Cost]]]:
    """Costs by tree and number of streams, turns alternating."""
    trees = {"this": None} | ({"other": options.beside} if options.beside is not None else {})
    costs: dict[str, dict[int, list[Cost]]] = {name: {count: [] for count in streams} for name in trees}
    model = make_base(options.size) if options.model is None else Path(options.model)
    vocab = SIZES[options.size].vocab
    flags = ("--memory-budget", "1GiB", "--host-cache", "64MiB", "--speculation", "off")
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, tree in trees.items():
            say(f"starting {name} …")
            with importing(tree, options.pause_s):
                servers[name] = stack.enter_context(serve(model, options.quantize, flags=flags))
        idle = {name: idle_share(server.pid) for name, server in servers.items()}
        say(f"processor's part without requests: {idle}")
        for number in range(-1, options.turns):
            for count in streams:
                for name, server in servers.items():
                    work = turn(server, count, options.tokens, is_chat=options.chat, vocab=vocab, idle=idle[name])
                    cost = asyncio.run(work)
                    # the first round warms up
                    if number >= 0:
                        costs[name][count].append(cost)
                        say(f"{name} {count}: {cost}")
    return costs


def table(costs: dict[str, dict[int, list[Cost]]]) -> str:
    """Medians, a row for each number of streams and tree."""
    lines = ["| streams | tree | server, µs a token | engine's main thread, µs a token | tokens a chunk |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for count in next(iter(costs.values())):
        for name, by_count in costs.items():
            medians = [
                statistics.median(getattr(cost, field) for cost in by_count[count])
                for field in ("server_us", "engine_us", "tokens_per_chunk")
            ]
            lines.append(f"| {count} | {name} | {medians[0]:.1f} | {medians[1]:.1f} | {medians[2]:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES))
    parser.add_argument("--model", help="the folder of a base of that size that is there already")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--tokens", type=int, default=256, help="the length of each answer")
    parser.add_argument("--pause-s", type=float, default=0.01, help="seconds between two steps")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--chat", action="store_true", help="chats in place of completions")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--beside", help="a folder that another tree's packages are imported from (its .editable)")
    options = parser.parse_args(arguments)
    options.turns = 2 if options.quick else options.turns
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    costs = measure(options, options.streams)
    reporting.finish(
        "token_costs",
        "Processor time of a streamed token",
        table(costs) + "\n",
        machine,
        options,
        arguments,
        costs={name: {str(count): turns for count, turns in by.items()} for name, by in costs.items()},
    )


if __name__ == "__main__":
    main()
