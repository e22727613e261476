"""A sequence that is computed for its logits, like any request's: every row's are kept, and which tokens follow is settled beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraserve.types import RequestId, TokenOutput

NUM_DECODED = 3
"""How many of a probe's tokens are fed one at a time, as an answer's are."""


@dataclass(slots=True, eq=False)
class Probe:
    """
    Attributes:
        token_ids: the first are its prompt; the others are taken for what was sampled.
        has_own_step: whether the step that computes its prompt has no other rows than such probes'.
        output: the request's last, once it has ended.
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
        """What the request asks for, so that the last of the tokens is computed too."""
        return len(self.token_ids) - self.num_prompt_tokens + 1

    @property
    def num_captured(self) -> int:
        return len(self._rows)

    def next_token(self, position: int) -> int:
        """Return what stands at a position; after the last, anything."""
        return self.token_ids[position] if position < len(self.token_ids) else 0

    def capture(self, end: int, logits: Tensor) -> None:
        """Keep the logits of the tokens that end before position ``end``, [num_rows, vocab_size]."""
        start = end - logits.shape[0]
        for position, row in enumerate(logits, start):
            self._rows[position] = row

    def logits(self) -> Tensor | None:
        """Return every token's logits, [num_tokens, vocab_size] float32 in the host's memory; None if some weren't computed."""
        if len(self._rows) < len(self.token_ids):
            return None
        return torch.stack([self._rows[position] for position in range(len(self.token_ids))])
