"""Entries of requests in a step, and their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loraserve.engine.request import Request, RequestStatus
from loraserve.errors import LoraserveError
from loraserve.types import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's tokens ``[start, end)``, which one step computes.

    Holds what was true when the step was scheduled: the request may move on while the step runs.
    """

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool
    """Whether the step computes the last token, and so samples the next one, at position `end`.

    Of a request that pools, no step does.
    """
    is_scored: bool
    """Whether the prompt tokens that the step's rows predict are scored."""
    epoch: int
    """`Request.num_preemptions` at that time."""
    proposed: tuple[int, ...] = ()
    """Guesses of the tokens after the last one that is known: the entry's last rows.

    They are counted in `num_tokens` and `end`, and not yet in what the request has computed.
    """

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_base_tokens(self) -> int:
        """Number of tokens, from the first, on which no adapter acts."""
        activation = self.request.activation
        if activation is None:
            return self.num_tokens
        # true of nearly all
        if activation.start <= self.start:
            return 0
        return min(activation.start - self.start, self.num_tokens)

    @property
    def pooled_tokens(self) -> tuple[int, int]:
        """Range of the entry's tokens, counted from `start`, whose hidden states are pooled."""
        pooler = self.request.pooler
        return (0, 0) if pooler is None else pooler.tokens_of(self.start, self.end, self.request.num_prompt_tokens)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the entry samples for certain."""
        return int(self.is_sampled and self.request.params.max_tokens > 0)

    @property
    def known_end(self) -> int:
        """Position up to which the entry's tokens are the request's own: `end` before proposals."""
        return self.end - len(self.proposed)

    @property
    def is_decode(self) -> bool:
        """Whether the request was one token short: the step gives it its next one."""
        return self.known_end - self.start == 1

    def without_proposed(self) -> ScheduledRequest:
        """Reduce the entry to the request's own tokens."""
        return replace(self, num_tokens=self.known_end - self.start, proposed=()) if self.proposed else self

    @property
    def is_current(self) -> bool:
        """Whether the request still runs on the same blocks: neither ended nor preempted."""
        return self.request.status is RequestStatus.RUNNING and self.request.num_preemptions == self.epoch


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one scheduled request.

    `token_ids` is empty if the entry doesn't reach the request's last token, or the request asked
    for no tokens. It holds more than one where proposed tokens are what was sampled in their
    places: those, and the one sampled after them.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_finite: bool = True
    is_deferred: bool = False
    """Whether the mask of allowed tokens came too late: nothing was sampled, and the entry is
    computed again.
    """
    error: LoraserveError | None = None
    """Reason why the request's grammar can't be followed any more, which ends the request."""
    hidden: Tensor | None = None
    """Hidden states of `ScheduledRequest.pooled_tokens`, after the last norm, on the host:
    [num_pooled, hidden_size], in the dtype of the activations.
    """
    logits: Tensor | None = None
    """Logits of a probe's rows up to the entry's end: [num_rows, vocab_size] float32 on host."""
