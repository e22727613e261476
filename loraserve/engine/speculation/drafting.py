"""Decide for which requests of a step the draft base proposes, and how many tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loraserve.engine.request import Request
from loraserve.engine.speculation.draft import DRAFTED, Rate, Rates
from loraserve.engine.speculation.draft_base import DraftBase
from loraserve.engine.speculation.proposal import Proposal, ProposalSource
from loraserve.engine.step_costs import MAX_ROWS, StepCosts
from loraserve.memory.memory_plan import DRAFT_SEQUENCES

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_DRAFT_REQUESTS = 2
"""Requests of a step beyond which a server doesn't use the draft base.

A busy machine's figures with four were 0.97 to 1.18 times the tokens per second for one that was
right four times in five, and 0.71 to 0.79 for one that never was.
"""
MAX_DRAFTED = 8
"""Tokens that the draft base proposes for a request in a step, at most."""
GAIN_PER_REQUEST = 0.05
"""Gain that each further request of a step adds to the one from which on the draft base is used.

With four, a draft base that was right four times in five gained nothing where 10% were expected.
"""
PAYBACK_TOKENS = 64
"""Tokens of a request within which a text that the draft base has to read first must pay."""
REHEARSALS = ((1, 1), (2, 1), (DRAFT_SEQUENCES, 1), (1, MAX_ROWS))
"""Passes by which what they take is measured: sequences, and rows of each."""
NUM_REHEARSALS = 3
MIN_PLAIN_STEPS, MAX_PLAIN_AGE = 4, 64
"""Steps without proposals that must be known, and the most steps since the last of them.

