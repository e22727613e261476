"""What answers that follow a schema cost, and whether they do: against free text, over many
schemas.

    python -m benchmarks.structured            # about ten minutes on two cores
    python -m benchmarks.structured --quick    # one short round, and 200 schemas

First the time between tokens of 32 streams on one server, in turns: free text, one schema for all
of them, a schema for each, and half of them free text beside the other half. The base is random:
the grammar changes nearly each of its tokens. Then free text and a schema for each with a base that
follows its schema by itself, as trained ones mostly do. Then more than a
thousand schemas on the bundled demo's base: drawn ones, and those of the JSON-Schema test suite.
Each answer is checked by the package jsonschema; the program fails where one isn't valid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import jsonschema

from benchmarks import figures, reporting
from benchmarks.asking import Answer, Asker
from benchmarks.figures import percentile
from benchmarks.make_model import SIZES
from benchmarks.repetitive import Work, json_list, write_repetitive
from benchmarks.schemas import draw_schema, suite
from benchmarks.serving import HERE, Server, make_base, say, serve
from benchmarks.traffic import Ask
from loraserve.demo.pack import base_dir
from loraserve.text.tokenizer import Tokenizer

PROMPT_TOKENS = 32
MAX_RATIO = 1.05
FREE, ONE, EACH, BESIDE = "free text", "one schema for all", "a schema for each", "half free text, half schemas"
MODES = (FREE, ONE, EACH, BESIDE)
FOLLOWED = (FREE, EACH)
"""Modes with a base that follows its schemas."""
FOLLOWS = "A base whose likeliest token is nearly always one that its schema allows:"
ANSWER_TOKENS = 440
CONCURRENCY = 32
VALID, CUT, REFUSED, INVALID, FAILED = "valid", "cut off", "refused", "not valid", "failed"


def timed_schema(number: int) -> dict[str, Any]:
    """A list of records that is longer than any answer here; another number, other names."""
    record = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 3, "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email", "maxLength": 30},
            "kind": {"enum": ["person", "company", f"kind {number}"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
            "score": {"type": "number"},
            "is_active": {"type": "boolean"},
        },
        "required": [f"name_{number}", "age", "email", "kind", "tags", "score", "is_active"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 200}


def list_schema(number: int) -> dict[str, Any]:
    """A list of strings that is longer than any answer here."""
    return {"type": "array", "items": {"type": "string", "maxLength": 16 + number}, "minItems": 200}


def constraint(schema: Mapping[str, Any]) -> dict[str, Any]:
    timed = {"name": "timed", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": timed}}


def fields_of(mode: str, stream: int, work: Work | None) -> dict[str, Any]:
    """Return what a stream's request asks its answer to be, and other fields of it.

    Args:
        work: the base's, if it follows its schemas.
    """
    # text of its own, so that nothing is in a prefix cache, and then what the answer begins with
    prompt = {} if work is None else {"prompt": [*range(400 + 40 * stream, 431 + 40 * stream), *work.prompt]}
    if mode == FREE or (mode == BESIDE and stream % 2 == 0):
        return prompt
    number = 0 if mode == ONE else 1 + stream
    return prompt | constraint(timed_schema(number) if work is None else list_schema(number))


@dataclass(slots=True)
class Times:
    """The streams of a mode.

    Attributes:
        rounds_s: of each round, the mean time between a stream's tokens.
        gaps_s: all times between tokens; `free_gaps_s`, those of free text.
    """

    mode: str
    gaps_s: list[float] = field(default_factory=list)
    free_gaps_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[tuple[Answer, bool]]) -> None:
        """Add a round's answers, each with whether it is free text."""
        good = [(answer, is_free) for answer, is_free in answers if answer.is_complete]
        means = [(a.token_times_s[-1] - a.token_times_s[0]) / (len(a.token_times_s) - 1) for a, _ in good]
        self.rounds_s.append(sum(means) / len(means) if means else float("nan"))
        self.gaps_s += [gap for answer, _ in good for gap in answer.gaps_s]
        self.free_gaps_s += [gap for answer, is_free in good if is_free for gap in answer.gaps_s]
        self.errors += [answer.error[:200] for answer, _ in answers if answer.error]
        self.errors += ["an answer was short" for a, _ in answers if not a.error and not a.is_complete]

    def summary(self) -> dict[str, Any]:
        """Figures without each single time, of which there are ten thousands."""
        parts = {"gaps_s": self.gaps_s, "free_gaps_s": self.free_gaps_s}
        spread = {name: {q: percentile(gaps, q) for q in (50, 90, 99)} for name, gaps in parts.items() if gaps}
        return {"mode": self.mode, "best_s": self.best_s, "rounds_s": self.rounds_s, "errors": self.errors, **spread}

    @property
    def best_s(self) -> float:
        """The mean of the best round: what else runs on the machine only adds to the others."""
        return min((s for s in self.rounds_s if not math.isnan(s)), default=float("nan"))


