"""Follow tokens with a matcher, also those that a request may sample next, and go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loraserve.errors import GrammarDeadEnd
from loraserve.text.grammar import dead_end_error, is_dead_end

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class MatcherFailed(Exception):
    """Report that a matcher, or the lexer that it shares, can't continue."""


Failure = MatcherFailed | GrammarDeadEnd


class GrammarCursor:
    """A matcher that may be ahead of its request's output.

    A matcher in an error allows the end-of-text token alone, as a complete answer's does. So each
    method checks whether it is in one before it returns what is allowed, and raises then: a cursor
    that has raised follows nothing more.

    The caller holds the lock of its grammar.

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
        """Consume tokens of the request's output, while none is ahead.

        Raises:
            MatcherFailed: the grammar forbids one of them, or the matcher is over a limit.
        """
        if not self.matcher.consume_tokens(list(token_ids)):
            raise self.failure()
        self.num_said += len(token_ids)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Note the request's next tokens, as far as it is ahead; forget the rest.

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
                raise self.failure()
            self.ahead += rest

    def try_token(self, token_id: int) -> bool:
        """Be ahead by one more token, if the grammar allows it; return whether it does.

        Raises:
            MatcherFailed: the matcher can't decide.
        """
        if self.matcher.try_consume_tokens([token_id]) != 1:
            self.ask()
            return False
        self.ahead.append(token_id)
        return True

    def forced(self, count: int) -> tuple[int, ...]:
        """Find the tokens that the grammar leaves no choice about, `count` at most.

        Other tokens may have the same text. A copy of the matcher looks for them, 30 µs for each
        thousand tokens of the answer: llguidance leaves the bytes that it finds in the matcher,
        which allows no special token from then on.
        """
        copy = self.matcher.deep_copy()
        # without a look at the bytes llguidance 1.9 finds no tokens
        token_ids = tuple(copy.compute_ff_tokens()[:count]) if copy.compute_ff_bytes() else ()
        return () if copy.is_error() else token_ids

    def compute_mask(self, buffer: npt.NDArray[np.uint32]) -> None:
        """Write which tokens are allowed next.

        Args:
            buffer: a bit for each token of tokenizer or logits.

        Raises:
            GrammarDeadEnd: none is.
            MatcherFailed: the matcher can't decide.
        """
        self.matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        self.ask()

    def ask(self) -> None:
        """Check that the matcher's result holds.

        Raises:
            GrammarDeadEnd: the grammar allows nothing after what it has consumed.
            MatcherFailed: it is in another error.
        """
        if self.matcher.is_error():
            raise self.failure()

    def failure(self) -> Failure:
        """Convert the matcher's message to the error that it is in."""
        message = self.matcher.get_error()
        return dead_end_error() if is_dead_end(message) else MatcherFailed(message)

    def _forget(self, count: int) -> None:
        """Forget the last tokens that it is ahead by."""
        if count:
            if not self.matcher.rollback(count):
                raise MatcherFailed(self.matcher.get_error() or "the matcher can't go back")
            del self.ahead[-count:]


def consume_together(
    executor: LLExecutor, behind: Sequence[tuple[GrammarCursor, Sequence[int]]]
) -> list[Failure | None]:
    """Consume tokens of several requests' output, as `GrammarCursor.consume` does for one.

    Return for each the error that its matcher is in, if it is.
    """
    failures: list[Failure | None] = [None] * len(behind)
    last: list[tuple[int, GrammarCursor, int]] = []
    for number, (cursor, token_ids) in enumerate(behind):
        try:
            cursor.consume(token_ids[:-1])
        except MatcherFailed as failure:
            failures[number] = failure
        else:
            last += [(number, cursor, token_id) for token_id in token_ids[-1:]]
    if last:
        are_consumed = executor.consume_token_par([(cursor.matcher, token_id) for _, cursor, token_id in last])
        for (number, cursor, _), is_consumed in zip(last, are_consumed, strict=True):
            if is_consumed:
                cursor.num_said += 1
            else:
                failures[number] = cursor.failure()
    return failures


def compute_masks_together(
    executor: LLExecutor, cursors: Sequence[GrammarCursor], rows: npt.NDArray[np.uint32]
) -> list[Failure | None]:
    """Write which tokens are allowed next, as `GrammarCursor.compute_mask` does for one.

    Return for each the error that its matcher is in, if it is: its row is meaningless then.

    Args:
        rows: [len(cursors), words of a mask]; written.
    """
    numbered = [(cursor.matcher, number) for number, cursor in enumerate(cursors)]
    executor.unsafe_compute_mask_ptr(numbered, rows.ctypes.data, rows[0].nbytes, len(rows))
    return [cursor.failure() if cursor.matcher.is_error() else None for cursor in cursors]


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
