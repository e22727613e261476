"""What open consoles cost a server: tokens a second and the time of a token of 32 streams over
thousands of registered adapters, with no console, with one and with eight.

    python -m benchmarks.console              # 5,000 adapters, ten turns of each: about 14 minutes
    python -m benchmarks.console --quick      # 400 adapters, two short turns of each

The streams run all along, each asking for the next adapter (by Zipf's law) when its answer has
ended; consoles are opened and closed beside them (`benchmarks.consoles`), and a turn begins once
they have loaded everything. Turns alternate, and each is compared with the mean of the two turns
without a console before and after it: others may share the machine. What opening costs is a figure
of its own. Tokens are the server's own count; gaps are between the arrivals of a stream's pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks import figures, reporting
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, last_line, make_base, module, say, serve
from benchmarks.synthetic import Adapters
from benchmarks.token_costs import engine_pid, processor_s
from benchmarks.traffic import Ask, zipf_stream

BUDGETS = {"tiny": ("64MiB", "4MiB"), "S": ("512MiB", "512MiB")}
TARGETS = "q_proj"
CONSOLES = (1, 8)
EXPONENT = 1.0
PROMPT_TOKENS = 16
WARM_S = 10.0
BOUND = 0.01


@dataclass(slots=True)
class Turn:
    """One stretch of time with so many consoles.

    Attributes:
        asked: what the consoles were answered in it.
    """

    num_consoles: int
    wall_s: float
    tokens: int
    server_cpu_s: float
    engine_cpu_s: float
    gaps_s: list[float]
    asked: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def server_s_per_token(self) -> float:
        """The server's process's processor time; without consoles it goes with the tokens."""
        return self.server_cpu_s / self.tokens

    def as_dict(self) -> dict[str, Any]:
        gaps = {f"gap_p{p}_s": figures.percentile(self.gaps_s, p) for p in (50, 95, 99)}
        names = ("num_consoles", "wall_s", "tokens", "server_cpu_s", "engine_cpu_s", "asked")
        return {name: getattr(self, name) for name in names} | gaps


@dataclass(slots=True)
class Streams:
    """Streamed answers, so many at a time, one after the other until they are stopped."""

    url: str
    key: str
    vocab: int
    asks: list[Ask]
    gaps_s: list[float] = field(default_factory=list)

    async def keep(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await self._answer(self.asks.pop())

    async def _answer(self, ask: Ask) -> None:
        """Read one answer to its end.

        Raises:
            SystemExit: it is an error, or has one.
        """
        url = urlsplit(self.url)
        body = {"model": Adapters.name(ask.adapter), "prompt": ask.prompt(self.vocab), "stream": True}
        body |= {"max_tokens": ask.num_output_tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self.key}\r\n"
        head += f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        last, before = b"", None
        while more := await reader.read(1 << 16):
            if b"data: {" in more:
                now = time.perf_counter()
                if before is not None:
                    self.gaps_s.append(now - before)
                before = now
            last = (last + more)[-1000:]
        writer.close()
        if b"data: [DONE]" not in last or b'"error"' in last:
            raise SystemExit(f"a stream ended with {last.decode(errors='replace')!r}")


class Consoles:
    """The process that has the pages open."""

    def __init__(self, server: Server) -> None:
        os.environ["LORASERVE_API_KEY"] = server.admin_key
        self._process: subprocess.Popen[str] = module("consoles", server.url, is_asked=True)

    async def tell(self, line: str) -> dict[str, int]:
        return await asyncio.to_thread(self._tell, line)

    def _tell(self, line: str) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline() or '{"": 1}')
        if "" in answer:
            raise SystemExit("the consoles' process ended")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass(slots=True)
class Found:
    """All turns, in order, and the processor's time of opening so many consoles."""

    turns: list[Turn] = field(default_factory=list)
    opening_cpu_s: dict[int, list[float]] = field(default_factory=dict)

    def ratios(self, count: int, of: str) -> list[float]:
        """Each turn of so many consoles to the turns without one around it."""
        found = []
        for before, turn, after in zip(self.turns, self.turns[1:], self.turns[2:], strict=False):
            if turn.num_consoles == count:
                without = (getattr(before, of) + getattr(after, of)) / 2
                found.append(getattr(turn, of) / without)
        return found

    def extra(self, count: int) -> list[float]:
        """The part of one core that the server's process takes for so many consoles: what is more
        than the turns around it took for as many tokens.
        """
        found = []
        for before, turn, after in zip(self.turns, self.turns[1:], self.turns[2:], strict=False):
            if turn.num_consoles == count:
                without = (before.server_cpu_s + after.server_cpu_s) / (before.tokens + after.tokens) * turn.tokens
                found.append((turn.server_cpu_s - without) / turn.wall_s)
        return found

    def of(self, count: int) -> list[Turn]:
        return [turn for turn in self.turns if turn.num_consoles == count]


