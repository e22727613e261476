"""Measure what cold adapters and uploads cost the streams that run already.

32 streams decode, while adapters that were never used are asked for and others are uploaded.

    python -m benchmarks.churn                # 200 cold adapters and 200 uploads, in two rounds:
                                              # about 25 minutes on two cores
    python -m benchmarks.churn --quick        # 40 of each in one round: about six minutes

In each round the same streams run twice, each from another place in its answer on, so that together
they are as long at any time, and phases of any length compare. Beside them go the same extra
requests of one token at the same times: at first these ask for the streams' own adapters, which are
resident, and nothing is uploaded; then each asks for a cold adapter, and as many adapters are
uploaded by a process of its own, in idle time. Before that, alone on the server:
the first token of cold adapters and of a resident one, and in a process without a server what
reading, verifying and copying such an adapter takes (`benchmarks.loading`), all three in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import figures, reporting
from benchmarks.asking import Answer, Asker
from benchmarks.figures import percentile
from benchmarks.make_model import MODULES, SIZES
from benchmarks.serving import Server, last_line, make_base, module, say, serve
from benchmarks.synthetic import Adapters, bytes_per_rank
from benchmarks.traffic import Ask
from benchmarks.watching import Seen, Watch

NUM_STREAMS = 32
ADAPTER_BYTES = 8e6
BUDGETS = {"tiny": "256MiB", "S": "2GiB", "M": "4GiB"}
HOST_CACHE = "512MiB"
STREAM_TOKENS, PROMPT_TOKENS = 1024, 32
TINY_TOKENS = 128
"""Tokens of a stream's answer on the smallest base; a stream that has ended begins anew."""
SETTLE_S = 2.0
SEEDS = 1_000_000
"""Each phase has as many seeds of prompts of its own."""


@dataclass(slots=True)
class Phase:
    """The streams beside one kind of extra load.

    Attributes:
        gaps_s: between their tokens, while everything else went on that's in the phase.
        gaps_after_s: while what was left of it ended: most often uploads, as fast as they are
            taken.
    """

    kind: str
    gaps_s: list[float]
    tokens_per_s: float
    extras_ttft_s: list[float]
    num_unanswered: int
    seen: Seen
    delayed_s: float
    gaps_after_s: list[float] = field(default_factory=list)
    uploads: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FirstTokens:
    """Seconds to the first token of requests that were alone, the computing of their prompts among
    it and without it; and to load such an adapter without a server.
    """

    cold_s: list[float] = field(default_factory=list)
    resident_s: list[float] = field(default_factory=list)
    cold_apart_s: list[float] = field(default_factory=list)
    resident_apart_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    server_load_s: float = math.nan
    """Mean of such loads on the server, in its own words."""

    @property
    def added_s(self) -> list[float]:
        """Seconds that being cold adds to each first token, the computing of prompts aside.

        That differs from one time to the next by more.
        """
        return [cold - percentile(self.resident_apart_s, 50) for cold in self.cold_apart_s]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the adapters by use: the streams' first, then those that are cold when a request
    is alone, those cold in the churn, and those to upload.
    """

    num_alone: int
    num_cold: int

    @property
    def alone(self) -> range:
        return range(NUM_STREAMS, NUM_STREAMS + self.num_alone)

    @property
    def cold(self) -> range:
        return range(self.alone.stop, self.alone.stop + self.num_cold)

    @property
    def uploaded(self) -> range:
        return range(self.cold.stop, self.cold.stop + self.num_cold)


def extra_asks(adapters: Sequence[int], rate: float, seed: int) -> list[Ask]:
    """One request of one token for each of these, at a steady rate;
    those of another seed have other prompts.
    """
    return [Ask(i / rate, adapter, PROMPT_TOKENS, 1, seed + i) for i, adapter in enumerate(adapters)]


def stream_asks(number: int, num_tokens: int, seed: int) -> Iterator[Ask]:
    """Yield a stream's requests, one after the other, without end.

    The first of them stand where streams are that have run for long, each at another place in its
    answer: from then on they are as long, all together, as ever.
    """
    done = num_tokens * number // NUM_STREAMS
    yield Ask(0.0, number, PROMPT_TOKENS + done, num_tokens - done, seed)
    for i in itertools.count(1):
        yield Ask(0.0, number, PROMPT_TOKENS, num_tokens, seed + i)


async def stream_until(asker: Asker, asks: Iterator[Ask], answers: list[Answer], stop: asyncio.Event) -> None:
    """One stream: an answer after the other, put into `answers` as they begin,
    until it's told to stop or one goes wrong.
    """
    while not stop.is_set():
        if (await asker.ask(next(asks), stop=stop, into=answers)).error:
            return


async def until_all_decode(streams: Sequence[list[Answer]]) -> None:
    """Each stream's first prompt is behind it, or it has failed."""
    while not all(answers and (answers[0].token_times_s or answers[0].error) for answers in streams):
        await asyncio.sleep(0.05)


