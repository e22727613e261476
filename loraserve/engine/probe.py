"""A sequence with fixed tokens that is computed like any request's, to keep its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraserve.types import RequestId, TokenOutput

NUM_DECODED = 3
"""Number of a probe's tokens that are computed one at a time, as an answer's are."""


@dataclass(slots=True, eq=False)
class Probe:
    """The tokens of a sequence, and the logits computed for them.

    Attributes:
        token_ids: prompt, then tokens that are used in place of sampled ones.
        has_own_step: whether steps that compute its prompt have rows of such probes alone.
        output: last output of its request, once that has ended.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    has_own_step: bool = False
    output: TokenOutput | None = None
    _rows: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        return max(1, len(self.token_ids) - NUM_DECODED)

    @property
    def max_tokens(self) -> int:
        """Return the request's `max_tokens`, by which the last of the tokens is computed too."""
        return len(self.token_ids) - self.num_prompt_tokens + 1

    @property
    def num_captured(self) -> int:
        return len(self._rows)

    def next_token(self, position: int) -> int:
        """Return the token at a position; 0 after the last."""
        return self.token_ids[position] if position < len(self.token_ids) else 0

    def capture(self, end: int, logits: Tensor) -> None:
        """Keep logits of the tokens before position ``end``: [num_rows, vocab_size]."""
        start = end - logits.shape[0]
        for position, row in enumerate(logits, start):
            self._rows[position] = row

    def logits(self) -> Tensor | None:
        """Return all logits, [num_tokens, vocab_size] float32 on host; None if some are missing."""
        if len(self._rows) < len(self.token_ids):
            return None
        return torch.stack([self._rows[position] for position in range(len(self.token_ids))])