A gain by a draft base is a small difference of two costs: four drawn texts at once had 5% fewer
tokens per second with it where steps without it were measured at the beginning alone.
"""
STALE_STEPS = 1024
"""Steps without the draft base after which it is measured again, since something else may have kept
the processor busy the last time.
"""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """An entry of a step for which the draft base may propose.

    Attributes:
        number: of the entry in the step.
        max_count: tokens that it can have at most.
        lookup: what was found in texts instead.
    """

    number: int
    request: Request
    rates: Rates
    max_count: int
    lookup: Proposal | None = None

    @property
    def rate(self) -> Rate:
        return self.rates.of(DRAFTED)


class Drafting:
    """Use the draft base where that is expected to give more tokens per second than anything else.

    A pass of it takes what passes took before; each token that it proposes for some requests takes
    one, and the step a row for each of them. The rates predict how many are expected to be right.

    Attributes:
        seconds: spent in the draft base.
    """

    def __init__(
        self, base: DraftBase, *, max_requests: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin without requests, and measure what the draft base takes.

        Args:
            max_requests: requests of a step beyond which it isn't used; None: there may be as many
                as pay.
        """
        self.seconds = 0.0
        self._max_requests = max_requests
        self._base = base
        self._clock = clock
        self._num_idle = 0
        self._is_broken = False
        self._rehearse()

    def _rehearse(self) -> None:
        """Measure what passes take."""
        self._costs = StepCosts()
        for num_sequences, num_rows in NUM_REHEARSALS * REHEARSALS:
            started = self._clock()
            self._base.rehearse(num_sequences, num_rows)
            self._costs.note(num_sequences * num_rows, self._clock() - started)

    def takes(self, num_requests: int) -> bool:
        """Check whether the draft base may be used in a step of that many requests."""
        return not self._is_broken and (self._max_requests is None or num_requests <= self._max_requests)

    def needs_plain_step(self, costs: StepCosts, num_requests: int) -> bool:
        """Decide whether a step must have no proposals, to measure the time to compare with."""
        return self.takes(num_requests) and not costs.is_sure(
            num_requests, min_count=MIN_PLAIN_STEPS, max_age=MAX_PLAIN_AGE
        )

    def max_count(self, request: Request) -> int:
        """Compute how many tokens a request may have: none, if the draft base can't read it."""
        return min(MAX_DRAFTED, self._base.max_count(request))

    def forget(self, request: Request) -> None:
        """Forget an ended request."""
        self._base.forget(request)

    def propose(
        self,
        candidates: Sequence[DraftCandidate],
        chosen: Sequence[Proposal],
        costs: StepCosts,
        *,
        num_requests: int,
        room: int,
        min_gain: float,
    ) -> list[Proposal]:
        """Choose a step's proposals, with the draft base's in the place of some that were found.

        Args:
            chosen: what was found in texts, and is made if the draft base isn't used.
            costs: what steps take.
            room: rows that the step has for proposed tokens.
            min_gain: tokens per second with proposals, by those without, that are the least.
        """
        asked, count = self._plan(candidates, chosen, costs, num_requests, room, min_gain)
        for one in candidates:
            if one not in asked:
                one.rate.note_unmade()
        if not asked:
            self._num_idle += 1
            if self._num_idle % STALE_STEPS == 0:
                self._timed(self._rehearse)
            return list(chosen)
        self._num_idle = 0
        said = self._timed(lambda: self._ask(asked, count)) or {}
        drafted = [
            Proposal(one.number, one.request, said[one.number], ProposalSource.DRAFT, DRAFTED, one.rates)
            for one in asked
            if said.get(one.number)
        ]
        # what was found for a request may be longer than what was planned in its place
        made = []
        for proposal in (*drafted, *(proposal for proposal in chosen if not said.get(proposal.number))):
            if len(proposal.token_ids) <= room:
                room -= len(proposal.token_ids)
                made.append(proposal)
        return made

    def _plan(
        self,
        candidates: Sequence[DraftCandidate],
        chosen: Sequence[Proposal],
        costs: StepCosts,
        num_requests: int,
        room: int,
        min_gain: float,
    ) -> tuple[list[DraftCandidate], int]:
        """Choose the candidates that the draft base drafts for, and how many tokens of each."""
        num_tokens = num_requests + sum(one.rate.expected(len(one.token_ids)) for one in chosen)
        num_rows = num_requests + sum(len(one.token_ids) for one in chosen)
        min_gain += GAIN_PER_REQUEST * (num_requests - 1)
        best = max(num_tokens / costs.of(num_rows), min_gain * num_requests / costs.of(num_requests))
        rates = [(one.rate.value, one) for one in candidates]
        if sum(rate for rate, _ in rates) <= best * self._costs.of(1):
            # not even its first pass, whose tokens are the likeliest, would pay
            return [], 0
        asked = [one for _, one in sorted(rates, key=lambda pair: -pair[0])[:DRAFT_SEQUENCES]]
        # tokens and rows of the first ones together, by the tokens that each is drafted for
        tokens, rows = [num_tokens] * (MAX_DRAFTED + 1), [num_rows] * (MAX_DRAFTED + 1)
        best_asked, best_count = 0, 0
        seconds = 0.0
        for num_asked, one in enumerate(asked, start=1):
            seconds += self._catch_up_s(one.request)
            rate, gain, gained = one.rate.value, 1.0, 0.0
            lost_rows, lost_tokens = 0, 0.0
            if one.lookup is not None:
                lost_rows = len(one.lookup.token_ids)
                lost_tokens = one.lookup.rate.expected(lost_rows)
            pass_s = self._costs.of(num_asked)
            for count in range(1, MAX_DRAFTED + 1):
                if count <= one.max_count:
                    gain *= rate
                    gained += gain
                tokens[count] += gained - lost_tokens
                rows[count] += min(count, one.max_count) - lost_rows
                if rows[count] - num_requests > room:
                    continue
                step_s = costs.of(rows[count]) + seconds + count * pass_s
                if tokens[count] / step_s > best:
                    best, best_asked, best_count = tokens[count] / step_s, num_asked, count
        return asked[:best_asked], best_count

    def _catch_up_s(self, request: Request) -> float:
        """Estimate what reading a request's new text takes, spread over its remaining tokens."""
        # the last two are a pass like any other
        num_rows = self._base.num_behind(request) - 2
        if num_rows <= 0:
            return 0.0
        num_left = request.params.max_tokens - request.num_output_tokens
        return num_rows * self._costs.of(MAX_ROWS) / MAX_ROWS / max(1, min(num_left, PAYBACK_TOKENS))

    def _ask(self, asked: Sequence[DraftCandidate], count: int) -> dict[int, tuple[int, ...]]:
        """Draft tokens with the draft base, by the number of the entry."""
        going = drafted = self._base.begin([one.request for one in asked], [min(count, one.max_count) for one in asked])
        while going:
            num_rows, started = sum(len(one.rows) for one in going), self._clock()
            going = self._base.advance(going)
            self._costs.note(num_rows, self._clock() - started)
        said = {one.request: tuple(one.said) for one in drafted}
        return {one.number: said.get(one.request, ()) for one in asked}

    def _timed(self, work: Callable[[], T]) -> T | None:
        """Run work of the draft base, and add up what that takes; None if it fails.

        Answers don't need it.
        """
        began = self._clock()
        try:
            return work()
        except Exception:
            logger.exception("the draft base failed: it proposes nothing any more")
            self._is_broken = True
            return None
        finally:
            self.seconds += self._clock() - began