def gaps_within(answers: Sequence[Answer], start_s: float, end_s: float) -> list[float]:
    """The times between tokens of one answer that ended within the window."""
    return [
        gap
        for answer in answers
        for gap, came_s in zip(answer.gaps_s, answer.token_times_s[1:], strict=True)
        if start_s <= came_s <= end_s
    ]


@dataclass(slots=True)
class Bench:
    options: argparse.Namespace
    model: Path
    adapters: Adapters
    vocab: int
    numbers: Numbers
    folder: Path
    """Bytes of the directories that are uploaded."""

    async def first_tokens(self, server: Server, loading: subprocess.Popen[str]) -> FirstTokens:
        """Measure first tokens of cold adapters and of a resident one, and loads by `loading`.

        They take turns, and each is alone.
        """
        first = FirstTokens()
        if loading.stdin is None or loading.stdout is None or loading.stdout.readline() != "ready\n":
            raise SystemExit("benchmarks.loading doesn't load")
        async with Asker(server.url, server.key, self.vocab) as asker:
            for i in range(3):
                await asker.ask(Ask(0.0, 0, PROMPT_TOKENS, 1, i))
            for i, number in enumerate(self.numbers.alone):
                print(file=loading.stdin, flush=True)
                first.load_s.append(float(loading.stdout.readline()))
                for adapter, whole_s, apart_s in (
                    (number, first.cold_s, first.cold_apart_s),
                    (0, first.resident_s, first.resident_apart_s),
                ):
                    answer = await asker.ask(Ask(0.0, adapter, PROMPT_TOKENS, 1, 1000 + 10 * i + (adapter == 0)))
                    if not answer.is_complete:
                        raise SystemExit(f"adapter {adapter} wasn't answered: {answer.status} {answer.error}")
                    whole_s.append(answer.ttft_s)
                    apart_s.append(answer.ttft_s - answer.prefill_s)
        return first

    async def phase(self, server: Server, kind: str, extras: Sequence[int], uploads: range | None, seed: int) -> Phase:
        """The streams beside these extra requests and uploads.

        Another seed's prompts are in no prefix cache.
        """
        rate, tokens = self.options.rate, TINY_TOKENS if self.options.size == "tiny" else STREAM_TOKENS
        stop = asyncio.Event()
        pushed: dict[str, Any] = {}
        async with Asker(server.url, server.key, self.vocab) as asker:
            streams: list[list[Answer]] = [[] for _ in range(NUM_STREAMS)]
            tasks = [
                asyncio.create_task(stream_until(asker, stream_asks(i, tokens, seed + 1000 * i), into, stop))
                for i, into in enumerate(streams)
            ]
            await until_all_decode(streams)
            await asyncio.sleep(SETTLE_S)
            with Watch(server) as watch:
                start_s = time.perf_counter()
                process = self._uploader(server, uploads) if uploads is not None else None
                answers = await asker.open_loop(extra_asks(extras, rate, seed + 500_000))
                end_s = all_end_s = time.perf_counter()
                if process is not None:
                    pushed = await asyncio.to_thread(last_line, process)
                    end_s, all_end_s = min(end_s, start_s + pushed["wall_s"]), time.perf_counter()
            stop.set()
            await asyncio.gather(*tasks)
        streamed = [answer for answers_of_one in streams for answer in answers_of_one]
        num_tokens = sum(start_s <= t <= end_s for answer in streamed for t in answer.token_times_s)
        good = [answer for answer in answers if answer.is_complete]
        errors = {answer.error[:200] for answer in (*answers, *streamed) if answer.error}
        return Phase(
            kind=kind,
            gaps_s=gaps_within(streamed, start_s, end_s),
            gaps_after_s=gaps_within(streamed, end_s, all_end_s) if all_end_s - end_s > SETTLE_S else [],
            tokens_per_s=num_tokens / (end_s - start_s),
            extras_ttft_s=[answer.ttft_s for answer in good],
            num_unanswered=len(answers) - len(good),
            seen=watch.seen,
            delayed_s=watch.delayed_s(),
            uploads=pushed,
            errors=sorted(errors),
        )

    def _uploader(self, server: Server, numbers: range) -> Any:
        os.environ["LORASERVE_API_KEY"] = server.key
        first = numbers.start - self.numbers.uploaded.start
        arguments = ("--first", first, "--count", len(numbers), "--rate", self.options.rate)
        return module("pushing", "--url", server.url, "--folder", self.folder, *arguments)