async def run_streams(
    asker: Asker, mode: str, options: argparse.Namespace, seed: int, work: Work | None
) -> list[tuple[Answer, bool]]:
    """Send all streams at once; their prompts are computed before any of them is measured."""

    async def one(stream: int) -> tuple[Answer, bool]:
        ask = Ask(0.0, 0, PROMPT_TOKENS, options.tokens, seed * 1000 + stream)
        fields = fields_of(mode, stream, work)
        return await asker.ask(ask, fields=fields), "response_format" not in fields

    return list(await asyncio.gather(*(one(stream) for stream in range(options.streams))))


async def measure(
    server: Server, options: argparse.Namespace, vocab: int, modes: Sequence[str] = MODES, work: Work | None = None
) -> list[Times]:
    times = {mode: Times(mode) for mode in modes}
    async with Asker(server.url, server.key, vocab, name="base") as asker:
        say("each mode once, not counted …")
        for number, mode in enumerate(modes):
            await run_streams(asker, mode, options, number, work)
        for number in range(1, options.rounds + 1):
            # each mode is first once in a while: what is slow for a moment is slow for all
            turn = number % len(modes)
            for mode in [*modes[turn:], *modes[:turn]]:
                answers = await run_streams(asker, mode, options, 10 * number + modes.index(mode), work)
                times[mode].add(answers)
                say(f"  round {number}, {mode}: {figures.ms(times[mode].rounds_s[-1])} ms a token")
    return list(times.values())


def ratio(times: Sequence[Times], mode: str) -> float:
    """Time per output token of a mode, by that of free text: the median over the rounds.

    In a round both run one after the other, so that what slows the machine for minutes slows both.
    """
    of = {one.mode: one.rounds_s for one in times}
    ratios = [one / free for one, free in zip(of[mode], of[FREE], strict=True)]
    # a round without answers has none
    counted = [one for one in ratios if not math.isnan(one)]
    return statistics.median(counted) if counted else math.nan


def times_table(times: Sequence[Times]) -> str:
    rows = [
        [
            one.mode,
            figures.ms(one.best_s),
            f"{ratio(times, one.mode):.3f}",
            figures.ms(percentile(one.gaps_s, 50)),
            figures.ms(percentile(one.gaps_s, 99)),
            figures.ms(percentile(one.free_gaps_s, 99)) if one.free_gaps_s else "",
            " ".join(figures.ms(s) for s in one.rounds_s),
        ]
        for one in times
    ]
    header = [
        "streams",
        "ms per output token, best round",
        "÷ free text, median of rounds",
        "between tokens p50 ms",
        "p99 ms",
        "free text's p99 ms",
    ]
    return figures.table([*header, "rounds"], rows)


# whether answers are valid


