"""Measure swaps of a live adapter under running streams, as a trainer makes them, and check them.

1,000 versions come under one name while 16 streams run; then 10,000 ephemeral adapters come and go.

    python -m benchmarks.swaps                # about 15 minutes on two cores
    python -m benchmarks.swaps --quick        # 50 versions and 500 adapters: about two minutes
    python -m benchmarks.swaps --quantize int8

A swap is a load in place of other weights (SGLang's tensors route, ephemeral). Once it is answered,
a request of one prompt, the same for all versions, is sent and timed; then one of a new prompt as
long, for the version that is there already: what the swap adds to a first token is the difference.
What must not happen:

- *Stale KV*: the first request of a version finds any of its prompt in the prefix cache.
- *A wrong version*: an answer by another version than the name meant when it was asked for; after
  each tenth swap, log probabilities of it, and the tokens of a stream that began on an earlier
  version, that differ from those of PEFT with the weights of the version that is named. With
  --quantize, PEFT's base has the quantized base's values.
- *Anything left*: after 10,000 ephemeral adapters, of which each tenth was used, a byte of memory,
  a version, or a row in a table of the registry more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import re
import sqlite3
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from benchmarks import figures, reporting
from benchmarks.asking import TIMEOUT_S
from benchmarks.figures import percentile
from benchmarks.make_model import MODULES, SIZES
from benchmarks.serving import Server, make_base, say, serve
from benchmarks.synthetic import Adapters
from benchmarks.watching import engine_process, scrape

if TYPE_CHECKING:
    from benchmarks.peft_scores import PeftScores

NAME = "policy"
NUM_ALONE = 20
"""Swaps before the streams begin."""
NUM_STREAMS, STREAM_TOKENS = 16, 128
PROMPT_TOKENS, ANSWER_TOKENS = 20, 8
"""Tokens of the request that is timed (more than a block of the prefix cache), and of a check."""
RANK = 16
NUM_KINDS = 16
"""Sets of weights that versions take in turn, each with a row of its own."""
CHECK_EVERY = 10
BOUND_MS = 100.0
"""Bound on what a swap adds to a first token, at the median."""
MAX_DIFFERENCE = {"none": 2e-3, "fp8": 2e-3, "int4": 0.3, "nf4": 0.3, "int8": 1.0}
"""Bound on the difference of a log probability, or between a token and the likeliest, by format.

Float32 sums in another order: 2e-5 were measured. What int8 weights multiply, the server rounds to
int8 row by row, and PEFT doesn't. With an int8 base these are all linears: 0.17 was measured in
answers of 8 tokens, and 0.34 in streams of 128; with int4 and nf4 the head alone: 0.03.
"""
MIN_MARGIN = 5.0
"""Least distance of the version before, as a multiple of the bound: the check tells them apart."""
NO_LEFTOVERS = ("usage", "fds", "leases", "store_stamps", "servers")
"""Tables of the invoice's, and of the server's own; and what `_state` counts beside tables."""
FLAGS = ("--memory-budget", "1GiB", "--host-cache", "512MiB")


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer of a stream, by the version that gave it."""

    version: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Swaps:
    """What the swaps took, and what was found wrong."""

    load_s: list[float] = field(default_factory=list)
    """From each load's request to its answer."""
    first_token_s: list[float] = field(default_factory=list)
    """From the load's answer to the first token of a request for the new version."""
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    """Parts of it that the engine tells: in its queue, for the adapter, in the prompt's steps.

    The end of a step that runs when the request comes isn't among them.
    """
    whole_s: list[float] = field(default_factory=list)
    """Both together."""
    resident_s: list[float] = field(default_factory=list)
    """To the first token of a request like it for a version that is there already."""
    alone_load_s: list[float] = field(default_factory=list)
    """Loads, and first tokens of the new versions, while nothing else runs."""
    alone_first_token_s: list[float] = field(default_factory=list)
    num_stale: int = 0
    num_wrong: int = 0
    num_cached_again: int = 0
    """Second requests of a version that found their prompt in the cache: it was at work."""
    num_checked: int = 0
    differences: list[float] = field(default_factory=list)
    """Largest difference of a log probability from PEFT's, of each check."""
    neighbours: list[float] = field(default_factory=list)
    """The same with the weights of the version before: what a wrong version would have."""
    stream_gaps: list[float] = field(default_factory=list)
    """Largest distance of a stream's token from PEFT's likeliest, of each check."""
    stream_neighbours: list[float] = field(default_factory=list)
    """The same with the weights of the version before."""
    streams_checked: int = 0
    streams_wrong: int = 0
    num_streamed: int = 0
    stream_tokens_per_s: float = 0.0
    step_s: float = 0.0
    """Mean time between two tokens of a stream."""
    versions_per_answer: list[int] = field(default_factory=list)
    """Swaps that each streamed answer outlived."""
    errors: list[str] = field(default_factory=list)

    def margin_error(self, max_difference: float) -> str | None:
        """Return what is wrong if the check can't tell a version from the one before it."""
        nearest = min((*self.neighbours, *self.stream_neighbours), default=math.inf)
        if nearest >= MIN_MARGIN * max_difference:
            return None
        return (
            f"the version before is only {nearest:.2f} away, and the bound is {max_difference:g}: "
            f"less than {MIN_MARGIN:g} times it"
        )