def run(options: argparse.Namespace) -> tuple[FirstTokens, list[Phase], int]:
    """The first tokens, the phases in order, and an adapter's bytes."""
    size = SIZES[options.size]
    rank = max(1, round(ADAPTER_BYTES / bytes_per_rank(size, MODULES))) if options.size != "tiny" else 8
    adapters = Adapters(size, ranks=(rank,), targets=MODULES)
    numbers = Numbers(5 if options.quick else 40, options.count)
    model = make_base(options.size)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraserve-bench-")))
        say(f"writing {len(numbers.uploaded)} adapters to upload …")
        for number in numbers.uploaded:
            adapters.write(number, folder)
        common: tuple[str | int | Path, ...] = ("--model", model, "--size", options.size, "--ranks", rank)
        common += ("--quantize", options.quantize, "--targets", ",".join(MODULES))
        say("starting the server …")
        flags = ("--memory-budget", options.memory_budget or BUDGETS[options.size], "--host-cache", HOST_CACHE)
        flags += ("--certify", options.certify)
        server = stack.enter_context(serve(model, options.quantize, flags=flags))
        bench = Bench(options, model, adapters, size.vocab, numbers, folder)
        say(f"registering {numbers.cold.stop} adapters …")
        last_line(module("registering", server.data, *common, "--count", numbers.cold.stop))
        say("first tokens, alone …")
        with module("loading", *common, "--count", len(numbers.alone), is_asked=True) as loading:
            with Watch(server) as watch:
                first = asyncio.run(bench.first_tokens(server, loading))
                # its counters are a second old
                time.sleep(2.0)
            first.read_s = last_line(loading)
        first.server_load_s = watch.mean_load_s()
        phases = []
        share = options.count // options.rounds
        for i in range(options.rounds):
            cold = numbers.cold[i * share : (i + 1) * share]
            uploads = numbers.uploaded[i * share : (i + 1) * share]
            resident = [k % NUM_STREAMS for k in range(share)]
            say(f"round {i + 1}: {share} requests for resident adapters …")
            phases.append(asyncio.run(bench.phase(server, "resident", resident, None, (2 * i + 1) * SEEDS)))
            say(f"round {i + 1}: {share} requests for cold adapters, and {share} uploads …")
            phases.append(asyncio.run(bench.phase(server, "churn", cold, uploads, (2 * i + 2) * SEEDS)))
    return first, phases, adapters.num_bytes(0)


def pooled(phases: Sequence[Phase], kind: str) -> tuple[list[float], list[float]]:
    """The streams' gaps and the extra requests' times to their token, of all rounds."""
    of_kind = [phase for phase in phases if phase.kind == kind]
    return [s for phase in of_kind for s in phase.gaps_s], [s for phase in of_kind for s in phase.extras_ttft_s]


def streams_table(phases: Sequence[Phase]) -> str:
    header = [
        "beside the streams",
        "between tokens p50 ms",
        "p99 ms",
        "max ms",
        "tokens/s",
        "extra requests' token p50 ms",
        "p99 ms",
        "not answered",
        "steps delayed by loading s",
    ]
    rows, ends = [], {}
    for kind, words in (("resident", "requests for resident adapters"), ("churn", "cold adapters, and uploads")):
        of_kind = [phase for phase in phases if phase.kind == kind]
        gaps, ttft = pooled(phases, kind)
        ends[kind] = [percentile(gaps, 50), percentile(gaps, 99), percentile(gaps, 100)]
        rate = sum(phase.tokens_per_s for phase in of_kind) / len(of_kind)
        ends[kind].append(rate)
        cells = [words, *map(figures.ms, ends[kind][:3]), f"{rate:.1f}"]
        cells += [figures.ms(percentile(ttft, 50)), figures.ms(percentile(ttft, 99))]
        cells += [str(sum(phase.num_unanswered for phase in of_kind))]
        rows.append([*cells, figures.number(sum(phase.delayed_s for phase in of_kind), 3)])
    ratios = [churn / resident for churn, resident in zip(ends["churn"], ends["resident"], strict=True)]
    rows.append(["the second ÷ the first", *(figures.number(ratio, 3) for ratio in ratios), "", "", "", ""])
    after = [s for phase in phases for s in phase.gaps_after_s]
    if after:
        found = [percentile(after, 50), percentile(after, 99), percentile(after, 100)]
        rows.append(["what was left of the uploads", *map(figures.ms, found), "", "", "", "", ""])
    return figures.table(header, rows)


