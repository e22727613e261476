"""A request's part in one step, and what the step made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve.engine.request import Request, Status
from loraserve.types import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part in one step: tokens ``[start, end)`` are computed.

    It says what was so when the step was scheduled: the request may move on while the step runs.
    """

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool
    """Whether the step reaches the request's last token, so that its next one, at position `end`, can be chosen."""
    is_scored: bool
    """Whether the prompt tokens that its rows predict are scored."""
    epoch: int
    """How often the request had been preempted."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_base_tokens(self) -> int:
        """How many of its tokens, from the first, no adapter acts on."""
        activation = self.request.activation
        if activation is None:
            return self.num_tokens
        # of nearly all
        if activation.start <= self.start:
            return 0
        return min(activation.start - self.start, self.num_tokens)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.is_sampled and self.request.params.max_tokens > 0)

    @property
    def is_current(self) -> bool:
        """Whether the request still runs on the blocks that it had: it hasn't ended, nor started over since."""
        return self.request.status is Status.RUNNING and self.request.num_preemptions == self.epoch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the sampler made of one scheduled request.

    `token_id` is None when the request isn't at its last token yet, or asked for no tokens.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_finite: bool = True
    logits: Tensor | None = None
    """Of a probe's rows, [num_rows, vocab_size] float32 in the host's memory; they end with the entry's last."""


def take_part(request: Request, count: int) -> ScheduledRequest:
    """The request's next ``count`` tokens are computed by the step, and so is the one after them, if they are its last."""
    entry = ScheduledRequest(
        request,
        start=request.num_computed_tokens,
        num_tokens=count,
        is_sampled=count == request.num_pending_tokens,
        is_scored=request.wants_prompt_logprobs,
        epoch=request.num_preemptions,
    )
    request.num_computed_tokens = entry.end
    request.num_in_flight_tokens += entry.num_sampled_tokens
    return entry