@dataclass(slots=True)
class Leftovers:
    """What 10,000 adapters left."""

    num_adapters: int
    num_used: int
    wall_s: float
    rows: dict[str, int]
    """More rows than before, by table; tables without any are left out."""
    usage_rows: int
    """More rows of usage, which are the invoice's."""
    held_bytes: float
    held_versions: float
    device_adapters: float
    host_adapters: float
    descriptors: int
    """More open descriptors of the server."""
    server_rss_growth: int
    engine_rss_growth: int

    @property
    def is_clean(self) -> bool:
        return not self.rows and not self.held_bytes and not self.held_versions


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One token, and how it came.

    Attributes:
        answered: what answered.
        cached: tokens of the prompt that were found in the prefix cache.
        waits_s: parts of the time, as the server says.
    """

    took_s: float
    answered: str
    cached: int
    waits_s: dict[str, float]


def waits_s(server_timing: str) -> dict[str, float]:
    """Return the parts of a ``Server-Timing`` header, in seconds."""
    return {name: float(ms) / 1000 for name, ms in re.findall(r"(\w+);dur=([0-9.]+)", server_timing)}


class Trainer:
    """A tenant's connection that loads versions and asks for answers."""

    def __init__(self, server: Server, adapters: Adapters, vocab: int) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {server.key}"}
        self._client = httpx2.AsyncClient(base_url=server.url, headers=headers, limits=limits, timeout=TIMEOUT_S)
        self._adapters = adapters
        self._vocab = vocab

    async def __aenter__(self) -> Trainer:
        await self._client.get("/livez")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def prompt(self, seed: int) -> list[int]:
        """Random tokens, none of them a special one."""
        rng = random.Random(seed)
        return [rng.randrange(260, self._vocab) for _ in range(PROMPT_TOKENS)]

    async def load(self, name: str, number: int) -> float:
        """Load the adapter of this number in place, and return the seconds that it took.

        Raises:
            SystemExit: it is refused.
        """
        config, weights = self._adapters.files(number)
        start = time.perf_counter()
        answer = await self._client.post(
            "/load_lora_adapter_from_tensors",
            files={"config": config, "weights": weights},
            params={"lora_name": name, "ephemeral": "true", "load_inplace": "true"},
        )
        took_s = time.perf_counter() - start
        if answer.status_code != 200:
            raise SystemExit(f"{name} wasn't loaded: {answer.status_code} {answer.text[:500]}")
        return took_s

    async def unload(self, name: str) -> None:
        """Unload it.

        Raises:
            SystemExit: it is refused.
        """
        answer = await self._client.post("/unload_lora_adapter", json={"lora_name": name})
        if answer.status_code != 200:
            raise SystemExit(f"{name} wasn't unloaded: {answer.status_code} {answer.text[:500]}")

    async def first_token(self, name: str, prompt: Sequence[int]) -> FirstToken:
        """Ask for one token."""
        start = time.perf_counter()
        answer = await self._complete(name, prompt, 1)
        took_s = time.perf_counter() - start
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return FirstToken(
            took_s, answer.headers["x-loraserve-adapter"], cached, waits_s(answer.headers.get("server-timing", ""))
        )

    async def score(self, name: str, prompt: Sequence[int]) -> tuple[list[int], list[float], int]:
        """Ask for some greedy tokens.

        Returns:
            They, their log probabilities, and the number of cached tokens.
        """
        answer = (await self._complete(name, prompt, ANSWER_TOKENS, logprobs=0)).json()
        choice = answer["choices"][0]
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached

    async def answer(self, name: str, prompt: Sequence[int], num_tokens: int) -> tuple[str, list[int]]:
        """Return what answered, and its tokens."""
        answer = await self._complete(name, prompt, num_tokens)
        return answer.headers["x-loraserve-adapter"], answer.json()["choices"][0]["token_ids"]

    async def _complete(self, name: str, prompt: Sequence[int], num_tokens: int, **fields: Any) -> httpx2.Response:
        body = {"model": name, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self._client.post("/v1/completions", json={**body, "return_token_ids": True, **fields})
        if answer.status_code != 200:
            raise SystemExit(f"{name} wasn't answered: {answer.status_code} {answer.text[:500]}")
        return answer


class Bench:
    """One run of swaps beside streams."""

    def __init__(self, trainer: Trainer, scores: PeftScores, num_swaps: int, max_difference: float) -> None:
        self._trainer = trainer
        self._max_difference = max_difference
        self._scores = scores
        self._num_swaps = num_swaps
        self._version = 0
        """Version that a load has been answered for."""
        self._loading = 0
        """Version that is being loaded, or the same."""
        self._is_over = False
        self._streamed: deque[Streamed] = deque(maxlen=64)
        self.swaps = Swaps()

    async def run(self) -> Swaps:
        """Swap alone, then while the streams run."""
        for _ in range(NUM_ALONE):
            load_s, token = await self._swap()
            self.swaps.alone_load_s.append(load_s)
            self.swaps.alone_first_token_s.append(token.took_s)
        tasks = [asyncio.create_task(self._stream(i)) for i in range(NUM_STREAMS)]
        await asyncio.sleep(3.0)
        start, before = time.perf_counter(), self.swaps.num_streamed
        for done in range(1, self._num_swaps + 1):
            load_s, token = await self._swap()
            self.swaps.load_s.append(load_s)
            self.swaps.first_token_s.append(token.took_s)
            self.swaps.whole_s.append(load_s + token.took_s)
            for name, seconds in token.waits_s.items():
                self.swaps.waits_s.setdefault(name, []).append(seconds)
            prompt = self._trainer.prompt(-done)
            self.swaps.resident_s.append((await self._trainer.first_token(NAME, prompt)).took_s)
            if done % CHECK_EVERY == 0:
                await self._check()
            if done % 100 == 0:
                say(f"{done} swaps, first token p50 {figures.ms(percentile(self.swaps.first_token_s, 50))} ms …")
        took_s = time.perf_counter() - start
        self.swaps.stream_tokens_per_s = (self.swaps.num_streamed - before) * STREAM_TOKENS / took_s
        self.swaps.step_s = NUM_STREAMS / self.swaps.stream_tokens_per_s
        self._is_over = True
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                self.swaps.errors.append(f"a stream: {result!r}"[:300])
        await self._trainer.unload(NAME)
        unclear = self.swaps.margin_error(self._max_difference)
        if unclear is not None:
            self.swaps.errors.append(unclear)
        return self.swaps

    async def _swap(self) -> tuple[float, FirstToken]:
        """Load the next version and ask it; return the seconds of the load, and the token."""
        self._loading += 1
        load_s = await self._trainer.load(NAME, self._loading)
        self._version = self._loading
        # the same prompt for all versions: KV by name would answer it
        token = await self._trainer.first_token(NAME, self._trainer.prompt(0))
        self.swaps.num_stale += token.cached > 0
        self.swaps.num_wrong += token.answered != f"{NAME}@{self._version}"
        return load_s, token

    async def _check(self) -> None:
        """Compare the present version's log probabilities, and a stream's tokens, with PEFT's."""
        swaps, prompt = self.swaps, self._trainer.prompt(0)
        token_ids, logprobs, cached = await self._trainer.score(NAME, prompt)
        swaps.num_cached_again += cached > 0
        expected, neighbour = await asyncio.to_thread(
            lambda: [self._scores.logprobs(number, prompt, token_ids) for number in (self._version, self._version - 1)]
        )
        swaps.num_checked += 1
        swaps.differences.append(_largest(logprobs, expected))
        swaps.neighbours.append(_largest(logprobs, neighbour))
        swaps.num_wrong += swaps.differences[-1] > self._max_difference
        if self._streamed:
            one = self._streamed.popleft()
            swaps.streams_checked += 1
            gap, neighbour_gap = await asyncio.to_thread(
                lambda: [
                    self._scores.largest_gap(number, one.prompt, one.token_ids)
                    for number in (one.version, one.version - 1)
                ]
            )
            swaps.stream_gaps.append(gap)
            swaps.stream_neighbours.append(neighbour_gap)
            swaps.streams_wrong += gap > self._max_difference

    async def _stream(self, number: int) -> None:
        """Ask for one answer after the other; each keeps the version that it began on."""
        seed = 1_000_000 * (number + 1)
        while not self._is_over:
            seed += 1
            prompt, earliest = self._trainer.prompt(seed), self._version
            # the first answers end at different times
            num_tokens = STREAM_TOKENS if seed % 1_000_000 > 1 else STREAM_TOKENS * (number + 1) // NUM_STREAMS
            answered, token_ids = await self._trainer.answer(NAME, prompt, num_tokens)
            version = int(answered.rpartition("@")[2])
            # bound at some time between its sending and its end
            self.swaps.num_wrong += not earliest <= version <= self._loading
            self.swaps.num_streamed += 1
            self.swaps.versions_per_answer.append(self._version - version)
            self._streamed.append(Streamed(version, tuple(prompt), tuple(token_ids)))


def _largest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


async def come_and_go(trainer: Trainer, server: Server, num_adapters: int) -> Leftovers:
    """Load and unload so many ephemeral adapters, and return what they left."""
    await trainer.load("first", 0)
    await trainer.answer("first", trainer.prompt(1), 1)
    await trainer.unload("first")
    await asyncio.sleep(3.0)
    before, rss = _state(server), _memory(server)
    num_used, start = 0, time.perf_counter()

    async def one(number: int) -> None:
        nonlocal num_used
        name = f"e-{number}"
        await trainer.load(name, number)
        if number % 10 == 0:
            num_used += 1
            await trainer.answer(name, trainer.prompt(1), 1)
        await trainer.unload(name)

    for first in range(1, num_adapters + 1, 4):
        await asyncio.gather(*map(one, range(first, min(first + 4, num_adapters + 1))))
        if (first - 1) % 1000 == 0:
            say(f"{first - 1} adapters came and went …")
    wall_s = time.perf_counter() - start
    # usage is in the database, and memory is free, within a second
    await asyncio.sleep(5.0)
    after, now = _state(server), scrape(server)
    rows = more_rows(before, after)
    grown = _memory(server)
    return Leftovers(
        num_adapters=num_adapters,
        num_used=num_used,
        wall_s=wall_s,
        rows=left_rows(before, after),
        usage_rows=rows.get("usage_hours", 0),
        held_bytes=figures.total(now, "loraserve_shares_held", room="ephemeral_bytes"),
        held_versions=figures.total(now, "loraserve_shares_held", room="ephemeral_versions"),
        device_adapters=figures.total(now, "vllm:num_gpu_loaded_lora_adapters"),
        host_adapters=figures.total(now, "vllm:num_cpu_loaded_lora_adapters"),
        descriptors=rows.get("fds", 0),
        server_rss_growth=grown[0] - rss[0],
        engine_rss_growth=grown[1] - rss[1],
    )


def more_rows(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how many more rows each table has; those that have as many are left out."""
    return {table: after[table] - before[table] for table in after if after[table] != before[table]}


def left_rows(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the rows among them that adapters left."""
    return {table: count for table, count in more_rows(before, after).items() if not table.startswith(NO_LEFTOVERS)}


def _state(server: Server) -> dict[str, int]:
    """Rows of each table, and the server's open descriptors as ``fds``."""
    with contextlib.closing(sqlite3.connect(f"file:{server.data / 'registry.db'}?mode=ro", uri=True)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
    return rows | {"fds": len(os.listdir(f"/proc/{server.pid}/fd"))}


def _memory(server: Server) -> tuple[int, int]:
    """RSS of the server and of its engine, without what they share with others."""
    status = Path(f"/proc/{server.pid}/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE")
    return (int(status[1]) - int(status[2])) * page, engine_process(server).memory_info().rss


def run(options: argparse.Namespace) -> tuple[Swaps, Leftovers, int]:
    """The swaps, what the ephemeral adapters left, and an adapter's bytes."""
    # torch and PEFT take seconds to load
    from benchmarks.peft_scores import PeftScores

    size = SIZES[options.size]
    adapters = Adapters(size, ranks=(RANK,) * NUM_KINDS, targets=MODULES)
    # the many that come and go are small: their number is what counts
    small = Adapters(size, ranks=(1,), targets=("q_proj",))
    model = make_base(options.size)
    say(f"PEFT's base, {options.quantize} …")
    scores = PeftScores(model, adapters, options.quantize)
    with serve(model, options.quantize, flags=FLAGS) as server:

        async def measure() -> tuple[Swaps, Leftovers]:
            async with Trainer(server, adapters, size.vocab) as trainer:
                say(f"{options.swaps} swaps beside {NUM_STREAMS} streams …")
                swaps = await Bench(trainer, scores, options.swaps, MAX_DIFFERENCE[options.quantize]).run()
            async with Trainer(server, small, size.vocab) as trainer:
                say(f"{options.adapters} ephemeral adapters …")
                return swaps, await come_and_go(trainer, server, options.adapters)

        swaps, left = asyncio.run(measure())
    return swaps, left, adapters.num_bytes(0)


def times_table(swaps: Swaps) -> str:
    rows = [
        [words, *(figures.ms(percentile(seconds, p)) for p in (50, 90, 99, 100))]
        for words, seconds in (
            ("load, to its answer", swaps.load_s),
            ("**first token of the new version**, from there", swaps.first_token_s),
            ("both together", swaps.whole_s),
            *((f"of the first token, in the engine: {name}", seconds) for name, seconds in swaps.waits_s.items()),
            ("first token of a version that is there already", swaps.resident_s),
            ("load, without streams", swaps.alone_load_s),
            ("first token of the new version, without streams", swaps.alone_first_token_s),
        )
    ]
    return figures.table(["", "p50 ms", "p90 ms", "p99 ms", "max ms"], rows)


def text(options: argparse.Namespace, swaps: Swaps, left: Leftovers, num_bytes: int) -> str:
    outlived = swaps.versions_per_answer
    return f"""Size {options.size}, base {options.quantize}; {NUM_STREAMS} streams of {STREAM_TOKENS} tokens, greedy, \
on the name that is swapped; {options.swaps} versions of rank {RANK} on all seven linears ({num_bytes / 1e6:.1f} MB \
each), one load after the other; after each, one request of {PROMPT_TOKENS} tokens.

{times_table(swaps)}

- What a swap adds to a first token, at the median: \
**{1e3 * (percentile(swaps.first_token_s, 50) - percentile(swaps.resident_s, 50)):.1f} ms** ({BOUND_MS:.0f} at most). \
A step of the streams takes {figures.ms(swaps.step_s)} ms on this machine; a request waits for the end of one, and its \
token comes with the next.
- Stale KV: **{swaps.num_stale}** of {len(swaps.first_token_s)} first requests, all of one prompt; \
{swaps.num_cached_again} of {swaps.num_checked} second requests found it in the cache.
- Wrong version: **{swaps.num_wrong}**. Log probabilities of {swaps.num_checked} versions differ from PEFT's by \
{percentile(swaps.differences, 50):.1e} at the median and {percentile(swaps.differences, 100):.1e} at most; from those \
of the version before by {percentile(swaps.neighbours, 0):.2f} at least (the bound is \
{MAX_DIFFERENCE[options.quantize]:g}). Streams compared with PEFT, token by token: {swaps.streams_checked}, wrong: \
**{swaps.streams_wrong}**; a token falls short of PEFT's likeliest by {percentile(swaps.stream_gaps, 100):.1e} at \
most, and of the version before's by {percentile(swaps.stream_neighbours, 0):.2f} at least.
- The streams: {swaps.num_streamed} answers, {swaps.stream_tokens_per_s:.0f} tokens/s; an answer outlived \
{percentile(outlived, 50):.0f} swaps at the median and {percentile(outlived, 100):.0f} at most.
- {left.num_adapters} ephemeral adapters (rank 1), four at a time, each tenth used, in {left.wall_s:.0f} s; left: \
**{left.held_bytes:.0f} bytes** and {left.held_versions:.0f} versions in the server, {left.device_adapters:.0f} \
adapters on the device and {left.host_adapters:.0f} in the host cache, **{sum(left.rows.values())} rows** \
{left.rows or ""}(and {left.usage_rows} of usage, the invoice's), {left.descriptors:+d} descriptors; RSS \
{figures.mib(left.server_rss_growth)} MiB (server) and {figures.mib(left.engine_rss_growth)} MiB (engine) more.
- What went wrong: {"; ".join(swaps.errors) if swaps.errors else "nothing"}.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=sorted(SIZES))
    parser.add_argument("--quantize", default="none", choices=sorted(MAX_DIFFERENCE), help="format of the base")
    parser.add_argument("--quick", action="store_true", help="50 swaps and 500 ephemeral adapters")
    parser.add_argument("--swaps", type=int, help="versions (default: 1000)")
    parser.add_argument("--adapters", type=int, help="ephemeral adapters (default: 10000)")
    options = parser.parse_args(arguments)
    options.swaps = options.swaps or (50 if options.quick else 1000)
    options.adapters = options.adapters or (500 if options.quick else 10_000)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    swaps, left, num_bytes = run(options)
    page = text(options, swaps, left, num_bytes)
    title = "Swaps of a live adapter, and ephemeral ones"
    numbers = {"swaps": swaps, "left": left, "adapter_bytes": num_bytes}
    variant = "" if options.quantize == "none" else options.quantize
    reporting.finish("swaps", title, page, machine, options, arguments, variant=variant, **numbers)
    if swaps.num_stale or swaps.num_wrong or swaps.streams_wrong or swaps.errors or not left.is_clean:
        raise SystemExit("a swap or an ephemeral adapter isn't as it should be")


if __name__ == "__main__":
    main()