def first_table(first: FirstTokens, phases: Sequence[Phase]) -> str:
    load = percentile(first.load_s, 50)
    rows = []
    for words, seconds in (
        ("read and verify, without a server", first.read_s),
        ("read, verify and copy, without a server", first.load_s),
        ("the same on the server, alone, in its own words (mean)", [first.server_load_s]),
        ("first token, resident adapter, alone", first.resident_s),
        ("first token, cold adapter, alone", first.cold_s),
        ("what being cold adds, the computing of the prompt aside", first.added_s),
        ("first token, cold adapter, in the churn", pooled(phases, "churn")[1]),
    ):
        p50 = percentile(seconds, 50)
        rows.append([words, figures.ms(p50), figures.ms(percentile(seconds, 99)), figures.number(p50 / load, 2)])
    return figures.table(["", "p50 ms", "p99 ms", "p50 ÷ (read, verify and copy)"], rows)


def text(options: argparse.Namespace, first: FirstTokens, phases: Sequence[Phase], num_bytes: int) -> str:
    churn = [phase for phase in phases if phase.kind == "churn"]
    uploads = [phase.uploads for phase in churn]
    seen = Seen.largest(phase.seen for phase in phases)
    errors = sorted({error for phase in phases for error in phase.errors})
    return f"""Size {options.size}, base {options.quantize}; {NUM_STREAMS} streams, an adapter each, greedy; every \
adapter {num_bytes / 1e6:.1f} MB on all seven linears; {options.count} requests of {PROMPT_TOKENS} tokens in and one \
out, {options.rate:g} a second, and in the churn {options.count} uploads, as many a second, in {options.rounds} rounds.

{streams_table(phases)}

{first_table(first, phases)}

- Uploads: {sum(one.get("uploads", 0) for one in uploads)}, in \
{" and ".join(figures.number(one.get("wall_s", 0.0), 0) for one in uploads)} s, answered with \
{" and ".join(str(one.get("statuses", {})) for one in uploads)}, parity \
{" and ".join(str(one.get("parity", {})) for one in uploads)}; \
{max(one.get("upload_p50_s", 0.0) for one in uploads):.2f} s at the median, \
{max(one.get("upload_p99_s", 0.0) for one in uploads):.2f} s at the 99th percentile of the slower round.
- Largest on the device, adapters + KV, and together of the budget: {seen.device_words()} MiB; host \
{figures.mib(seen.host)} of {figures.mib(seen.host_budget)} MiB; over budget: {seen.over_words()}. The engine's RSS: \
{figures.mib(seen.engine_rss)} MiB.
- Between tokens, and tokens/s: of the time in which both went on, the extra requests and the uploads. These take as \
long as the server takes for them, eight at a time.
- Steps delayed: what their thread spent on adapters' behalf, all steps together.
- What went wrong: {"; ".join(errors) if errors else "nothing"}.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(BUDGETS))
    parser.add_argument("--quick", action="store_true", help="40 of each in one round")
    parser.add_argument("--count", type=int, help="cold adapters, and uploads (default: 200)")
    parser.add_argument("--rate", type=float, default=1.0, help="of each, a second")
    parser.add_argument("--rounds", type=int, help="the count is divided among them (default: 2)")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--memory-budget", help="the device's")
    parser.add_argument("--certify", default="at-upload", choices=("at-upload", "on-request"), help="the server's")
    options = parser.parse_args(arguments)
    options.count = options.count or (40 if options.quick else 200)
    options.rounds = options.rounds or (1 if options.quick else 2)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    first, phases, num_bytes = run(options)
    page = text(options, first, phases, num_bytes)
    numbers = {"first_tokens": first, "phases": [summary(phase) for phase in phases]}
    title = "Streams beside cold adapters and uploads"
    reporting.finish("churn", title, page, machine, options, arguments, adapter_bytes=num_bytes, **numbers)


def summary(phase: Phase) -> dict[str, Any]:
    """A phase without its thousands of gaps."""
    gaps = {f"p{p}": percentile(phase.gaps_s, p) for p in (1, 10, 50, 90, 95, 99, 99.9, 100)}
    return {
        "kind": phase.kind,
        "num_gaps": len(phase.gaps_s),
        "gaps_s": gaps,
        "num_gaps_after": len(phase.gaps_after_s),
        "gaps_after_s": {f"p{p}": percentile(phase.gaps_after_s, p) for p in (50, 99, 100)},
        "tokens_per_s": phase.tokens_per_s,
        "extras_ttft_s": phase.extras_ttft_s,
        "num_unanswered": phase.num_unanswered,
        "delayed_s": phase.delayed_s,
        "uploads": phase.uploads,
        "errors": phase.errors,
        "seen": phase.seen,
    }


if __name__ == "__main__":
    main()
