"""Load for a running server.

Requests are sent a fixed number at a time, or each at its own time whether earlier ones were
answered or not.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from loraserve import errors

if TYPE_CHECKING:
    from loraserve.sdk import AsyncClient

FIRST_TOKEN_ID = 3
"""Ids below are, in most vocabularies, words to the model rather than text."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Requests to send.

    Attributes:
        models: each in its turn.
        rate: requests a second, at random times of this mean; None: `concurrency` at a time.
        shared_tokens: of `prompt_tokens`, those that all prompts begin with.
    """

    models: tuple[str, ...]
    num_requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: int
    shared_tokens: int
    max_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same for the same seed."""
        drawn = random.Random(self.seed)  # noqa: S311

        def some(count: int) -> list[int]:
            return [drawn.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]

        shared = some(self.shared_tokens)
        return [shared + some(self.prompt_tokens - self.shared_tokens) for _ in range(self.num_requests)]

    def delays_s(self) -> list[float]:
        """Compute each request's due time from the start, in seconds.

        All are zero if there is no rate.
        """
        if self.rate is None:
            return [0.0] * self.num_requests
        drawn, at, times = random.Random(self.seed + 1), 0.0, []  # noqa: S311
        for _ in range(self.num_requests):
            times.append(at)
            at += drawn.expovariate(self.rate)
        return times


@dataclass(slots=True)
class Asked:
    """A request and its outcome. Instants are of `time.perf_counter`."""

    model: str
    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str = ""
    """Code of the failure; empty if it was answered to the end."""
    waits_ms: dict[str, float] = field(default_factory=dict)
    """The server's breakdown of the time to the first token."""

    @property
    def ttft_s(self) -> float:
        """Seconds since it was due: a client that lags behind doesn't hide its users' waiting."""
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds between tokens after the first; None where there is no second."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of measurements, in milliseconds; None where there are none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Spread:
        if not values_ms:
            return cls(None, None, None, None)
        ordered = sorted(values_ms)

        def percentile(percent: float) -> float:
            # nearest rank: the value that this percentage of all doesn't exceed
            return round(ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1], 3)

        mean = round(sum(ordered) / len(ordered), 3)
        return cls(mean, percentile(50), percentile(90), percentile(99))


@dataclass(frozen=True, slots=True)
class Figures:
    """Result of a run. Only whole answers count for tokens and times."""

    num_requests: int
    num_complete: int
    failures: dict[str, int]
    """Number of failures by code."""
    wall_s: float
    """Seconds from the first request's due time to the last token."""
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    latency_ms: Spread
    queue_ms: Spread
    """Part of the time to the first token spent in the queue."""
    adapter_ms: Spread
    """Part of the time to the first token spent waiting for its adapter's weights."""

    @classmethod
    def of(cls, asked: Sequence[Asked]) -> Figures:
        good = [one for one in asked if not one.failure]
        start = min((one.due_s for one in asked), default=0.0)
        wall_s = max((one.last_s for one in good), default=start) - start
        num_tokens = sum(one.num_tokens for one in good)
        return cls(
            num_requests=len(asked),
            num_complete=len(good),
            failures=dict(Counter(one.failure for one in asked if one.failure).most_common()),
            wall_s=round(wall_s, 3),
            requests_per_s=round(len(good) / wall_s, 3) if wall_s else 0.0,
            output_tokens=num_tokens,
            output_tokens_per_s=round(num_tokens / wall_s, 3) if wall_s else 0.0,
            prompt_tokens=sum(one.num_prompt_tokens for one in good),
            cached_tokens=sum(one.num_cached_tokens for one in good),
            ttft_ms=Spread.of([1e3 * one.ttft_s for one in good if one.num_tokens]),
            tpot_ms=Spread.of([1e3 * one.tpot_s for one in good if one.tpot_s is not None]),
            latency_ms=Spread.of([1e3 * (one.last_s - one.due_s) for one in good]),
            queue_ms=Spread.of([one.waits_ms["queue"] for one in good if "queue" in one.waits_ms]),
            adapter_ms=Spread.of([one.waits_ms["adapter"] for one in good if "adapter" in one.waits_ms]),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def measure(
    client: AsyncClient, plan: TrafficPlan, vocab_size: int, tell: Callable[[int], object] = lambda _: None
) -> list[Asked]:
    """Send the plan's requests and return the outcome of each; failures are outcomes, not errors.

    Args:
        client: one that doesn't try again by itself: a refusal is a result here.
        tell: called with how many have ended, after each.
    """
    prompts, delays_s = plan.prompts(vocab_size), plan.delays_s()
    done: list[Asked] = []
    turns = None if plan.rate is not None else anyio.CapacityLimiter(plan.concurrency)
    start_s = time.perf_counter()

    async def send(index: int) -> None:
        model, due_s = plan.models[index % len(plan.models)], start_s + delays_s[index]
        if turns is None:
            await anyio.sleep(max(0.0, due_s - time.perf_counter()))
            one = await ask(client, model, prompts[index], plan.max_tokens, due_s)
        else:
            async with turns:
                one = await ask(client, model, prompts[index], plan.max_tokens, time.perf_counter())
        done.append(one)
        tell(len(done))

    async with anyio.create_task_group() as tasks:
        for index in range(plan.num_requests):
            tasks.start_soon(send, index)
    return done


async def ask(client: AsyncClient, model: str, prompt: list[int], max_tokens: int, due_s: float) -> Asked:
    """Send one request and read its answer to the end."""
    one = Asked(model, due_s, num_prompt_tokens=len(prompt))
    try:
        async with await client.completions.create(
            model=model,
            prompt=prompt,
            stream=True,
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            stream_options={"include_usage": True},
        ) as stream:
            one.waits_ms = _server_timing(stream.answer.server_timing)
            async for chunk in stream:
                num_tokens = sum(len(getattr(choice, "token_ids", None) or ()) for choice in chunk.choices)
                if num_tokens:
                    one.last_s = time.perf_counter()
                    one.first_s = one.first_s or one.last_s
                    one.num_tokens += num_tokens
                if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                    one.num_cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        if not one.num_tokens:
            one.failure = "no_tokens"
    except errors.LoraserveError as error:
        one.failure = error.code
    return one


def _server_timing(header: str | None) -> dict[str, float]:
    """Parse ``queue;dur=1.5, adapter;dur=0`` as name → milliseconds."""
    found = {}
    for part in (header or "").split(","):
        name, _, duration = part.strip().partition(";dur=")
        try:
            found[name] = float(duration)
        except ValueError:
            continue
    return found
