"""Speculation over the simulated device: clients get what plain steps give them, whatever is
proposed, and however it ends.
"""

from __future__ import annotations

import random

import pytest

from loraserve.engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST
from loraserve.engine.speculation.draft import Rates
from loraserve.engine.speculation.proposal import Proposal, ProposalSource
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.step_costs import StepCosts
from loraserve.types import FinishReason, TenantId

from .conftest import make_ref
from .simulated import EOS, Received, Simulation
from .test_overlap import LENGTH, STOP, assert_same, play, random_schedule


class FlatCosts(StepCosts):
    """Steps that cost the same however many rows they have: all that is found is proposed."""

    def is_sure(self, num_rows: int, **_: int) -> bool:
        return True

    def of(self, num_rows: int) -> float:
        return 1.0


def eager() -> Speculation:
    speculation = Speculation()
    speculation.costs = FlatCosts()
    return speculation


class Oracle(Speculation):
    """Proposes what it is told for each request, right or wrong."""

    def __init__(self, texts: dict[str, list[int]], wrong: dict[str, int] | None = None) -> None:
        super().__init__()
        self.texts, self.wrong = texts, wrong or {}

    def propose(self, scheduled, budget):
        proposals = []
        for number, entry in enumerate(scheduled):
            request = entry.request
            known = request.num_output_tokens
            token_ids = self.texts[request.request_id][known : min(known + 5, request.params.max_tokens - 1)]
            at = self.wrong.get(request.request_id, 1000) - known
            token_ids = [token_id + (place == at) for place, token_id in enumerate(token_ids)]
            if known and token_ids and len(token_ids) <= budget:
                budget -= len(token_ids)
                proposals.append(Proposal(number, request, tuple(token_ids), ProposalSource.REQUEST, 8, Rates()))
        return proposals


def told(*, max_tokens: int = 20, vocab: int = 50, **params) -> list[int]:
    simulation = Simulation(overlap=False, vocab=vocab)
    simulation.add("a", [1, 2, 3], max_tokens=max_tokens, **params)
    simulation.run()
    return simulation.received["a"].token_ids


def test_step_yields_all_right_proposals_plus_next_token():
    text = told(ignore_eos=True)
    simulation = Simulation(overlap=False, speculation=Oracle({"a": text}))
    simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    given = []
    while simulation.engine.has_requests:
        given += [len(output.token_ids) for output in simulation.step()]
    assert simulation.received["a"] == Received(text, ending=LENGTH)
    assert given == [1, 6, 6, 6, 1]
    assert simulation.engine.stats().accepted_own_tokens == 15


@pytest.mark.parametrize("wrong", range(1, 8))
def test_tokens_after_wrong_token_are_dropped(wrong):
    text = told(ignore_eos=True)
    simulation = Simulation(overlap=False, speculation=Oracle({"a": text}, {"a": wrong}))
    simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    simulation.run()
    assert simulation.received["a"] == Received(text, ending=LENGTH)


def test_text_ending_among_accepted_tokens_stops_at_end():
    vocab = 8
    for seed in range(50):
        prompt = [seed, 1, 2]
        plain, ignoring = Simulation(overlap=False, vocab=vocab), Simulation(overlap=False, vocab=vocab)
        plain.add("a", prompt, max_tokens=20)
        ignoring.add("a", prompt, max_tokens=20, ignore_eos=True)
        plain.run()
        ignoring.run()
        text = ignoring.received["a"].token_ids
        simulation = Simulation(overlap=False, vocab=vocab, speculation=Oracle({"a": text}))
        simulation.add("a", prompt, max_tokens=20)
        simulation.run()
        assert simulation.received["a"] == plain.received["a"]
        assert simulation.received["a"].ending == (STOP if EOS in text else LENGTH)
        # the blocks on offer hold no token behind the end: `step` compares them with the device
        offered = simulation.engine._kv.prefix_cache._cached.values()
        ended = [*prompt, *plain.received["a"].token_ids]
        assert sum(len(cached.token_ids) for cached in offered) <= len(ended)


def test_non_finite_row_fails_request_when_reached():
    text = told(ignore_eos=True)

    def play_bad(speculation: Speculation | None) -> Received:
        simulation = Simulation(overlap=False, speculation=speculation)
        request_id = simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
        # the fourth of the first five proposed tokens
        simulation.device.bad = {(request_id, 3 + 5)}
        simulation.run()
        return simulation.received["a"]

    assert play_bad(Oracle({"a": text})) == play_bad(None)
    # never reached, since what was proposed before it is wrong: it fails nothing
    simulation = Simulation(overlap=False, speculation=Oracle({"a": text}, {"a": 2}))
    simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    seen = []
    simulation.device.fail_launch = lambda batch: seen.append([entry.end for entry in batch.entries])
    simulation.run()
    assert simulation.received["a"] == Received(text, ending=LENGTH)


def test_raising_step_is_recomputed_without_proposals():
    text = told(ignore_eos=True)
    simulation = Simulation(overlap=False, speculation=Oracle({"a": text}))
    simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)

    def fail(batch) -> None:
        if any(entry.proposed for entry in batch.entries):
            raise FloatingPointError("no")

    simulation.device.fail_launch = fail
    simulation.run()
    assert simulation.received["a"] == Received(text, ending=LENGTH)


