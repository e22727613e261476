"""When the draft base is asked, for which requests, and for how many tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from loraserve.engine.request import Request
from loraserve.engine.speculation.draft import DRAFTED, Rates
from loraserve.engine.speculation.drafting import MAX_DRAFTED, MIN_PLAIN_STEPS, STALE_STEPS, DraftCandidate, Drafting
from loraserve.engine.speculation.proposal import Proposal, ProposalSource
from loraserve.engine.speculation.speculation import MIN_GAIN
from loraserve.engine.step_costs import MAX_ROWS, StepCosts

from ..conftest import make_request

STEPS = ((1, 10.0), (2, 10.5), (4, 11.0), (8, 12.0), (16, 14.0))
"""What steps of so many rows take, as the base of a CPU does."""


@dataclass
class _Said:
    request: Request
    goal: int
    said: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [0])


class FakeBase:
    """Takes what it is told for each pass, and says 0, 1, 2 …"""

    def __init__(self, pass_s: float) -> None:
        self.pass_s, self.now = pass_s, 0.0
        self.behind = 1
        self.num_rehearsals = 0
        self.asked: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def rehearse(self, num_sequences: int, num_rows: int) -> None:
        self.num_rehearsals += 1
        self.now += self.pass_s * (8 if num_rows == MAX_ROWS else 1)

    def max_count(self, request: Request) -> int:
        return 1000

    def num_behind(self, request: Request) -> int:
        return self.behind

    def begin(self, requests: Sequence[Request], counts: Sequence[int]) -> list[_Said]:
        self.asked.append((len(requests), max(counts)))
        return [_Said(request, count) for request, count in zip(requests, counts, strict=True)]

    def advance(self, drafted: Sequence[_Said]) -> list[_Said]:
        self.now += self.pass_s
        for one in drafted:
            one.said.append(len(one.said))
        return [one for one in drafted if len(one.said) < one.goal]

    def forget(self, request: Request) -> None:
        pass


def costs_of(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, seconds in steps * 30:
        costs.note(num_rows, seconds)
    return costs


def candidate(number: int = 0, *, right: float | None = None, lookup: Proposal | None = None) -> DraftCandidate:
    rates = Rates()
    if right is not None:
        for turn in range(200):
            rates.note(DRAFTED, 1, int(turn * right % 1 + right >= 1))
        # as if it had been asked all the time
        rates.of(DRAFTED).patience = 1000
    return DraftCandidate(number, make_request(max_tokens=200), rates, MAX_DRAFTED, lookup)


def found(number: int, length: int = 8) -> Proposal:
    rates = Rates()
    for _ in range(50):
        rates.note(8, 1, 1)
    return Proposal(number, make_request(), tuple(range(length)), ProposalSource.REQUEST, 8, rates)


def ask(base: FakeBase, *candidates: DraftCandidate, chosen: Sequence[Proposal] = (), room: int = 60) -> list[Proposal]:
    drafting = Drafting(base, clock=base.clock)
    return drafting.propose(
        candidates,
        chosen,
        costs_of(*STEPS),
        num_requests=max(1, len(candidates)),
        room=room,
        min_gain=MIN_GAIN,
    )


def test_better_draft_base_proposes_more_tokens():
    counts = []
    for right in (0.5, 0.8, 0.99):
        (proposal,) = ask(FakeBase(1.5), candidate(right=right))
        counts.append(len(proposal.token_ids))
        assert proposal.source is ProposalSource.DRAFT
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] <= MAX_DRAFTED


@pytest.mark.parametrize("base", [FakeBase(9.0), FakeBase(20.0)], ids=["nearly as slow", "slower"])
def test_draft_base_as_slow_as_base_is_unused(base):
    assert ask(base, candidate(right=0.99)) == []
    assert base.asked == []


def test_wrong_draft_base_is_paused_until_patience_ends():
    base, one = FakeBase(1.0), candidate(right=0.0)
    drafting, costs = Drafting(base, clock=base.clock), costs_of(*STEPS)
    asked = [bool(drafting.propose([one], [], costs, num_requests=1, room=60, min_gain=MIN_GAIN)) for _ in range(1002)]
    assert asked.index(True) == 1000


def test_requests_with_wrong_proposals_are_excluded():
    right, wrong = candidate(0, right=0.95), candidate(1, right=0.05)
    (proposal,) = ask(FakeBase(0.5), right, wrong)
    assert proposal.number == 0
    assert wrong.rate.num_unmade == 1
    assert right.rate.num_unmade == 0


def test_text_matches_are_replaced_only_by_better_drafts():
    good, bad = found(0), found(0, length=1)
    assert ask(FakeBase(3.0), candidate(right=0.9, lookup=good), chosen=[good]) == [good]
    (proposal,) = ask(FakeBase(0.5), candidate(right=0.99, lookup=bad), chosen=[bad])
    assert proposal.source is ProposalSource.DRAFT


def test_long_text_is_not_read_for_few_tokens():
    base, one = FakeBase(1.0), candidate(right=0.9)
    base.behind = 4000
    assert ask(base, one) != []
    one.request.params = msgspec.structs.replace(one.request.params, max_tokens=5)
    assert ask(base, one) == []
    base.behind = 20
    assert ask(base, one) != []


def test_proposed_rows_fit_step_budget():
    for room in range(1, 12):
        proposals = ask(FakeBase(0.1), candidate(0, right=0.99), candidate(1, right=0.99), room=room)
        assert sum(len(proposal.token_ids) for proposal in proposals) <= room


def test_draft_time_is_counted_and_remeasured_after_pause():
    base = FakeBase(20.0)
    drafting, costs, one = Drafting(base, clock=base.clock), costs_of(*STEPS), candidate(right=0.9)
    num_first = base.num_rehearsals
    assert drafting.seconds == 0.0
    base.pass_s = 1.0
    made = [drafting.propose([one], [], costs, num_requests=1, room=60, min_gain=MIN_GAIN) for _ in range(STALE_STEPS)]
    assert not any(made)
    assert base.num_rehearsals == 2 * num_first
    assert drafting.seconds > 0.0
    one.rate.num_unmade = 0
    assert drafting.propose([one], [], costs, num_requests=1, room=60, min_gain=MIN_GAIN) != []


def test_steps_without_draft_are_measured_first_and_periodically():
    base = FakeBase(1.0)
    drafting, costs = Drafting(base, clock=base.clock), StepCosts()
    plain = []
    for _ in range(200):
        plain.append(drafting.needs_plain_step(costs, 1))
        costs.note(1 if plain[-1] else 4, 10.0)
    assert plain[: MIN_PLAIN_STEPS + 1] == [True] * MIN_PLAIN_STEPS + [False]
    assert max(len(list(group)) for is_plain, group in itertools.groupby(plain) if not is_plain) < 72
    assert sum(plain) < 14


def test_draft_is_skipped_in_steps_over_request_limit():
    base = FakeBase(1.0)
    drafting = Drafting(base, max_requests=2, clock=base.clock)
    assert [drafting.takes(count) for count in (1, 2, 3)] == [True, True, False]
    assert [drafting.needs_plain_step(StepCosts(), count) for count in (1, 2, 3)] == [True, True, False]