@dataclass(slots=True)
class Outcome:
    """The answers of one kind of schemas."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, outcome: str, example: str = "") -> None:
        self.counts[outcome] += 1
        if example and len(self.examples) < 5:
            self.examples.append(example[:300])


def closing_bias() -> dict[str, float]:
    """Biases that let the small base come to an end: strings and brackets close, spaces are few."""
    tokenizer = Tokenizer(base_dir())
    texts = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    closing = [token_id for token_id, text in texts.items() if any(c in b'"}]' for c in text)]
    spaces = [token_id for token_id, text in texts.items() if text and not text.strip()]
    closing.sort(key=lambda token_id: len(texts[token_id]))
    return {
        **{str(token_id): 12.0 for token_id in closing[:200]},
        **{str(token_id): -12.0 for token_id in spaces[:90]},
    }


def is_valid(schema: Any, text: str) -> bool | None:
    """Return whether an answer is valid; None where the validator can't read the schema's regex."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        return bool(kind(schema).is_valid(json.loads(text)))
    except ValueError:
        return False
    except Exception:
        return None


async def answer_schema(
    client: httpx2.AsyncClient, schema: Any, seed: int, bias: Mapping[str, float], outcome: Outcome
) -> None:
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "list the tickets"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        "max_completion_tokens": ANSWER_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": bias,
    }
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code == 400:
        outcome.add(REFUSED)
        return
    if response.status_code != 200:
        outcome.add(FAILED, f"{response.status_code} {response.text}")
        return
    choice = response.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        outcome.add(CUT, json.dumps(schema))
        return
    text = choice["message"]["content"]
    valid = is_valid(schema, text)
    outcome.add(REFUSED if valid is None else VALID if valid else INVALID, "" if valid else f"{schema} {text}")


async def answer_all(server: Server, num_drawn: int) -> list[Outcome]:
    """Every schema once, so many at a time."""
    drawn, official, bias = Outcome("drawn"), Outcome("JSON-Schema test suite"), closing_bias()
    work = [(draw_schema(seed), seed, drawn) for seed in range(num_drawn)]
    work += [(one.schema, seed, official) for seed, one in enumerate(suite())]
    headers = {"Authorization": f"Bearer {server.key}"}
    waiting, num_done = iter(work), 0
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=300) as client:

        async def ask() -> None:
            nonlocal num_done
            for schema, seed, outcome in waiting:
                await answer_schema(client, schema, seed, bias, outcome)
                num_done += 1
                if num_done % 200 == 0:
                    say(f"  {num_done} of {len(work)} schemas …")

        await asyncio.gather(*(ask() for _ in range(CONCURRENCY)))
    return [drawn, official]


def outcomes_table(outcomes: Sequence[Outcome]) -> str:
    kinds = (VALID, INVALID, CUT, REFUSED, FAILED)
    rows = [[one.kind, str(one.counts.total()), *(str(one.counts[kind]) for kind in kinds)] for one in outcomes]
    return figures.table(["schemas", "asked", *kinds], rows)


