"""Measure running streams while a long prompt is read, with `--max-inter-token-ms` off and auto.

    python -m benchmarks.long_prompt --model DIR      # a base of your own: about two minutes
    python -m benchmarks.long_prompt --quick          # one round on the synthetic base

Sixteen streams run; long prompts come one after another. Then a burst of prompts with one token
each, and a burst of requests with answers: what a bound on the time between tokens costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, reporting
from benchmarks.asking import Answer, Asker
from benchmarks.figures import percentile
from benchmarks.make_model import SIZES
from benchmarks.serving import make_base, say, serve
from benchmarks.traffic import Ask

BOUNDS = ("off", "auto")
NUM_STREAMS = 16
QUIET_S = 2.0
BETWEEN_S = 0.5
"""Seconds between two long prompts, in which streams are alone."""
NUM_PROMPTS = 3
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 64, 900
BURST = (32, 256, 1)
"""Requests, prompt tokens and new tokens of the burst of prompts."""
MIXED = (32, 128, 48)
SEEDS = 1_000_000
BUDGETS = {"tiny": "256MiB", "S": "1GiB", "M": "4GiB"}


@dataclass(slots=True)
class Turn:
    """What one server did.

    Attributes:
        quiet_s: seconds between tokens in the pauses before and after long prompts.
        beside_s: while one was read.
        ttft_s: of the long prompts.
        burst_per_s: prompt tokens a second of the burst of prompts.
        mixed_per_s: new tokens a second of the burst of requests.
    """

    bound: str
    quiet_s: list[float]
    beside_s: list[float]
    ttft_s: list[float]
    burst_per_s: float
    mixed_per_s: float


def split(streams: Sequence[Answer], prompts: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Return the streams' gaps between tokens in the pauses, and those that meet a prompt.

    A pause is right before or after a prompt: streams' steps take longer as they grow, so that what
    they took at their beginning is no measure of what a prompt costs them later.
    """
    times = [
        (before, after)
        for stream in streams
        for before, after in zip(stream.token_times_s, stream.token_times_s[1:], strict=False)
    ]
    pauses = [(prompt.sent_s - BETWEEN_S, prompt.sent_s) for prompt in prompts]
    pauses += [(prompt.token_times_s[-1], prompt.token_times_s[-1] + BETWEEN_S) for prompt in prompts]
    alone = [
        after - before for before, after in times if any(began <= before and after <= ended for began, ended in pauses)
    ]
    beside = [
        after - before
        for before, after in times
        if any(before < prompt.token_times_s[0] and after > prompt.sent_s for prompt in prompts)
    ]
    return alone, beside


async def burst(asker: Asker, seed: int, shape: tuple[int, int, int]) -> float:
    """Return the seconds that so many requests at once take."""
    num_requests, num_prompt_tokens, num_tokens = shape
    asks = [Ask(0.0, 0, num_prompt_tokens, num_tokens, seed + number) for number in range(num_requests)]
    began = time.perf_counter()
    answers = await asker.closed_loop(asks, num_requests)
    check(answers)
    return time.perf_counter() - began


def check(answers: Sequence[Answer]) -> None:
    broken = [answer.error for answer in answers if not answer.is_complete]
    if broken:
        raise SystemExit(f"an answer isn't complete: {broken[0]}")


