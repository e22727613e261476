"""Measure a quiet tenant's time to first token, alone and beside one that sends 20 times as much.

    python -m benchmarks.fairness                # two rounds: about five minutes on two cores
    python -m benchmarks.fairness --quick        # one short round: about a minute

The quiet tenant's requests come at random (Poisson's arrivals) at a rate that the server has room
for; the noisy tenant's, in the same way and of the same lengths, at twenty times that rate, which
is more than the server can do. In each round the same times and lengths are asked first alone, then
beside the noisy tenant's. The noisy tenant has several adapters, the quiet one has one. The noisy
tenant is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import figures, reporting
from benchmarks.asking import Answer, Asker
from benchmarks.figures import percentile
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, last_line, make_base, module, say, serve
from benchmarks.synthetic import Adapters
from benchmarks.traffic import Ask, slora_trace
from loraserve import Client

FOLD = 20
NUM_ADAPTERS = 8
"""The noisy tenant's; the quiet one has the one behind them."""
TARGETS = ("q_proj", "v_proj")
QUIET = "quiet"
LEAD_S = 4.0
"""The noisy tenant begins so long before the quiet one, and has filled every place by then."""
LENGTHS = {"tiny": ((16, 64), (8, 32)), "S": ((64, 512), (16, 128)), "M": ((32, 128), (8, 32))}
"""Lengths of prompts and answers, in tokens."""
RATES = {"tiny": 4.0, "S": 1.0, "M": 0.15}
"""The quiet tenant's requests a second."""
BUDGETS = {"tiny": "256MiB", "S": "1GiB", "M": "4GiB"}
MAX_RATIO = 2.0
SEEDS = 1_000_000


@dataclass(slots=True)
class Phase:
    """The quiet tenant's answers, alone or not; and what the noisy one got meanwhile."""

    kind: str
    ttft_s: list[float]
    gaps_s: list[float]
    num_unanswered: int
    noisy: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @staticmethod
    def of(kind: str, answers: Sequence[Answer], noisy: dict[str, Any]) -> Phase:
        good = [answer for answer in answers if answer.is_complete]
        return Phase(
            kind,
            ttft_s=[answer.ttft_s for answer in good],
            gaps_s=[gap for answer in good for gap in answer.gaps_s],
            num_unanswered=len(answers) - len(good),
            noisy=noisy,
            errors=sorted({answer.error[:200] for answer in answers if answer.error}),
        )


def asks_of(options: argparse.Namespace, number: int, *, seed: int) -> list[Ask]:
    """A round's requests: their times and lengths are those of its number,
    their prompts those of the seed.
    """
    prompts, outputs = LENGTHS[options.size]
    lengths = {"prompt_tokens": prompts, "output_tokens": outputs}
    asks = slora_trace(1, 1.0, options.rate, 1.0, options.duration, number, **lengths)
    return [replace(ask, adapter=NUM_ADAPTERS, prompt_seed=seed + i) for i, ask in enumerate(asks)]


@dataclass(slots=True)
class Bench:
    options: argparse.Namespace
    server: Server
    quiet_key: str
    vocab: int

    async def phase(self, kind: str, number: int) -> Phase:
        asks = asks_of(self.options, number, seed=(2 * number + (kind == "beside")) * SEEDS)
        async with Asker(self.server.url, self.quiet_key, self.vocab) as asker:
            # the adapter is there, and what is compiled or allocated on first use is behind it
            await asker.closed_loop([replace(ask, prompt_seed=-1 - i) for i, ask in enumerate(asks[:3])], 1)
            noisy = self._noisy(number) if kind == "beside" else None
            if noisy is not None:
                await asyncio.sleep(LEAD_S)
            answers = await asker.open_loop(asks)
            got = await asyncio.to_thread(last_line, noisy) if noisy is not None else {}
        return Phase.of(kind, answers, got)

    def _noisy(self, number: int) -> Any:
        os.environ["LORASERVE_API_KEY"] = self.server.key
        prompts, outputs = LENGTHS[self.options.size]
        arguments = ["--url", self.server.url, "--vocab", self.vocab, "--rate", FOLD * self.options.rate]
        arguments += ["--duration", LEAD_S + self.options.duration, "--adapters", NUM_ADAPTERS, "--seed", 1000 + number]
        arguments += ["--prompt-tokens", *prompts, "--output-tokens", *outputs]
        return module("noisy", *arguments)


def run(options: argparse.Namespace) -> list[Phase]:
    size, model = SIZES[options.size], make_base(options.size)
    adapters = Adapters(size, ranks=(8,), targets=TARGETS)
    phases = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraserve-bench-")))
        folders = [adapters.write(number, folder) for number in range(NUM_ADAPTERS + 1)]
        say("starting the server …")
        flags = ["--memory-budget", options.memory_budget or BUDGETS[options.size]]
        server = stack.enter_context(serve(model, options.quantize, folders[:-1], flags))
        with Client(server.url, api_key=server.admin_key) as admin:
            admin.tenants.create(QUIET)
            quiet_key = admin.keys.create(QUIET, name="quiet").key
        with Client(server.url, api_key=quiet_key) as client:
            client.adapters.push(folders[-1], name=folders[-1].name)
        bench = Bench(options, server, quiet_key, size.vocab)
        for number in range(1, options.rounds + 1):
            for kind in ("alone", "beside"):
                phases.append(asyncio.run(bench.phase(kind, number)))
                p95 = percentile(phases[-1].ttft_s, 95)
                say(f"  round {number}, {kind}: p95 {figures.ms(p95)} ms of {len(phases[-1].ttft_s)}")
    return phases