async def measure(server: Server, options: argparse.Namespace, num_ranks: int) -> Found:
    """Turns of no console, one, none, eight, none, one …"""
    vocab = SIZES[options.size].vocab
    lengths = {"prompt_tokens": (PROMPT_TOKENS, PROMPT_TOKENS + 1), "output_tokens": (128, 257)}
    asks = zipf_stream(20_000, options.adapters, num_ranks, 1, exponent=EXPONENT, **lengths)
    streams, found = Streams(server.url, server.key, vocab, asks), Found()
    engine = engine_pid(server.pid)
    consoles = Consoles(server)
    running = asyncio.create_task(streams.keep(options.streams))

    async def tokens() -> int:
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        answer = await client.get(f"{server.url}/api/v1/live?once=true", headers=headers)
        return int(answer.raise_for_status().json()["completion_tokens"])

    async def turn(count: int) -> None:
        cpu_s = processor_s(server.pid)
        if count:
            await consoles.tell(f"open {count}")
            found.opening_cpu_s.setdefault(count, []).append(processor_s(server.pid) - cpu_s)
        await asyncio.sleep(options.pause_s)
        streams.gaps_s.clear()
        if running.done():
            await running
        before, began = await tokens(), time.perf_counter()
        cpu_s, engine_cpu_s = processor_s(server.pid), processor_s(engine)
        await asyncio.sleep(options.turn_s)
        after, ended = await tokens(), time.perf_counter()
        cpu_s, engine_cpu_s = processor_s(server.pid) - cpu_s, processor_s(engine) - engine_cpu_s
        gaps = list(streams.gaps_s)
        asked = await consoles.tell("close") if count else {}
        taken = Turn(count, ended - began, after - before, cpu_s, engine_cpu_s, gaps, asked)
        found.turns.append(taken)
        say(f"  {count} consoles: {taken.tokens_per_s:.1f} tokens/s, {1e6 * taken.server_s_per_token:.0f} µs a token")

    async with httpx2.AsyncClient(timeout=60) as client:
        try:
            await asyncio.sleep(options.warm_s)
            await turn(0)
            for _ in range(options.turns):
                for count in CONSOLES:
                    await turn(count)
                    await turn(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            consoles.close()
    return found


def interval(values: Sequence[float], digits: int = 4) -> str:
    """The mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


HEADER = [
    *("consoles", "tokens/s", "to none", "server's CPU µs a token", "for the consoles, % of a core"),
    *("gap p50 ms", "p95", "p99", "asked in a turn"),
]


def rows(found: Found) -> list[list[str]]:
    table = []
    for count in (0, *CONSOLES):
        turns = found.of(count)
        gaps = [gap for turn in turns for gap in turn.gaps_s]
        asked = {
            name: statistics.mean(turn.asked.get(name, 0) for turn in turns)
            for name in ("figures", "tiers", "everything", "scrapes")
        }
        table.append(
            [
                str(count),
                f"{statistics.mean(turn.tokens_per_s for turn in turns):.1f}",
                interval(found.ratios(count, "tokens_per_s")) if count else "1",
                f"{1e6 * statistics.mean(turn.server_s_per_token for turn in turns):.0f}",
                interval([100 * part for part in found.extra(count)], digits=2) if count else "0",
                *(figures.ms(figures.percentile(gaps, percent)) for percent in (50, 95, 99)),
                ", ".join(f"{number:.1f} {name}" for name, number in asked.items()) if count else "–",
            ]
        )
    return table


def text(options: argparse.Namespace, found: Found) -> str:
    cores = os.cpu_count() or 1
    shares = {n: statistics.mean(found.extra(n)) for n in CONSOLES}
    opened = {n: statistics.mean(values) for n, values in found.opening_cpu_s.items()}
    return f"""Size {options.size}, base {options.quantize}, {options.adapters:,} registered adapters on {TARGETS}, \
{options.streams} streams all along (popularity by Zipf's law, exponent {EXPONENT:g}), turns of {options.turn_s:g} s, \
{options.turns} with each number of consoles.

{figures.table(HEADER, rows(found))}

- To none: the mean of each turn's ratio to the two turns without a console around it, ± its standard error.
- For the consoles: the server's processor time beyond what the turns around took for as many tokens, ± its standard \
error. One takes {100 * shares[1] / cores:.2f} % of the {cores} cores, eight take {100 * shares[8] / cores:.2f} %. \
Unlike tokens/s it hardly depends on what else the machine does.
- Opening {" and ".join(f"{n} takes {opened[n]:.2f} s" for n in CONSOLES)} of the server's processor time, while the \
page loads every version.
- Asked in a turn: events of `/api/v1/live`, answers of `/api/v1/residency/tiers`, pages of 200 rows of \
`/api/v1/residency`, scrapes of `/metrics`.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(BUDGETS))
    parser.add_argument("--quick", action="store_true", help="400 adapters, two turns of 6 s")
    parser.add_argument("--adapters", type=int, help="registered (default: 5,000)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--turns", type=int, help="with each number of consoles (default: 10)")
    parser.add_argument("--turn-s", type=float, help="length of a turn (default: 15)")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between opening and a turn")
    parser.add_argument("--warm-s", type=float, default=WARM_S, help="before the first turn")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    options = parser.parse_args(arguments)
    usual = (400, 2, 6.0) if options.quick else (5000, 10, 15.0)
    for name, value in zip(("adapters", "turns", "turn_s"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    model, adapters = make_base(options.size), Adapters(SIZES[options.size], targets=(TARGETS,))
    device, host = BUDGETS[options.size]
    say("starting a server …")
    flags = ("--memory-budget", device, "--host-cache", host, "--speculation", "off")
    with serve(model, options.quantize, flags=flags) as server:
        say(f"registering {options.adapters:,} adapters …")
        words: list[str | int | Path] = [server.data, "--model", model, "--size", options.size]
        words += ["--quantize", options.quantize, "--targets", TARGETS, "--count", options.adapters]
        last_line(module("registering", *words))
        found = asyncio.run(measure(server, options, len(adapters.ranks)))
    page = text(options, found)
    numbers = {"turns": [turn.as_dict() for turn in found.turns], "opening_cpu_s": found.opening_cpu_s}
    reporting.finish("console", "What open consoles cost", page, machine, options, arguments, **numbers)


if __name__ == "__main__":
    main()
