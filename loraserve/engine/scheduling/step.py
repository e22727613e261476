"""A step in the making: what it has room for, and the requests in it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST, AdapterFlow, FairQueue

PROBE_DIVISOR, MIN_PROBE_ROWS = 8, 4
"""Requests per row of internal ones in a step, and the least number of such rows.

Bounds what internal requests add to the time between tokens."""

PROBE_PATIENCE = 4
"""Cap on consecutive steps with prompts that have no row of internal requests."""


@dataclass(slots=True)
class Step:
    """A step in the making.

    Attributes:
        fair_queue: charged for scheduled tokens.
        token_budget: tokens that the step may have.
        num_internal_rows: how many of them internal requests may have.
        num_slots: requests that may run.
        scheduled: the requests in the step.
        num_prompt_tokens: tokens in the step of requests with more than one token to compute.
        preempted: requests that made room for others, and aren't admitted again in this step.
        is_out_of_blocks: whether a running request found no free KV block.
        absent: flows without a resident adapter, as the pager said during this step.
        budget: tokens that the step still has room for.
    """

    fair_queue: FairQueue
    now_s: float
    token_budget: int
    num_internal_rows: int
    num_slots: int = 0
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_prompt_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    is_out_of_blocks: bool = False
    absent: set[AdapterFlow] = field(default_factory=set)
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = self.token_budget

    @property
    def num_serving_rows(self) -> int:
        """Rows of tenants' requests."""
        return sum(entry.num_tokens for entry in self.scheduled if not entry.request.is_internal)

    @contextlib.contextmanager
    def limited_to(self, num_tokens: int) -> Iterator[None]:
        """Have room for at most so many more tokens within the block."""
        held_back = max(0, self.budget - num_tokens)
        self.budget -= held_back
        try:
            yield
        finally:
            self.budget += held_back

    def room(self, request: Request) -> int:
        """Return how many of the request's tokens the step has room for."""
        return min(self.budget, self.num_internal_rows) if request.is_internal else self.budget

    def add(self, request: Request, count: int) -> None:
        """Compute the request's next ``count`` tokens in this step, and charge them.

        If they are its last ones, the token after them is sampled.
        """
        entry = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_tokens=count,
            is_sampled=count == request.num_pending_tokens and request.pooler is None,
            is_scored=request.wants_prompt_logprobs,
            epoch=request.num_preemptions,
        )
        end, num_sampled = entry.end, entry.num_sampled_tokens
        request.num_computed_tokens = end
        request.num_in_flight_tokens += num_sampled
        self.scheduled.append(entry)
        self.budget -= count
        if request.is_internal:
            self.num_internal_rows -= count
        if count > 1:
            self.num_prompt_tokens += count
        reached = end + num_sampled
        charged = request.num_charged_tokens
        if reached > charged:
            num_of_prompt = max(0, min(reached, request.num_prompt_tokens) - charged)
            request.num_charged_tokens = reached
            cost = num_of_prompt * PROMPT_COST + (reached - charged - num_of_prompt) * OUTPUT_COST
            self.fair_queue.flow(request).charge(cost)

    def propose(self, number: int, token_ids: tuple[int, ...]) -> None:
        """Let an entry of the step compute proposed tokens too, behind its own.

        They aren't charged yet, and the request hasn't computed them as long as none is accepted.
        """
        entry = self.scheduled[number]
        num_tokens = entry.num_tokens + len(token_ids)
        self.scheduled[number] = dataclasses.replace(entry, num_tokens=num_tokens, proposed=token_ids)
        self.budget -= len(token_ids)

    def remove(self, request: Request) -> None:
        """Take the request out of the step, if it is in it: nothing of it was launched."""
        for number, entry in enumerate(self.scheduled):
            if entry.request is request:
                del self.scheduled[number]
                self.budget += entry.num_tokens
                request.num_computed_tokens = entry.start
                request.num_in_flight_tokens -= entry.num_sampled_tokens
                if entry.num_sampled_tokens:
                    request.num_charged_tokens -= 1
                    self.fair_queue.flow(request).charge(-OUTPUT_COST)
                break


class ProbeBudget:
    """Cap the rows of internal requests in steps that serve tenants.

    Steps with prompts have none of them, `PROBE_PATIENCE` in a row at most.
    """

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        # consecutive steps without a row of internal requests
        self._num_skipped = 0

    def rows_of_next_step(self, running: Sequence[Request], *, may_start: bool) -> int:
        """Return how many rows internal requests may have.

        Args:
            may_start: whether a tenant's request may start in this step.
        """
        serving = [request for request in running if not request.is_internal]
        if not serving:
            return self._token_budget
        has_prompts = may_start or any(request.num_pending_tokens > 1 for request in serving)
        self._num_skipped = self._num_skipped + 1 if has_prompts else 0
        if has_prompts and self._num_skipped <= PROBE_PATIENCE:
            return 0
        self._num_skipped = 0
        return max(MIN_PROBE_ROWS, len(serving) // PROBE_DIVISOR)
