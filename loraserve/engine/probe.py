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
        token_ids: prompt, then tokens that are used in place of sampled ones; of a probe that
            answers the prompt, to which its answer is added.
        has_own_step: whether steps that compute its prompt have rows of such probes alone.
        output: last output of its request, once that has ended.
        start: first token whose logits are kept.
        is_wide: whether its logits have the columns of the adapter's tokens beyond the base's too.
        max_answer_tokens: tokens that are sampled, greedily and to an end-of-text token at most; 0:
            none is, the tokens are fixed.
    """

    request_id: RequestId
    token_ids: list[int]
    has_own_step: bool = False
    output: TokenOutput | None = None
    start: int = 0
    is_wide: bool = False
    max_answer_tokens: int = 0
    num_prompt_tokens: int = field(init=False)
    _rows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        fixed = len(self.token_ids) if self.max_answer_tokens or self.start else len(self.token_ids) - NUM_DECODED
        self.num_prompt_tokens = max(1, fixed)

    @classmethod
    def of_answer(cls, request_id: RequestId, prompt: Sequence[int], max_tokens: int) -> Probe:
        """Build a probe that answers a prompt, of which it keeps the answer's logits alone."""
        return cls(request_id, list(prompt), start=len(prompt) - 1, max_answer_tokens=max_tokens)

    @classmethod
    def of_text(cls, request_id: RequestId, token_ids: Sequence[int], start: int) -> Probe:
        """Build a probe of a text in one piece, of which it keeps logits from a token on."""
        return cls(request_id, list(token_ids), start=start)

    @property
    def max_tokens(self) -> int:
        """The request's `max_tokens`, by which the last of the tokens is computed too."""
        return self.max_answer_tokens or len(self.token_ids) - self.num_prompt_tokens + 1

    @property
    def num_captured(self) -> int:
        return len(self._rows)

    def next_token(self, position: int, likeliest: int) -> int:
        """Choose the token at a position; after the last, 0 or the answer's next one.

        Args:
            likeliest: token of the largest logit before the position.
        """
        if position < len(self.token_ids):
            return self.token_ids[position]
        if not self.max_answer_tokens:
            return 0
        self.token_ids.append(likeliest)
        return likeliest

    def capture(self, end: int, logits: Tensor) -> None:
        """Keep logits of the tokens before position ``end``: [num_rows, vocab_size]."""
        start = end - logits.shape[0]
        for position, row in enumerate(logits, start):
            if position >= self.start:
                # a copy, where the step's other rows aren't kept
                self._rows[position] = row.clone() if self.start else row

    def drop(self) -> None:
        """Free the logits."""
        self._rows.clear()

    def logits(self) -> Tensor | None:
        """Join the logits, [num_tokens, vocab_size] float32 on host; None if some are missing.

        Of an answer its last token has none.
        """
        end = len(self.token_ids) - (self.max_answer_tokens > 0)
        if any(position not in self._rows for position in range(self.start, end)):
            return None
        return torch.stack([self._rows[position] for position in range(self.start, end)])
