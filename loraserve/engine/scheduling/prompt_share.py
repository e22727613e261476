"""How many prompt tokens a step takes beside running streams, so that these go on at their pace."""

from __future__ import annotations

from collections.abc import Sequence

from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.step_costs import MAX_ROWS, PromptCosts, StepCosts
from loraserve.limits import UNBOUNDED_S

AUTO_FACTOR = 4.0
"""Times that a step with prompts may take what its streams' rows alone do."""
AUTO_FLOOR_S = 0.03
"""Seconds that it may take in any case: a gap that readers don't see."""
MIN_TOKENS = 16
"""Prompt tokens that a step may have whatever the target: a prompt goes on in each step."""
_GUESSED_TOKENS = 64
"""Prompt tokens beside streams until a step with a prompt was measured."""


class PromptShare:
    """Learn what steps take, and bound the prompt tokens of those that also carry streams.

    A step's seconds are taken to be those of its streams' rows, as measured in steps without
    prompts, and so many for each prompt token, as measured in steps with some.
    """

    def __init__(self, token_budget: int, target_s: float | None) -> None:
        """Begin without measurements.

        Args:
            token_budget: tokens of a step, at most.
            target_s: seconds that a step beside streams should take at most; None: `AUTO_FACTOR`
                times what it takes without prompts, and at least `AUTO_FLOOR_S`;
                `UNBOUNDED_S`: any.
        """
        self._token_budget, self._target_s = token_budget, target_s
        self._decode_costs = StepCosts()
        self._prompt_costs = PromptCosts()

    def tokens(self, num_rows: int, context: int = 0) -> int:
        """Return how many prompt tokens a step with `num_rows` rows of streams may have.

        Args:
            context: tokens of a prompt that are computed already.
        """
        if num_rows == 0 or (self._target_s is not None and self._target_s >= UNBOUNDED_S):
            return self._token_budget
        if not self._prompt_costs.is_measured or not self._decode_costs.is_measured:
            return min(_GUESSED_TOKENS, self._token_budget)
        base_s = self._decode_costs.of(min(num_rows, MAX_ROWS))
        target_s = max(AUTO_FLOOR_S, AUTO_FACTOR * base_s) if self._target_s is None else self._target_s
        left_s = max(0.0, target_s - base_s)
        tokens = int(self._prompt_costs.tokens_within(left_s, context)) // MIN_TOKENS * MIN_TOKENS
        return min(max(MIN_TOKENS, tokens), self._token_budget)

    def note(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Note what a step took that was computed alone."""
        if seconds <= 0:
            return
        num_rows = sum(entry.num_tokens for entry in scheduled if entry.is_decode)
        prompts = [entry for entry in scheduled if not entry.is_decode]
        num_prompt_tokens = sum(entry.num_tokens for entry in prompts)
        if not num_prompt_tokens:
            self._decode_costs.note(min(num_rows, MAX_ROWS), seconds)
            return
        if num_prompt_tokens < MIN_TOKENS:
            return
        if num_rows and self._decode_costs.is_measured:
            # at least a part: an old measurement of the rows may be too long
            seconds = max(0.25 * seconds, seconds - self._decode_costs.of(min(num_rows, MAX_ROWS)))
        contexts = sum(entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in prompts)
        self._prompt_costs.note(seconds / num_prompt_tokens, contexts / num_prompt_tokens)