def pooled(phases: Sequence[Phase], kind: str) -> tuple[list[float], list[float]]:
    """Times to first token, and between tokens, of all rounds."""
    of_kind = [phase for phase in phases if phase.kind == kind]
    return [s for phase in of_kind for s in phase.ttft_s], [s for phase in of_kind for s in phase.gaps_s]


def ratio(phases: Sequence[Phase], percent: float = 95) -> float:
    """The quiet tenant's time to first token beside the noisy one, by that alone;
    NaN where nothing was answered.
    """
    alone, beside = (percentile(pooled(phases, kind)[0], percent) for kind in ("alone", "beside"))
    return beside / alone if alone else math.nan


def table(phases: Sequence[Phase]) -> str:
    rows = []
    for kind, words in (("alone", "alone"), ("beside", "beside the noisy tenant")):
        ttft, gaps = pooled(phases, kind)
        times = [figures.ms(percentile(ttft, percent)) for percent in (50, 95, 99)]
        missing = sum(phase.num_unanswered for phase in phases if phase.kind == kind)
        rows.append([words, str(len(ttft)), str(missing), *times, figures.ms(percentile(gaps, 50))])
    ratios = [f"{ratio(phases, percent):.2f}" for percent in (50, 95, 99)]
    rows.append(["the second ÷ the first", "", "", *ratios, ""])
    header = [
        "the quiet tenant",
        "answered",
        "not answered",
        "TTFT p50 ms",
        "p95 ms",
        "p99 ms",
        "between tokens p50 ms",
    ]
    return figures.table(header, rows)


def noisy_table(phases: Sequence[Phase]) -> str:
    rows = []
    for number, phase in enumerate((phase for phase in phases if phase.kind == "beside"), 1):
        one = phase.noisy["summary"]
        rows.append(
            [
                str(number),
                figures.number(one["offered_per_s"]),
                str(one["num_sent"]),
                str(one["num_complete"]),
                str(one["num_refused"]),
                figures.number(phase.noisy["tokens_per_s"]),
                figures.ms(one["ttft_p50_s"]),
            ]
        )
    header = [
        "the noisy tenant, round",
        "sent a second",
        "sent",
        "answered in time",
        "refused",
        "tokens/s",
        "TTFT p50 ms",
    ]
    return figures.table(header, rows)


def text(options: argparse.Namespace, phases: Sequence[Phase]) -> str:
    prompts, outputs = LENGTHS[options.size]
    errors = sorted({error for phase in phases for error in phase.errors})
    found = ratio(phases)
    return f"""Size {options.size}, base {options.quantize}. The quiet tenant sends {options.rate:g} requests a \
second, the noisy one {FOLD} times as many; prompts of {prompts[0]} to {prompts[1] - 1} tokens, answers of \
{outputs[0]} to {outputs[1] - 1}, greedy, streamed; rank 8 on {" and ".join(TARGETS)}, {NUM_ADAPTERS} adapters of the \
noisy tenant's and one of the quiet one's; {options.rounds} rounds of {options.duration:g} s.

{table(phases)}

{noisy_table(phases)}

- The 95th percentile of the quiet tenant's time to first token is {found:.2f} times what it is alone \
({"within" if found <= MAX_RATIO else "over"} {MAX_RATIO:g}).
- Times count from when a request was due. What the noisy tenant has waiting at the end of a round is given up; \
refused: with 429 or 503.
- Errors of the quiet tenant's: {"; ".join(errors) or "none"}.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(RATES))
    parser.add_argument("--quick", action="store_true", help="one round of 20 s")
    parser.add_argument("--rate", type=float, help="of the quiet tenant's requests, a second")
    parser.add_argument("--duration", type=float, help="seconds of a phase (default: 60)")
    parser.add_argument("--rounds", type=int, help="(default: 2)")
    parser.add_argument("--quantize", default="int8", choices=("none", "int8"))
    parser.add_argument("--memory-budget", help="the device's")
    options = parser.parse_args(arguments)
    options.rate = options.rate or RATES[options.size]
    options.duration = options.duration or (20.0 if options.quick else 60.0)
    options.rounds = options.rounds or (1 if options.quick else 2)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    phases = run(options)
    page = text(options, phases)
    numbers = {"ratio_p95": ratio(phases), "phases": phases}
    reporting.finish("fairness", "A quiet tenant beside a noisy one", page, machine, options, arguments, **numbers)


if __name__ == "__main__":
    main()
