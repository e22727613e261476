"""Proposals for one request, and how often they were right."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraserve.engine.request import Request
from loraserve.engine.speculation.history import HistoryKey
from loraserve.engine.speculation.token_index import LONGEST, MATCH_LENGTHS, Match, TokenIndex, end_hashes

MAX_OWN_TOKENS = 1 << 14
"""Tokens of a request in which its own repetitions are found: its last ones, at least half of so
many."""
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 1.0
"""Share of proposed tokens that are taken to be right before any was verified, and the number of
tokens that this counts as.
"""
DRAFTED = 0
"""Stands for the draft base among the lengths of matches."""
DRAFTED_RATE = 0.8
"""Share of the draft base's tokens that are taken to be right before any was verified: a server
is started with one because it is good.
"""
FORCED = -1
"""Stands for a grammar among the lengths of matches."""
FORCED_RATE = 0.8
"""Share of the tokens that a grammar leaves no choice about that are taken to be right before any
was verified: the same text may have other tokens.
"""
_DECAY = 0.97
"""Weight of what is known when one more token is verified: some 30 tokens count."""
FRUITLESS_LOOKUPS, MAX_INTERVAL = 16, 8
"""Lookups in a row without an accepted token after which a request is looked at half as often, and
the most steps between two.

Bounds what speculation costs a text that doesn't repeat itself.
"""
MIN_PATIENCE, MAX_PATIENCE = 16, 1024
"""Proposals that aren't made, because they didn't pay, before one is tried again.

The number doubles with each that is wrong, and is halved by one that isn't.
"""


@dataclass(slots=True)
class Rate:
    """Share of proposed tokens that were right.

    Attributes:
        prior: what it is taken to be before any was verified.
        hope: what it is taken to be when proposals are tried again.
    """

    prior: float = PRIOR_RATE
    patience: int = MIN_PATIENCE
    hope: float = PRIOR_RATE
    accepted: float = 0.0
    verified: float = 0.0
    num_unmade: int = 0

    @property
    def value(self) -> float:
        """Probability that a proposed token is right, if those before it are.

        Once the patience is over it is as if nothing were known.
        """
        if self.num_unmade >= self.patience:
            return self.hope
        return (self.accepted + self.prior * PRIOR_WEIGHT) / (self.verified + PRIOR_WEIGHT)

    def expected(self, count: int) -> float:
        """Compute how many of that many proposed tokens are expected to be right."""
        rate = gain = self.value
        total = 0.0
        for _ in range(count):
            total += gain
            gain *= rate
        return total

    def note_unmade(self) -> None:
        """Note a proposal that wasn't made."""
        self.num_unmade += 1

    def note(self, num_proposed: int, num_accepted: int) -> None:
        """Note a proposal's result. Tokens after a wrong one prove nothing."""
        num_verified = min(num_proposed, num_accepted + 1)
        decay = _DECAY**num_verified
        self.accepted = self.accepted * decay + num_accepted
        self.verified = self.verified * decay + num_verified
        self.num_unmade = 0
        # a lucky guess among many wrong ones is no reason to try each of the next
        patience = self.patience // 2 if num_accepted else 2 * self.patience
        self.patience = min(MAX_PATIENCE, max(MIN_PATIENCE, patience))


class Rates:
    """Shares of proposed tokens that were right, by what proposed them.

    That is a match of one length, the draft base, or a grammar.

    Args:
        parent: rates of requests before it, from which its own begin; it learns what they learn.
    """

    def __init__(self, parent: Rates | None = None) -> None:
        self._parent = parent
        self._rates = {length: _first_rate(length, parent) for length in (*MATCH_LENGTHS, DRAFTED, FORCED)}

    def of(self, length: int) -> Rate:
        """Look up the rate of matches of one length, or of what is `DRAFTED` or `FORCED`."""
        return self._rates[length]

    def note(self, length: int, num_proposed: int, num_accepted: int) -> None:
        """Note a proposal's result."""
        self._rates[length].note(num_proposed, num_accepted)
        if self._parent is not None:
            self._parent.note(length, num_proposed, num_accepted)


def _first_rate(length: int, parent: Rates | None) -> Rate:
    hope = {DRAFTED: DRAFTED_RATE, FORCED: FORCED_RATE}.get(length, PRIOR_RATE)
    if parent is None:
        return Rate(hope, hope=hope)
    return Rate(parent.of(length).value, parent.of(length).patience, hope)


@dataclass(slots=True, eq=False)
class Draft:
    """A request's own index and rates.

    Attributes:
        index: the request's tokens so far.
    """

    request: Request
    history_key: HistoryKey
    rates: Rates
    index: TokenIndex = field(default_factory=lambda: TokenIndex(MAX_OWN_TOKENS))
    _num_indexed: int = 0
    _num_fruitless: int = 0
    _num_skipped: int = 0

    def is_due(self) -> bool:
        """Decide whether to look for matches in this step: not in each, if all were fruitless."""
        interval = min(MAX_INTERVAL, 1 << self._num_fruitless // FRUITLESS_LOOKUPS)
        self._num_skipped += 1
        if self._num_skipped < interval:
            return False
        self._num_skipped = 0
        self._num_fruitless += 1
        return True

    def note_fruit(self) -> None:
        """Note that a proposed token was right."""
        self._num_fruitless = 0

    def find(self, history: TokenIndex | None) -> tuple[Match, TokenIndex] | None:
        """Find the longest match of the request's last tokens, its own before another's."""
        token_ids = self.request.token_ids
        if self._num_indexed < len(token_ids):
            self.index.add(token_ids[max(self._num_indexed, len(token_ids) - MAX_OWN_TOKENS) :])
            self._num_indexed = len(token_ids)
        last = token_ids[-LONGEST:]
        hashes = end_hashes(last)
        own = self.index.find(hashes, last)
        if history is not None and (own is None or own.length < LONGEST):
            other = history.find(hashes, last)
            if other is not None and (own is None or own.length < other.length):
                return other, history
        return None if own is None else (own, self.index)
