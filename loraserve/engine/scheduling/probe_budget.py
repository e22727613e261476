"""How many of a step's rows are probes', where requests have rows in it too."""

from __future__ import annotations

from collections.abc import Sequence

from loraserve.engine.request import Request

PROBE_DIVISOR, MIN_PROBE_ROWS = 8, 4
"""Beside requests, a step has a probe's row for each so many of theirs, and so many at least: a certificate takes longer, and nobody's next token much."""

PROBE_PATIENCE = 4
"""So many steps with prompts in them, one after the other, have no probe's row: they are the longest already."""


class ProbeRows:
    """Counts the steps that probes stand back for."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        # steps without a probe's row, one after the other
        self._num_left_to_prompts = 0

    def of_next_step(self, running: Sequence[Request], *, has_news: bool) -> int:
        """
        Args:
            has_news: a request's prompt may begin in this step.
        """
        serving = [request for request in running if not request.is_internal]
        if not serving:
            return self._token_budget
        has_prompts = has_news or any(request.num_pending_tokens > 1 for request in serving)
        self._num_left_to_prompts = self._num_left_to_prompts + 1 if has_prompts else 0
        if has_prompts and self._num_left_to_prompts <= PROBE_PATIENCE:
            return 0
        self._num_left_to_prompts = 0
        return max(MIN_PROBE_ROWS, len(serving) // PROBE_DIVISOR)