async def measure(options: argparse.Namespace, bound: str, url: str, key: str, vocab: int, seed: int) -> Turn:
    async with Asker(url, key, vocab, "base") as asker:
        # what is compiled or allocated on first use is behind it, and steps have been measured
        await asker.closed_loop([Ask(0.0, 0, 300, 8, seed + 10_000 + number) for number in range(8)], 4)
        ask = Ask(0.0, 0, STREAM_PROMPT_TOKENS, STREAM_TOKENS, 0)
        streams: list[Answer] = []
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                one = Ask(ask.at_s, ask.adapter, ask.num_prompt_tokens, ask.num_output_tokens, seed + number)
                group.create_task(asker.ask(one, into=streams, stop=stop))
            while len(streams) < NUM_STREAMS or not all(len(one.token_times_s) > 8 for one in streams):
                await asyncio.sleep(0.02)
            await asyncio.sleep(QUIET_S)
            prompts = []
            for number in range(NUM_PROMPTS):
                prompts.append(await asker.ask(Ask(0.0, 0, options.prompt_tokens, 1, seed + 20_000 + number)))
                await asyncio.sleep(BETWEEN_S)
            if not all(stream.status == 0 and not stream.error for stream in streams):
                raise SystemExit("a stream ended before the prompts were read: it is too short")
            stop.set()
        check(prompts)
        alone, beside = split(streams, prompts)
        prompts_s = min([await burst(asker, seed + 30_000 + 1_000 * number, BURST) for number in range(3)])
        mixed_s = min([await burst(asker, seed + 40_000 + 1_000 * number, MIXED) for number in range(3)])
    return Turn(
        bound,
        alone,
        beside,
        [one.ttft_s for one in prompts],
        BURST[0] * BURST[1] / prompts_s,
        MIXED[0] * MIXED[2] / mixed_s,
    )


def run(options: argparse.Namespace) -> list[Turn]:
    model = make_base(options.size) if options.model is None else options.model
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    turns = []
    for number in range(options.rounds):
        for bound in BOUNDS:
            flags = ["--memory-budget", options.memory_budget or BUDGETS[options.size], "--speculation", "off"]
            flags += ["--max-inter-token-ms", bound]
            with serve(model, options.quantize, (), flags) as server:
                turn = asyncio.run(measure(options, bound, server.url, server.key, vocab, number * SEEDS))
            turns.append(turn)
            say(f"  round {number + 1}, {bound}: beside a prompt p99 {figures.ms(percentile(turn.beside_s, 99))} ms")
    return turns


def table(turns: Sequence[Turn]) -> str:
    rows = []
    for bound in BOUNDS:
        of_bound = [turn for turn in turns if turn.bound == bound]
        quiet = percentile([gap for turn in of_bound for gap in turn.quiet_s], 50)
        beside = [gap for turn in of_bound for gap in turn.beside_s]
        rows.append(
            [
                bound,
                figures.ms(quiet),
                *(figures.ms(percentile(beside, percent)) for percent in (50, 99, 100)),
                figures.number(percentile(beside, 99) / quiet),
                figures.ms(statistics.median([ttft for turn in of_bound for ttft in turn.ttft_s])),
                figures.number(max(turn.burst_per_s for turn in of_bound), 0),
                figures.number(max(turn.mixed_per_s for turn in of_bound), 0),
            ]
        )
    header = [
        "`--max-inter-token-ms`",
        "quiet, between tokens p50 ms",
        "beside a prompt p50 ms",
        "p99 ms",
        "worst ms",
        "p99 ÷ quiet p50",
        "TTFT of the prompt p50 ms",
        "burst of prompts, tokens/s",
        "burst of answers, tokens/s",
    ]
    return figures.table(header, rows)


def text(options: argparse.Namespace, turns: Sequence[Turn]) -> str:
    return f"""{NUM_STREAMS} streams run while {NUM_PROMPTS} prompts of {options.prompt_tokens} tokens come one after \
another, with pauses of {BETWEEN_S:g} s, in which the quiet time between tokens is measured; base \
{options.quantize}, without speculation; then {BURST[0]} prompts of {BURST[1]} tokens at once with one token each, \
and {MIXED[0]} of {MIXED[1]} with {MIXED[2]} each (best of three). {options.rounds} alternating rounds.

{table(turns)}
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(set(SIZES) & set(BUDGETS)))
    parser.add_argument("--model", type=Path, help="directory of a base to take instead")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, help="(default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--quantize", default="int8", choices=("none", "int8"))
    parser.add_argument("--memory-budget", help="the device's")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.model is not None:
        options.size = options.model.name
        options.memory_budget = options.memory_budget or "2GiB"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    turns = run(options)
    page = text(options, turns)
    # where it lies is the machine's own business
    options.model = options.model and options.model.name
    reporting.finish("long_prompt", "Streams beside a long prompt", page, machine, options, arguments, turns=turns)


if __name__ == "__main__":
    main()
