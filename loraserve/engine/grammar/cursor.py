"""Follow tokens with a matcher, also such as a request may say next, and go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class MatcherFailed(Exception):
    """Report that a matcher, or the lexer that it shares, can't go on."""


class GrammarCursor:
    """A matcher that may be ahead of what its request has said.

    Whoever calls it holds the lock of its grammar.

    Attributes:
        matcher: llguidance's.
        num_said: output tokens of the request that it has consumed.
        ahead: tokens that it has consumed behind these, and may forget.
    """

    __slots__ = ("ahead", "matcher", "num_said")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_said = 0
        self.ahead: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Consume tokens that the request has said, while none is ahead.

        Raises:
            MatcherFailed: the grammar forbids one of them, or the matcher is over a limit.
        """
        if not self.matcher.consume_tokens(list(token_ids)):
            raise MatcherFailed(self.matcher.get_error())
        self.num_said += len(token_ids)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Note what the request has said next, as far as it is ahead; forget the rest.

        Raises:
            MatcherFailed: it can't go back.
        """
        num_same = _num_same(self.ahead, token_ids)
        if num_same < len(token_ids):
            self._forget(len(self.ahead) - num_same)
        del self.ahead[:num_same]
        self.num_said += num_same

    def go_to(self, ahead: Sequence[int]) -> None:
        """Be ahead by these tokens, which the grammar allows, and no others.

        Raises:
            MatcherFailed: it can't go back, or is over a limit.
        """
        num_same = _num_same(self.ahead, ahead)
        self._forget(len(self.ahead) - num_same)
        rest = list(ahead[num_same:])
        if rest:
            if not self.matcher.consume_tokens(rest):
                raise MatcherFailed(self.matcher.get_error())
            self.ahead += rest

    def try_token(self, token_id: int) -> bool:
        """Be ahead by one more token, if the grammar allows it; return whether it does."""
        if self.matcher.try_consume_tokens([token_id]) != 1:
            return False
        self.ahead.append(token_id)
        return True

    def forced(self, count: int) -> tuple[int, ...]:
        """Return the tokens that the grammar leaves no choice about, `count` at most.

        Other tokens may have the same text.
        """
        # without a look at the bytes llguidance 1.9 finds no tokens
        return tuple(self.matcher.compute_ff_tokens()[:count]) if self.matcher.compute_ff_bytes() else ()

    def compute_mask(self, buffer: npt.NDArray[np.uint32]) -> None:
        """Write which tokens are allowed next.

        Args:
            buffer: a bit for each token of tokenizer or logits.
        """
        self.matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)

    def _forget(self, count: int) -> None:
        """Forget the last tokens that it is ahead by."""
        if count:
            if not self.matcher.rollback(count):
                raise MatcherFailed(self.matcher.get_error() or "the matcher can't go back")
            del self.ahead[-count:]


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
