"""What is proposed, and when nothing is."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.speculation.draft import MAX_PATIENCE, Rate, Rates
from loraserve.engine.speculation.proposal import ProposalSource
from loraserve.engine.speculation.speculation import MAX_PROPOSED, Speculation
from loraserve.engine.step_costs import MAX_ROWS, STALE_STEPS, StepCosts

from ..conftest import make_request

TEXT = random.Random(0).sample(range(1000), 40)


def decoding(tokens: list[int], num_prompt_tokens: int = 2, **options: object) -> Request:
    request = make_request(tokens=tokens, **{"max_tokens": 100, **options})
    request.num_prompt_tokens = num_prompt_tokens
    return request


def entry_of(request: Request) -> ScheduledRequest:
    end = len(request.token_ids)
    return ScheduledRequest(request, end - 1, 1, is_sampled=True, is_scored=False, epoch=0)


def propose(speculation: Speculation, *requests: Request, budget: int = 512) -> list[tuple[int, ...]]:
    scheduled = [entry_of(request) for request in requests]
    proposals = {proposal.number: proposal for proposal in speculation.propose(scheduled, budget)}
    for proposal in proposals.values():
        speculation.note_made(proposal)
    return [proposals[i].token_ids if i in proposals else () for i in range(len(requests))]


def verify(speculation: Speculation, request: Request, token_ids: tuple[int, ...], num_accepted: int) -> None:
    end = len(request.token_ids)
    entry = ScheduledRequest(request, end - 1, 1 + len(token_ids), True, False, 0, token_ids)
    speculation.note_result(entry, num_accepted)


def costing(speculation: Speculation, *costs: tuple[int, float]) -> Speculation:
    for num_rows, seconds in costs * 30:
        speculation.costs.note(num_rows, seconds)
    return speculation


FLAT = ((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (16, 1.0))
STEEP = tuple((rows, float(rows)) for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64))


def test_earlier_continuation_of_last_tokens_is_proposed():
    speculation = costing(Speculation(), *FLAT)
    (proposed,) = propose(speculation, decoding([*TEXT, *TEXT[:10]]))
    assert proposed == tuple(TEXT[10 : 10 + len(proposed)])
    assert 0 < len(proposed) <= MAX_PROPOSED


def test_repeating_text_is_proposed_to_repeat():
    speculation = costing(Speculation(), *FLAT)
    (proposed,) = propose(speculation, decoding([*TEXT, 1, 2, 1, 2, 1, 2]))
    assert proposed == (1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1)[: len(proposed)]
    assert len(proposed) > 2


def test_text_without_repetition_gets_no_proposal():
    assert propose(costing(Speculation(), *FLAT), decoding(list(range(50)))) == [()]


def test_proposal_is_shorter_than_remaining_answer():
    speculation = costing(Speculation(), *FLAT)
    tokens = [*TEXT, *TEXT[:10]]
    for left, most in ((1, 0), (2, 1), (3, 2)):
        request = decoding(tokens, max_tokens=len(tokens) - 2 + left)
        assert len(propose(speculation, request)[0]) <= most


def test_proposal_rows_fit_step_budget():
    speculation = costing(Speculation(), *FLAT)
    assert len(propose(speculation, decoding([*TEXT, *TEXT[:10]]), budget=2)[0]) <= 2
    assert propose(speculation, decoding([*TEXT, *TEXT[:10]]), budget=0) == [()]


def test_expensive_rows_stop_proposals():
    assert propose(costing(Speculation(), *STEEP), decoding([*TEXT, *TEXT[:10]])) == [()]


def test_full_step_gets_no_proposals():
    speculation = costing(Speculation(), *FLAT)
    requests = [decoding([*TEXT, *TEXT[:10]]) for _ in range(MAX_ROWS)]
    assert not any(propose(speculation, *requests))


def test_wrong_proposals_stop_and_are_retried_rarely():
    # a row costs a little
    speculation = costing(Speculation(), (1, 1.0), (2, 1.3), (4, 1.3), (8, 1.6), (16, 2.2))
    request, tried = decoding([*TEXT, *TEXT[:10]], max_tokens=10_000), []
    for step in range(3000):
        costing(speculation, (1, 1.0), (2, 1.3), (4, 1.3), (8, 1.6), (16, 2.2))
        (proposed,) = propose(speculation, request)
        if proposed:
            verify(speculation, request, proposed, 0)
            tried.append(step)
    assert tried[0] == 0
    assert len(tried) < 15
    gaps = [b - a for a, b in itertools.pairwise(tried[2:])]
    assert gaps == sorted(gaps)


def test_new_request_inherits_tenant_and_adapter_rates():
    costs = ((1, 1.0), (2, 1.3), (4, 1.3), (8, 1.6), (16, 2.2))
    speculation = costing(Speculation(), *costs)
    for _ in range(6):
        request = decoding([*TEXT, *TEXT[:10]])
        (proposed,) = propose(speculation, request)
        if proposed:
            verify(speculation, request, proposed, 0)
        speculation.end(request)
    assert propose(speculation, decoding([*TEXT, *TEXT[:10]])) == [()]
    assert propose(speculation, decoding([*TEXT, *TEXT[:10]], tenant="other")) != [()]


def test_right_proposals_grow():
    speculation = costing(Speculation(), *FLAT)
    lengths = []
    for _ in range(12):
        request = decoding([*TEXT, *TEXT[:10]])
        (proposed,) = propose(speculation, request)
        verify(speculation, request, proposed, len(proposed))
        speculation.end(request)
        lengths.append(len(proposed))
    assert lengths[-1] == MAX_PROPOSED


def test_foreign_texts_are_never_proposed():
    speculation = costing(Speculation(), *FLAT)
    speculation.end(decoding(TEXT, tenant="a", adapter="x"))
    prompt = [7, 7, 7, *TEXT[:10]]
    assert propose(speculation, decoding(prompt, tenant="b", adapter="x")) == [()]
    assert propose(speculation, decoding(prompt, tenant="a", adapter="y")) == [()]
    assert propose(speculation, decoding(prompt, tenant="a")) == [()]
    (proposed,) = propose(speculation, decoding(prompt, tenant="a", adapter="x"))
    assert proposed == tuple(TEXT[10 : 10 + len(proposed)]) != ()


def test_probes_prompts_and_slow_grammars_get_no_proposals():
    speculation = costing(Speculation(), *FLAT)
    tokens = [*TEXT, *TEXT[:10]]
    assert propose(speculation, decoding(tokens, num_prompt_tokens=len(tokens))) == [()]
    constrained = decoding(tokens)
    constrained.constraint = SimpleNamespace(may_look_ahead=False)  # type: ignore[assignment]
    assert propose(speculation, constrained) == [()]
    request = decoding(tokens)
    in_flight = ScheduledRequest(request, len(tokens), 1, is_sampled=True, is_scored=False, epoch=0)
    assert speculation.propose([in_flight], 100) == []


def test_all_indices_together_stay_within_bytes():
    speculation = costing(Speculation(max_bytes=200_000), *FLAT)
    requests = [decoding([*range(i, i + 900)], max_tokens=2000) for i in range(40)]
    propose(speculation, *requests)
    # an index that is begun within the budget may exceed it by what its text takes
    assert speculation.stats()["speculation_bytes"] <= 100_000 + 2 * 1024 * 20
    for request in requests:
        speculation.end(request)
    assert speculation.stats()["speculation_bytes"] <= 100_000
    assert not speculation._drafts


def test_sources_are_counted_apart():
    speculation = costing(Speculation(), *FLAT)
    speculation.end(decoding(TEXT))
    own, other = decoding([1, 2, *range(500, 520), *range(500, 508)]), decoding([3, 4, *TEXT[:10]])
    first, second = propose(speculation, own, other)
    verify(speculation, own, first, 1)
    verify(speculation, other, second, len(second))
    assert speculation.num_proposed == {ProposalSource.REQUEST: len(first), ProposalSource.HISTORY: len(second)}
    assert speculation.num_accepted == {ProposalSource.REQUEST: 1, ProposalSource.HISTORY: len(second)}


def test_rate_covers_last_tokens():
    rate = Rate()
    for _ in range(50):
        rate.note(5, 5)
    assert rate.value > 0.9
    for _ in range(100):
        rate.note(5, 0)
    assert rate.value < 0.1
    assert rate.patience == MAX_PATIENCE


def test_rates_update_parent_rate():
    parent = Rates()
    Rates(parent).note(4, 3, 0)
    assert parent.of(4).value < Rates().of(4).value == parent.of(8).value


@pytest.mark.parametrize("known", [(), ((1, 2.0),), ((8, 2.0),)])
def test_unknown_costs_grow_with_rows(known):
    costs = StepCosts()
    for num_rows, seconds in known:
        costs.note(num_rows, seconds)
    all_costs = [costs.of(num_rows) for num_rows in range(1, MAX_ROWS + 1)]
    assert all_costs == sorted(all_costs)
    assert all_costs[0] < all_costs[-1]


def test_step_delayed_by_foreign_work_counts_little():
    costs = StepCosts()
    for _ in range(20):
        costs.note(1, 1.0)
    costs.note(1, 100.0)
    assert costs.of(1) < 1.2


def test_single_measurement_has_little_weight():
    costs = StepCosts()
    costs.note(1, 1.0)
    # the first step of so many rows has its kernels made
    costs.note(4, 50.0)
    assert costs.of(4) < 1.5
    for _ in range(30):
        costs.note(4, 1.8)
    assert 1.7 < costs.of(4) < 1.9


def test_an_old_measurement_is_a_guess_again():
    costs = StepCosts()
    costs.note(2, 100.0)
    for _ in range(STALE_STEPS):
        costs.note(1, 1.0)
    assert costs.of(2) < 1.2


def test_step_over_request_limit_gets_no_proposals() -> None:
    text = [*TEXT, *TEXT[:10]]
    assert any(propose(costing(Speculation(max_requests=2), *FLAT), decoding(text), decoding(text)))
    crowd = [decoding(text) for _ in range(3)]
    assert not any(propose(costing(Speculation(max_requests=2), *FLAT), *crowd))
    assert any(propose(costing(Speculation(), *FLAT), *crowd))


@pytest.mark.parametrize("has_draft_base", [True, False])
def test_steps_after_proposals_are_no_plain_measurements(has_draft_base: bool) -> None:
    drafting = SimpleNamespace(seconds=0.0) if has_draft_base else None
    speculation = Speculation(drafting=drafting)  # type: ignore[arg-type]
    request = decoding(TEXT)
    plain = entry_of(request)
    proposing = ScheduledRequest(request, plain.start, 4, True, False, 0, (1, 2, 3))
    for _ in range(30):
        for entry, seconds in ((proposing, 2.0), (plain, 1.5), (plain, 1.5), (plain, 1.0), (plain, 1.0)):
            speculation.note_step([entry], seconds)
    assert (speculation.costs.of(1) < 1.01) is has_draft_base
    assert speculation.costs.of(4) == pytest.approx(2.0)
