"""Measure what speculation gains on repetitive work, and what it costs on random work; and what a
draft base gains, that is right always, mostly or never.

    python -m benchmarks.speculation            # about a quarter of an hour on two cores
    python -m benchmarks.speculation --quick    # one round

Servers on one base of random weights, whose answers are drawn from tables (`repetitive`): one with
`--speculation off`, one with `auto`, and one for each draft base, asked in turns for the same
answers. Answers are compared token by token, and the program fails where one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import figures, reporting
from benchmarks.make_model import SIZES
from benchmarks.repetitive import JSON, RANDOM, WORKS, Work, works, write_draft, write_repetitive
from benchmarks.serving import HERE, Server, make_base, say, serve

MIN_GAIN, MIN_RANDOM = 1.5, 0.98
OFF, AUTO = "off", "auto"
RANDOM_STREAMS = (1, 8, 32)
DRAFTS = {"always": 1.0, "4 of 5": 0.8, "never": 0.0}
"""Draft bases, by how often they know what follows a token."""
DRAFT_CASES = (
    (RANDOM, 1, "always"),
    (RANDOM, 1, "4 of 5"),
    (RANDOM, 1, "never"),
    (RANDOM, 2, "4 of 5"),
    (RANDOM, 2, "never"),
    (RANDOM, 4, "4 of 5"),
    (RANDOM, 4, "never"),
    (RANDOM, 8, "4 of 5"),
    (JSON, 1, "4 of 5"),
)
SOURCES = ("request", "history", "draft", "grammar")


@dataclass(slots=True)
class Case:
    """A kind of work at a number of streams.

    Attributes:
        tokens_per_s: of each round, by the setting.
        proposed, accepted: tokens, by their source.
        num_different: tokens that differed between the settings.
        draft: how often the draft base is right; None: there is none.
        total_s: of all counted answers with speculation.
        draft_s: of these, in the draft base. What remains differs from the other server by chance.
    """

    work: str
    num_streams: int
    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {OFF: [], AUTO: []})
    proposed: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)
    num_answers: int = 0
    num_different: int = 0
    draft: str | None = None
    total_s: float = 0.0
    draft_s: float = 0.0

    @property
    def server(self) -> str:
        """Name of the server that speculates."""
        return AUTO if self.draft is None else self.draft

    @property
    def ratio(self) -> float:
        """Tokens per second with speculation by those without: the median of the rounds."""
        pairs = zip(self.tokens_per_s[AUTO], self.tokens_per_s[OFF], strict=True)
        return statistics.median(on / off for on, off in pairs)

    @property
    def wanted(self) -> float:
        return MIN_RANDOM if self.work == RANDOM or self.draft is not None else MIN_GAIN


async def ask(client: httpx2.AsyncClient, work: Work, num_tokens: int, seed: int) -> list[int]:
    body = {
        "model": "base",
        "prompt": work.prompt,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


async def run_round(
    server: Server, case: Case, work: Work, num_tokens: int, first_seed: int
) -> tuple[list[list[int]], float]:
    """Send all streams at once; return the answers and the seconds until the last one came."""
    headers = {"Authorization": f"Bearer {server.key}"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=900) as client:
        await client.get("/livez")
        started = time.perf_counter()
        asked = (ask(client, work, num_tokens, first_seed + stream) for stream in range(case.num_streams))
        answers = await asyncio.gather(*asked)
        return list(answers), time.perf_counter() - started


def counted(server: Server, what: str) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    scrape = figures.parse(httpx2.get(f"{server.url}/metrics", headers=headers).text)
    name = f"loraserve_speculation_{what}_tokens_total"
    return {source: figures.total(scrape, name, source=source) for source in SOURCES}


def draft_seconds(server: Server) -> float:
    """Return the seconds that a server has spent in its draft base."""
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    scrape = figures.parse(httpx2.get(f"{server.url}/metrics", headers=headers).text)
    return figures.total(scrape, "loraserve_speculation_draft_seconds_total")


def measure(servers: dict[str, Server], case: Case, work: Work, options: argparse.Namespace) -> None:
    # no seed twice: the server would know the answer
    first_seed = 1_000_000 * options.seed + 10_000 * case.num_streams
    asked = {OFF: servers[OFF], AUTO: servers[case.server]}
    before = {what: counted(asked[AUTO], what) for what in ("proposed", "accepted")}
    draft_s = 0.0
    for number in range(options.rounds + 1):
        answers: dict[str, list[list[int]]] = {}
        # each is first in every other round: what is slow for a moment is slow for both
        if number == 1:
            draft_s = draft_seconds(asked[AUTO])
        for setting in (OFF, AUTO) if number % 2 else (AUTO, OFF):
            answers[setting], elapsed_s = asyncio.run(
                run_round(asked[setting], case, work, options.tokens, first_seed + number * case.num_streams)
            )
            if number and setting == AUTO:
                case.total_s += elapsed_s
            # the first round, in which prompts are computed and nothing is known, isn't counted
            if number:
                case.tokens_per_s[setting].append(sum(map(len, answers[setting])) / elapsed_s)
        for one, other in zip(answers[OFF], answers[AUTO], strict=True):
            case.num_answers += 1
            case.num_different += sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
    for what, counts in (("proposed", case.proposed), ("accepted", case.accepted)):
        after = counted(asked[AUTO], what)
        counts.update({source: after[source] - before[what][source] for source in after})
    case.draft_s = draft_seconds(asked[AUTO]) - draft_s
    say(f"  {case.work}, {case.num_streams} streams, draft base {case.draft}: {case.ratio:.2f}")


def table(cases: list[Case]) -> str:
    rows = []
    for case in cases:
        num_proposed, num_accepted = sum(case.proposed.values()), sum(case.accepted.values())
        rows.append(
            [
                case.work,
                str(case.num_streams),
                case.draft or "",
                f"{statistics.median(case.tokens_per_s[OFF]):.0f}",
                f"{statistics.median(case.tokens_per_s[AUTO]):.0f}",
                f"{case.ratio:.2f}",
                f"{case.wanted:g}",
                f"{num_proposed:.0f}",
                f"{num_accepted / num_proposed:.2f}" if num_proposed else "",
                f"{case.draft_s / case.total_s:.1%}" if case.draft else "",
                " + ".join(f"{case.accepted[source]:.0f}" for source in SOURCES),
                str(case.num_different),
            ]
        )
    header = [
        "work",
        "streams",
        "draft base is right",
        "tokens/s off",
        "auto",
        "auto ÷ off",
        "wanted",
        "proposed",
        "share accepted",
        "time in the draft base",
    ]
    return figures.table(
        [*header, "from the request + earlier ones + the draft base + grammars", "tokens that differ"], rows
    )


def text(options: argparse.Namespace, cases: list[Case]) -> str:
    return f"""Size {options.size}, base {options.quantize}; {options.tokens} tokens out at temperature 1; \
{options.rounds} rounds after one that isn't counted, the settings in turns on servers of their own.

