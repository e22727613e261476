"""Decide for which requests of a step the draft base proposes, and how many tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraserve.engine.request import Request
from loraserve.engine.speculation.draft import DRAFTED, Rate, Rates
from loraserve.engine.speculation.draft_base import Drafted, DraftBase
from loraserve.engine.speculation.proposal import Proposal, ProposalSource
from loraserve.engine.speculation.step_costs import MAX_ROWS, StepCosts
from loraserve.memory.memory_plan import DRAFT_SEQUENCES

logger = logging.getLogger(__name__)

MAX_DRAFTED = 8
"""Tokens that the draft base proposes for a request in a step, at most."""
PAYBACK_TOKENS = 64
"""Tokens of a request within which a text that the draft base has to read first must pay."""
STALE_STEPS = 1024
"""Steps without the draft base after which what its passes cost is a guess again: a first one that
took long for another reason isn't the last.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
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
    """Ask the draft base where that is expected to give more tokens per second than anything else.

    A pass of it takes what passes took before; each token that it proposes for some requests takes
    one, and the step a row for each of them. The rates say how many are expected to be right.

    Attributes:
        seconds: spent in the draft base.
    """

    def __init__(self, base: DraftBase, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._base = base
        self._clock = clock
        self._costs = StepCosts()
        self._num_idle = 0
        self._is_broken = False

    def max_count(self, request: Request) -> int:
        """Return how many tokens a request may have: none, if the draft base can't read its text."""
        return 0 if self._is_broken else min(MAX_DRAFTED, self._base.max_count(request))

    def forget(self, request: Request) -> None:
        """Forget an ended request."""
        self._base.forget(request)

    def propose(
        self,
        candidates: Sequence[Candidate],
        chosen: Sequence[Proposal],
        costs: StepCosts,
        *,
        num_requests: int,
        room: int,
        min_gain: float,
    ) -> list[Proposal]:
        """Return a step's proposals, with the draft base's in the place of some that were found.

        Args:
            chosen: what was found in texts, and is made if the draft base isn't asked.
            costs: what steps take.
            room: rows that the step has for proposed tokens.
            min_gain: tokens per second with proposals, by those without, below which there are none.
        """
        asked, count = self._plan(candidates, chosen, costs, num_requests, room, min_gain)
        for one in candidates:
            if one not in asked:
                one.rate.note_unmade()
        if not asked:
            self._num_idle += 1
            if self._num_idle == STALE_STEPS:
                self._costs = StepCosts()
            return list(chosen)
        self._num_idle = 0
        said = self._ask(asked, count)
        return [
            *(proposal for proposal in chosen if not said.get(proposal.number)),
            *(
                Proposal(one.number, one.request, said[one.number], ProposalSource.DRAFT, DRAFTED, one.rates)
                for one in asked
                if said.get(one.number)
            ),
        ]

    def _plan(
        self,
        candidates: Sequence[Candidate],
        chosen: Sequence[Proposal],
        costs: StepCosts,
        num_requests: int,
        room: int,
        min_gain: float,
    ) -> tuple[list[Candidate], int]:
        """Return the candidates that the draft base is asked for, and how many tokens of each."""
        num_tokens = num_requests + sum(one.rate.expected(len(one.token_ids)) for one in chosen)
        num_rows = num_requests + sum(len(one.token_ids) for one in chosen)
        best = max(num_tokens / costs.of(num_rows), min_gain * num_requests / costs.of(num_requests))
        asked: list[Candidate] = []
        best_asked, best_count = 0, 0
        seconds = 0.0
        for one in sorted(candidates, key=lambda one: -one.rate.value)[:DRAFT_SEQUENCES]:
            asked.append(one)
            seconds += self._catch_up_s(one.request, costs)
            if one.lookup is not None:
                num_tokens -= one.lookup.rate.expected(len(one.lookup.token_ids))
                num_rows -= len(one.lookup.token_ids)
            pass_s = self._pass_s(len(asked), costs)
            for count in range(1, MAX_DRAFTED + 1):
                lengths = [min(count, each.max_count) for each in asked]
                if num_rows - num_requests + sum(lengths) > room:
                    break
                expected = num_tokens + sum(
                    each.rate.expected(length) for each, length in zip(asked, lengths, strict=True)
                )
                step_s = costs.of(num_rows + sum(lengths)) + seconds + count * pass_s
                if expected / step_s > best:
                    best, best_asked, best_count = expected / step_s, len(asked), count
        return asked[:best_asked], best_count

    def _pass_s(self, num_rows: int, costs: StepCosts) -> float:
        """Return what a pass takes, in the unit of steps' costs."""
        if self._costs.is_measured:
            return self._costs.of(num_rows)
        return costs.of(num_rows) * self._base.relative_size

    def _catch_up_s(self, request: Request, costs: StepCosts) -> float:
        """Return what reading a request's new text takes, spread over what it may still say."""
        # the last two are a pass like any other
        num_rows = self._base.num_behind(request) - 2
        if num_rows <= 0:
            return 0.0
        num_left = request.params.max_tokens - request.num_output_tokens
        return num_rows * self._pass_s(MAX_ROWS, costs) / MAX_ROWS / max(1, min(num_left, PAYBACK_TOKENS))

    def _ask(self, asked: Sequence[Candidate], count: int) -> dict[int, tuple[int, ...]]:
        """Return what the draft base says, by the number of the entry."""
        began = self._clock()
        going: list[Drafted] = []
        try:
            drafted = going = self._base.begin(
                [one.request for one in asked], [min(count, one.max_count) for one in asked]
            )
            while going:
                num_rows, started = sum(len(one.rows) for one in going), self._clock()
                going = self._base.advance(going)
                self._costs.note(num_rows, self._clock() - started)
        except Exception:
            # answers don't need it
            logger.exception("the draft base failed: it proposes nothing any more")
            self._is_broken = True
            return {}
        finally:
            self.seconds += self._clock() - began
        said = {one.request: tuple(one.said) for one in drafted}
        return {one.number: said.get(one.request, ()) for one in asked}