def test_proposals_take_no_block_needed_by_requests():
    text = told(ignore_eos=True, max_tokens=40)
    texts = {f"r{i}": text for i in range(3)}
    plain, proposing = (
        Simulation(overlap=False, num_blocks=36, speculation=speculation) for speculation in (None, Oracle(texts))
    )
    for simulation in (plain, proposing):
        for name in texts:
            simulation.add(name, [1, 2, 3], max_tokens=40, ignore_eos=True)
        simulation.run()
    assert_same(proposing.received, plain.received)
    assert proposing.engine.stats().num_preemptions <= plain.engine.stats().num_preemptions


def test_accepted_tokens_cost_as_usual():
    text = told(ignore_eos=True)

    def charged(speculation: Speculation | None) -> float:
        simulation = Simulation(overlap=False, speculation=speculation)
        request_id = simulation.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
        scheduler = simulation.engine._scheduler
        flow = scheduler._fair_queue.flow(scheduler._requests[request_id])
        simulation.run()
        return flow.tenant.total_service

    plain = charged(None)
    assert plain == 3 * PROMPT_COST + 20 * OUTPUT_COST
    assert charged(Oracle({"a": text})) == pytest.approx(plain)
    speculation = Oracle({"a": text}, {"a": 3})
    assert charged(speculation) == pytest.approx(
        plain + (sum(speculation.num_proposed.values()) - sum(speculation.num_accepted.values())) * PROMPT_COST
    )


def test_request_for_single_token_gets_no_proposal():
    speculation = eager()
    simulation = Simulation(overlap=False, vocab=1, speculation=speculation)
    simulation.add("a", [0, 0, 0, 0], max_tokens=2)
    simulation.run()
    assert simulation.received["a"] == Received([0, 0], ending=LENGTH)
    assert speculation.num_drafts == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 60 else pytest.mark.campaign) for seed in range(1250)]
)
def test_random_schedules_equal_plain_steps_for_every_client(seed, overlap):
    schedule = random_schedule(seed)
    # few tokens: texts repeat, and guesses are often right, and often not
    options = {**schedule.options, "vocab": random.Random(seed).choice([1, 2, 3, 8])}
    plain = play(Simulation(overlap=False, **options), schedule, seed)
    speculation = eager()
    proposing = play(Simulation(overlap=overlap, speculation=speculation, **options), schedule, seed)
    assert_same(proposing, plain)


def test_random_schedules_have_right_and_wrong_proposals():
    speculation = eager()
    for seed in range(20):
        schedule = random_schedule(seed)
        play(Simulation(overlap=False, speculation=speculation, vocab=2, **schedule.options), schedule, seed)
    num_proposed, num_accepted = sum(speculation.num_proposed.values()), sum(speculation.num_accepted.values())
    assert 0.2 < num_accepted / num_proposed < 0.9
    assert speculation.num_accepted.keys() == {ProposalSource.REQUEST, ProposalSource.HISTORY}
    assert min(speculation.num_accepted.values()) > 10


@pytest.mark.parametrize("seed", range(10))
def test_replay_after_crash_continues_with_same_text(seed):
    rng = random.Random(seed)
    work = [
        (name, params | {"prompt_logprobs": None, "max_tokens": 12}) for name, params in random_schedule(seed).requests
    ]
    plain = Simulation(overlap=False, seed=seed, vocab=2)
    for name, params in work:
        plain.add(name, **params)
    plain.run()
    received = {name: Received() for name, _ in work}
    while any(got.ending is None for got in received.values()):
        simulation = Simulation(
            overlap=False, num_blocks=24, token_budget=16, seed=rng.randrange(100), vocab=2, speculation=eager()
        )
        for name, params in work:
            if received[name].ending is None:
                simulation.add(name, **params, output=tuple(received[name].token_ids))
        for _ in range(rng.randint(3, 8)):
            if simulation.engine.has_requests:
                simulation.step()
        for name, got in simulation.received.items():
            received[name].token_ids += got.token_ids
            received[name].logprobs += got.logprobs
            received[name].ending = got.ending
    assert received == plain.received


def test_ended_requests_leave_only_texts():
    speculation = eager()
    simulation = Simulation(overlap=False, speculation=speculation, vocab=2)
    for i in range(6):
        simulation.add(f"r{i}", [i], max_tokens=20)
    simulation.run()
    assert not speculation._drafts
    assert not speculation._made
    assert simulation.engine.stats().speculation_bytes == speculation._history.num_bytes > 0
    assert all(got.ending == (FinishReason.LENGTH, None, None) for got in simulation.received.values())


@pytest.mark.parametrize("is_running", [False, True], ids=["ended", "running"])
def test_requests_of_a_deleted_version_leave_no_text(is_running):
    speculation = eager()
    simulation = Simulation(overlap=False, speculation=speculation, vocab=2)
    for name, adapter in (("of one", "one"), ("of another", "other"), ("of the base", None)):
        simulation.add(name, [1, 2], adapter, max_tokens=20, ignore_eos=True)
    plain = Simulation(overlap=False, vocab=2)
    plain.add("of one", [1, 2], "one", max_tokens=20, ignore_eos=True)
    plain.run()
    if is_running:
        for _ in range(3):
            simulation.step()
    else:
        simulation.run()
    simulation.engine.forget_texts(TenantId("another"), "one", 1)
    simulation.engine.forget_texts(TenantId("t"), "one", 2)
    assert all(request.leaves_text for request in simulation.engine._scheduler.requests)
    simulation.engine.forget_texts(TenantId("t"), "one", 1)
    simulation.run()
    assert {digest for _, digest in speculation._history._indices} == {make_ref("other").digest, None}
    # it goes on to its end all the same
    assert simulation.received["of one"] == plain.received["of one"]