{table(cases)}

- {sum(case.num_answers for case in cases)} answers were compared; {sum(case.num_different for case in cases)} tokens \
differ.
- A draft base has one of the base's layers, with its embedding and its head.
- Ratios are medians of the rounds' own. Proposed tokens are those of all rounds.
- Time in the draft base is a share of the counted rounds': servers differ by more than that costs.
"""


def base_of(size: str) -> Path:
    """Return the base's folder; it is made once and kept."""
    out = HERE / "models" / f"{size}-repetitive"
    if not (out / "model.safetensors").exists():
        write_repetitive(size, make_base(size), out)
    return out


def draft_of(size: str, name: str) -> Path:
    """Return a draft base's folder; it is made once and kept."""
    out = HERE / "models" / f"{size}-draft-{DRAFTS[name] * 100:.0f}"
    if not (out / "model.safetensors").exists():
        write_draft(size, make_base(size), out, DRAFTS[name])
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(name for name in SIZES if name != "tiny"))
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--quantize", default="int8", choices=("none", "int8", "int4", "nf4", "fp8"))
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, help="(default: 8)")
    parser.add_argument("--no-drafts", action="store_true", help="without the draft bases")
    parser.add_argument("--only-drafts", action="store_true", help="with them alone")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 8)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine: dict[str, Any] = reporting.facts()
    cases = [Case(name, 1) for name in WORKS if name != RANDOM] + [Case(RANDOM, count) for count in RANDOM_STREAMS]
    cases = [
        *([] if options.only_drafts else cases),
        *([] if options.no_drafts else (Case(work, count, draft=draft) for work, count, draft in DRAFT_CASES)),
    ]
    kinds = works()
    with contextlib.ExitStack() as stack:
        say("starting the servers …")
        flags = ("--memory-budget", "1GiB", "--speculation")
        base = base_of(options.size)
        servers = {
            setting: stack.enter_context(serve(base, options.quantize, flags=(*flags, setting)))
            for setting in (OFF, AUTO)
        }
        for draft in dict.fromkeys(case.draft for case in cases if case.draft is not None):
            draft_flags = (*flags, AUTO, "--draft-model", str(draft_of(options.size, draft)))
            servers[draft] = stack.enter_context(serve(base, options.quantize, flags=draft_flags))
        for case in cases:
            measure(servers, case, kinds[case.work], options)
    numbers = {"cases": cases, "ratios": {f"{case.work}, {case.num_streams}": case.ratio for case in cases}}
    title = "Speculation, on and off"
    variant = "drafts" if options.only_drafts else ""
    reporting.finish(
        "speculation", title, text(options, cases), machine, options, arguments, variant=variant, **numbers
    )
    if any(case.num_different for case in cases):
        sys.exit("speculation changed an answer")


if __name__ == "__main__":
    main()
