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

Afterwards the functions are counted that a token of a lone stream passes in the server's process:
those of ours that are called once for at least nine of ten chunks between the first and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
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
_CALL_COUNTING = Path(__file__).resolve().parent / "call_counting"
_NUM_UNCOUNTED = 16
"""Chunks at the beginning of a stream whose calls aren't counted."""
_COUNTED_PART = 0.75
"""Part of a stream's tokens, of which some have no chunk, after which no calls are counted."""
_COUNTS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of a turn, in µs a token."""

    server_us: float
    engine_us: float
    """Time of the engine's main thread, forward pass included."""
    tokens_per_chunk: float
    """More than one where the server fell behind the engine, and joined the tokens of steps."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """Functions that a streamed token passes in the server's process, ordered by file."""

    functions: tuple[str, ...]
    """As ``file: function``, each with its calls a token."""
    num_files: int


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


async def token_path(
    server: Server, folder: Path, num_tokens: int, *, is_chat: bool, vocab: int, min_calls: float = 0.9
) -> TokenPath:
    """Find the functions that a token of a lone stream passes in the server's process.

    Args:
        folder: where the server writes its counts.
        min_calls: calls a chunk that a function on its way has at least.

    Raises:
        SystemExit: the server counts nothing.
    """
    [stream] = make_streams(server, 1, num_tokens, vocab=vocab, is_chat=is_chat)
    task = asyncio.create_task(stream.run())
    counts = folder / f"{server.pid}.json"
    num_before = await _reach(stream, task, _NUM_UNCOUNTED)
    os.kill(server.pid, signal.SIGUSR2)
    num_counted = await _reach(stream, task, int(_COUNTED_PART * num_tokens)) - num_before
    os.kill(server.pid, signal.SIGUSR2)
    await task
    ends_at = time.monotonic() + _COUNTS_TIMEOUT_S
    while not counts.exists():
        if time.monotonic() > ends_at:
            raise SystemExit(f"the server wrote no counts to {counts} within {_COUNTS_TIMEOUT_S:g} s")
        await asyncio.sleep(0.01)
    calls = [(_own_file(file), name, count / num_counted) for file, name, count in json.loads(counts.read_text())]
    passed = sorted((file, name, count) for file, name, count in calls if file and count >= min_calls)
    functions = tuple(f"{file}: {name} {count:.1f}" for file, name, count in passed)
    return TokenPath(functions, len({file for file, _, _ in passed}))


async def _reach(stream: Stream, task: asyncio.Task[None], num_chunks: int) -> int:
    """Wait until the stream has had that many chunks; return how many it has had.

    Raises:
        SystemExit: it ended before.
    """
    while stream.num_chunks < num_chunks:
        if task.done():
            await task
            raise SystemExit(f"a stream ended after {stream.num_chunks} chunks, expected {num_chunks} and more")
        await asyncio.sleep(0.001)
    return stream.num_chunks


def _own_file(path: str) -> str:
    """The file's path in our package; empty if it's in another one."""
    _, package, file = path.rpartition("/loraserve/")
    return file if package and "site-packages" not in path else ""


@contextlib.contextmanager
def importing(tree: str | None, pause_s: float | None = None, counts: Path | None = None) -> Iterator[None]:
    """Let servers that start meanwhile import another tree, and their engines pause.

    Args:
        counts: the folder in which they count calls on SIGUSR2.
    """
    before = dict(os.environ)
    if pause_s is not None:
        os.environ["LORASERVE_FAULTS"] = f"engine.after_outputs=delay:{pause_s}"
    # servers run in folders of their own
    paths = [] if tree is None else [str(Path(tree).resolve())]
    if counts is not None:
        os.environ["CALL_COUNTS_DIR"] = str(counts)
        paths.append(str(_CALL_COUNTING))
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [before.get("PYTHONPATH")])])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(
    options: argparse.Namespace, streams: Sequence[int]
) -> tuple[dict[str, dict[int, list[Cost]]], dict[str, TokenPath]]:
    """Costs by tree and number of streams, turns alternating; then a token's path by tree."""
    trees = {"this": None} | ({"other": options.beside} if options.beside is not None else {})
    costs: dict[str, dict[int, list[Cost]]] = {name: {count: [] for count in streams} for name in trees}
    model = make_base(options.size) if options.model is None else Path(options.model)
    vocab = SIZES[options.size].vocab
    flags = ("--memory-budget", "1GiB", "--host-cache", "64MiB", "--speculation", "off")
    with contextlib.ExitStack() as stack:
        servers = {}
        counts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraserve-bench-")))
        for name, tree in trees.items():
            say(f"starting {name} …")
            with importing(tree, options.pause_s, counts):
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
        paths = {
            name: asyncio.run(token_path(server, counts, options.tokens, is_chat=options.chat, vocab=vocab))
            for name, server in servers.items()
        }
    return costs, paths


def table(costs: dict[str, dict[int, list[Cost]]], paths: dict[str, TokenPath]) -> str:
    """Medians, a row for each number of streams and tree; then each tree's path of a token."""
    lines = ["| streams | tree | server, µs a token | engine's main thread, µs a token | tokens a chunk |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for count in next(iter(costs.values())):
        for name, by_count in costs.items():
            medians = [
                statistics.median(getattr(cost, field) for cost in by_count[count])
                for field in ("server_us", "engine_us", "tokens_per_chunk")
            ]
            lines.append(f"| {count} | {name} | {medians[0]:.1f} | {medians[1]:.1f} | {medians[2]:.2f} |")
    lines += ["", "| tree | functions of a streamed token | in files |", "| --- | --- | --- |"]
    lines += [f"| {name} | {len(path.functions)} | {path.num_files} |" for name, path in paths.items()]
    for name, path in paths.items():
        lines += ["", f"Functions of {name} tree, with calls a token:", *(f"- {each}" for each in path.functions)]
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
    costs, paths = measure(options, options.streams)
    reporting.finish(
        "token_costs",
        "Processor time of a streamed token",
        table(costs, paths) + "\n",
        machine,
        options,
        arguments,
        costs={name: {str(count): turns for count, turns in by.items()} for name, by in costs.items()},
        paths=paths,
    )


if __name__ == "__main__":
    main()