def is_right(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all answers that ended are valid, and no drawn schema was refused.

    What is cut off by `max_tokens` says nothing: the small base seldom comes to an end.
    """
    counts = sum((one.counts for one in outcomes), Counter[str]())
    return not counts[INVALID] and not counts[FAILED] and not outcomes[0].counts[REFUSED]


def settings_text(options: argparse.Namespace) -> str:
    return (
        f"Size {options.size}, base {options.quantize}; {options.streams} streams at once, {PROMPT_TOKENS} tokens in"
        f" and {options.tokens} out, greedy, streamed; {options.rounds} rounds, the modes in turns on one server."
    )


def text(
    options: argparse.Namespace,
    times: Sequence[Times],
    followed: Sequence[Times],
    outcomes: Sequence[Outcome],
    scrape: figures.Scrape,
) -> str:
    worst = max(ratio(times, ONE), ratio(times, EACH))
    num_masks = figures.total(scrape, "loraserve_mask_seconds_count")
    mask_s = figures.total(scrape, "loraserve_mask_seconds_sum")
    wait_s = figures.total(scrape, "loraserve_mask_wait_seconds_sum")
    num_waits = figures.total(scrape, "loraserve_mask_wait_seconds_count")
    late = figures.total(scrape, "loraserve_late_masks_total")
    errors = sorted({error for one in (*times, *followed) for error in one.errors})
    examples = "; ".join(example for one in outcomes for example in one.examples)
    return f"""{settings_text(options)}

{times_table(times)}

- The dearer of the two modes with schemas alone takes {worst:.3f} times what free text takes \
({"within" if worst <= MAX_RATIO else "over"} {MAX_RATIO:g}).
- A mask took {1e6 * mask_s / max(1, num_masks):.0f} µs ({num_masks:.0f} masks); a step with \
masks waited {1e6 * wait_s / max(1, num_waits):.0f} µs for them. Late masks: {late:.0f}.
- Errors: {"; ".join(errors) or "none"}.

{FOLLOWS}

{times_table(followed)}

One answer per schema, from the demo's base at temperature 1, with biases that make it close strings and brackets:

{outcomes_table(outcomes)}

- Refused with 400: a grammar can't enforce a part of the schema (`not`, `if`, `unevaluatedProperties` and others), or
  nothing satisfies it. Schemas with regexes that the validator (Python's `re`) can't read are counted here, too.
- Examples of answers that were cut off by `max_tokens`, or invalid: {examples or "none"}.
"""


def follower(size: str) -> tuple[Path, Work]:
    """A base that follows its schemas, made once and kept, and its work."""
    source = make_base(size)
    work, out = json_list(Tokenizer(source)), HERE / "models" / f"{size}-lists"
    if not (out / "model.safetensors").exists():
        write_repetitive(size, source, out, work.table)
    return out, work


def measure_followed(options: argparse.Namespace) -> list[Times]:
    """Measure free text and a schema for each, with a base that follows its schemas."""
    say("starting a base that follows its schemas …")
    base, work = follower(options.size)
    with serve(base, options.quantize) as server:
        return asyncio.run(measure(server, options, SIZES[options.size].vocab, FOLLOWED, work))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(SIZES))
    parser.add_argument("--quick", action="store_true", help="one round, and 200 schemas")
    parser.add_argument("--quantize", default="int8", choices=("none", "int8"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, help="(default: 6)")
    parser.add_argument("--only-followed", action="store_true", help="the times with a base that follows its schemas")
    parser.add_argument("--schemas", type=int, help="drawn ones, beside the suite's (default: 1200)")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 6)
    options.schemas = options.schemas or (200 if options.quick else 1200)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    if options.only_followed:
        followed = measure_followed(options)
        page = f"{settings_text(options)}\n\n{FOLLOWS}\n\n{times_table(followed)}\n"
        numbers = {"followed": [one.summary() for one in followed], "ratio": ratio(followed, EACH)}
        reporting.finish(
            "structured",
            "Answers that follow a schema, by a base that does",
            page,
            machine,
            options,
            arguments,
            variant="followed",
            **numbers,
        )
        return
    with contextlib.ExitStack() as stack:
        say("starting the server …")
        server = stack.enter_context(serve(make_base(options.size), options.quantize))
        times = asyncio.run(measure(server, options, SIZES[options.size].vocab))
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        scrape = figures.parse(httpx2.get(f"{server.url}/metrics", headers=headers).text)
    followed = measure_followed(options)
    with contextlib.ExitStack() as stack:
        say("starting the demo's base …")
        server = stack.enter_context(serve(base_dir(), "none", flags=("--memory-budget", "256MiB")))
        outcomes = asyncio.run(answer_all(server, options.schemas))
    page = text(options, times, followed, outcomes, scrape)
    numbers = {
        "followed": [one.summary() for one in followed],
        "ratio": {mode: ratio(times, mode) for mode in MODES},
        "times": [one.summary() for one in times],
        "outcomes": outcomes,
    }
    title = "Answers that follow a schema"
    reporting.finish("structured", title, page, machine, options, arguments, **numbers)
    if not is_right(outcomes):
        sys.exit("an answer wasn't valid, failed, or was refused where the schema can be followed")


if __name__ == "__main__":
    main()
