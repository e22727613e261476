"""What may be proposed for one request, and how often it was right."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraserve.engine.request import Request
from loraserve.engine.speculation.token_index import LONGEST, MATCH_LENGTHS, Match, TokenIndex

MAX_OWN_TOKENS = 1 << 14
"""Tokens of a request in which its own repetitions are found: its last ones, at least half of so
many."""
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 2.0
"""Share of proposed tokens that are taken to be right before any was verified, and the number of
tokens that this counts as.
"""
_DECAY = 0.97
"""Weight of what is known when one more token is verified: some 30 tokens count."""
MIN_PATIENCE, MAX_PATIENCE = 16, 1024
"""Proposals that aren't made, because they didn't pay, before one is tried again.

The number doubles with each that is wrong.
"""


@dataclass(slots=True)
class Rate:
    """Share of proposed tokens that were right."""

    accepted: float = 0.0
    verified: float = 0.0
    num_unmade: int = 0
    patience: int = MIN_PATIENCE

    @property
    def value(self) -> float:
        """Probability that a proposed token is right, if those before it are.

        It is that of a new request once its patience is over.
        """
        if self.num_unmade >= self.patience:
            return PRIOR_RATE
        return (self.accepted + PRIOR_RATE * PRIOR_WEIGHT) / (self.verified + PRIOR_WEIGHT)

    def note_unmade(self) -> None:
        """Note a proposal that wasn't made."""
        self.num_unmade += 1

    def note(self, num_proposed: int, num_accepted: int) -> None:
        """Note a proposal's result. Tokens after a wrong one say nothing."""
        num_verified = min(num_proposed, num_accepted + 1)
        decay = _DECAY**num_verified
        self.accepted = self.accepted * decay + num_accepted
        self.verified = self.verified * decay + num_verified
        self.num_unmade = 0
        self.patience = MIN_PATIENCE if num_accepted else min(MAX_PATIENCE, 2 * self.patience)


@dataclass(slots=True, eq=False)
class Draft:
    """A request's own index and rates.

    Attributes:
        index: the request's tokens so far.
    """

    request: Request
    index: TokenIndex = field(default_factory=lambda: TokenIndex(MAX_OWN_TOKENS))
    _num_indexed: int = 0
    _rates: dict[int, Rate] = field(default_factory=lambda: {length: Rate() for length in MATCH_LENGTHS})

    def find(self, history: TokenIndex | None) -> tuple[Match, TokenIndex] | None:
        """Return the longest match of the request's last tokens, its own before another's."""
        token_ids = self.request.token_ids
        if self._num_indexed < len(token_ids):
            self.index.add(token_ids[max(self._num_indexed, len(token_ids) - MAX_OWN_TOKENS) :])
            self._num_indexed = len(token_ids)
        last = token_ids[-LONGEST:]
        own = self.index.find(last)
        if history is not None and (own is None or own.length < LONGEST):
            other = history.find(last)
            if other is not None and (own is None or own.length < other.length):
                return other, history
        return None if own is None else (own, self.index)

    def rate(self, match: Match) -> Rate:
        """Return how often proposals after such a match were right."""
        return self._rates[match.length]
