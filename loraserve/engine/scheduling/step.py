"""A step in the making: what it has room for, and who is in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, take_part
from loraserve.engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST, Share


@dataclass(slots=True)
class Step:
    """A step in the making.

    Attributes:
        budget: tokens that it still has room for.
        num_places: requests that may run.
        num_prompt_tokens: those of requests that have more than one token to go.
        preempted: who was put back for others, and isn't admitted again yet.
        is_short: whether blocks ran out.
        num_probe_rows: that it still has room for.
        away: shares whose adapter isn't there, as the pager has said in this step.
    """

    now_s: float
    budget: int
    num_probe_rows: int
    num_places: int = 0
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_prompt_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    is_short: bool = False
    away: set[Share] = field(default_factory=set)

    def room(self, request: Request) -> int:
        """Return how many of the request's tokens the step has room for."""
        return min(self.budget, self.num_probe_rows) if request.is_internal else self.budget

    def take_part(self, request: Request, count: int) -> None:
        """The request's next ``count`` tokens are in the step, and charged to who wants them."""
        entry = take_part(request, count)
        self.scheduled.append(entry)
        self.budget -= count
        if request.is_internal:
            self.num_probe_rows -= count
        if count > 1:
            self.num_prompt_tokens += count
        reached = entry.end + entry.num_sampled_tokens
        charged = request.num_charged_tokens
        if reached > charged:
            num_of_prompt = max(0, min(reached, request.num_prompt_tokens) - charged)
            request.num_charged_tokens = reached
            request.share.charge(num_of_prompt * PROMPT_COST + (reached - charged - num_of_prompt) * OUTPUT_COST)

    def give_back(self, request: Request) -> None:
        """A part that the request had is somebody else's. Nothing of it was launched."""
        for number, entry in enumerate(self.scheduled):
            if entry.request is request:
                del self.scheduled[number]
                self.budget += entry.num_tokens
                self._undo(entry)
                break

    def _undo(self, entry: ScheduledRequest) -> None:
        """The request was to be in this step, and isn't."""
        request = entry.request
        request.num_computed_tokens = entry.start
        request.num_in_flight_tokens -= entry.num_sampled_tokens
        if entry.num_sampled_tokens:
            request.num_charged_tokens -= 1
            request.share.charge(-OUTPUT_COST)
