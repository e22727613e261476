"""Overlapped steps: what clients get is what plain steps give them,
whatever happens while a step is in flight.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from loraserve.engine.execution.batch import build_batch
from loraserve.engine.execution.runner import DeviceLost
from loraserve.errors import InvariantViolation
from loraserve.types import FinishReason

from .simulated import EOS, VOCAB, Received, Simulation, next_token

STOP = (FinishReason.STOP, None, None)
LENGTH = (FinishReason.LENGTH, None, None)


@pytest.fixture(params=["eager", "lazy"])
def is_lazy(request) -> bool:
    return request.param == "lazy"


@pytest.fixture
def overlapped(is_lazy):
    def make(**options) -> Simulation:
        return Simulation(overlap=True, is_lazy=is_lazy, **options)

    return make


def tokens_of(prompt: list[int], count: int, adapter: int = 0) -> list[int]:
    """What the model says, EOS or not."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(adapter, tokens))
    return tokens[len(prompt) :]


def prompt_that_ends(after: int, length: int = 6) -> list[int]:
    """A prompt after which the model says EOS as its token number ``after``, and not before."""
    for first in range(100_000):
        prompt = [first, *range(1, length)]
        tokens = tokens_of(prompt, after)
        if tokens.count(EOS) == 1 and tokens[-1] == EOS:
            return prompt
    raise AssertionError("no such prompt")


def prompt_that_goes_on(count: int, length: int = 6, seed: int = 0) -> list[int]:
    """A prompt with ``count`` tokens after it, none of them EOS."""
    for first in range(seed * 1000, 100_000):
        prompt = [first, *range(1, length)]
        if EOS not in tokens_of(prompt, count):
            return prompt
    raise AssertionError("no such prompt")


def run_until(simulation: Simulation, name: str, count: int) -> None:
    while len(simulation.received[name].token_ids) < count:
        simulation.step()


def test_step_is_launched_before_previous_results_are_collected(overlapped):
    simulation = overlapped()
    simulation.add("a", prompt_that_goes_on(3), max_tokens=3)
    simulation.run()
    assert simulation.device.log == ["launch", "launch", "results", "launch", "results", "results"]


def test_plain_steps_leave_no_step_in_flight():
    simulation = Simulation(overlap=False)
    simulation.add("a", prompt_that_goes_on(3), max_tokens=3)
    simulation.run()
    assert simulation.device.log == ["launch", "results"] * 3


def test_row_is_fed_token_sampled_by_previous_step(overlapped):
    simulation = overlapped()
    # "a" sorts behind the base's rows once they share a batch
    simulation.add("a", [1, 2, 3], "r8", ignore_eos=True)
    for _ in range(8):
        simulation.step()
    simulation.add("b", prompt_that_goes_on(8))
    simulation.step()
    simulation.step()
    feeds = simulation.device.batches[-1].deferred_tokens
    assert (feeds.rows.tolist(), feeds.previous_entries.tolist()) == ([0, 1], [0, 1])
    assert simulation.device.batches[-2].deferred_tokens.previous_entries.tolist() == [0]
    simulation.run()
    assert simulation.received["b"].token_ids == tokens_of(prompt_that_goes_on(8), 8)


def test_unknown_token_without_sampling_step_is_invariant_violation():
    simulation = Simulation(overlap=True)
    simulation.add("a", [1, 2, 3], ignore_eos=True)
    simulation.step()
    scheduled = simulation.engine._scheduler.schedule()
    with pytest.raises(InvariantViolation, match="up to token 4; 1 of its tokens"):
        build_batch(scheduled, 4, simulation.pager.handle, None)
    # nor do two steps in a row
    scheduled = simulation.engine._scheduler.schedule()
    with pytest.raises(InvariantViolation, match="up to token 5; 2 of its tokens"):
        build_batch(scheduled, 4, simulation.pager.handle, simulation.device.batches[0])


def test_the_row_after_an_eos_is_dropped(overlapped):
    simulation = overlapped()
    prompt = prompt_that_ends(after=3)
    simulation.add("a", prompt, max_tokens=20)
    simulation.run()
    assert simulation.rows()["a"] == len(prompt) + 3
    assert simulation.received["a"] == Received(tokens_of(prompt, 3), ending=STOP)
    assert simulation.engine.stats().generation_tokens == 3


def test_results_of_dropped_row_are_no_prefix(overlapped):
    simulation = overlapped()
    # 5 + 3 tokens fill two blocks, and the dropped row writes the last of them
    prompt = prompt_that_ends(after=3, length=5)
    simulation.add("a", prompt, max_tokens=20)
    simulation.run()
    assert [cached.token_ids for cached in simulation.engine._kv.prefix_cache._cached.values()] == [tuple(prompt[:4])]


def test_block_is_offered_only_after_finite_step(overlapped):
    simulation = overlapped()
    # the row at position 7 fills the second block; its logits are bad, and it is in flight when the
    # one before is taken
    prompt = prompt_that_goes_on(9)
    request_id = simulation.add("a", prompt, max_tokens=20)
    simulation.device.bad = {(request_id, 8)}
    simulation.run()
    assert simulation.received["a"].token_ids == tokens_of(prompt, 2)
    assert simulation.received["a"].ending == (FinishReason.ERROR, None, "engine_error")
    assert [cached.token_ids for cached in simulation.engine._kv.prefix_cache._cached.values()] == [tuple(prompt[:4])]


def test_row_in_flight_behind_bad_logits_is_dropped(overlapped):
    simulation = overlapped()
    prompt = prompt_that_goes_on(9)
    bad, good = simulation.add("bad", [1, 2, 3], ignore_eos=True), simulation.add("good", prompt)
    simulation.device.bad = {(bad, 5), (bad, 6)}
    simulation.run()
    assert simulation.received[bad].ending == (FinishReason.ERROR, None, "engine_error")
    assert simulation.received[good] == Received(tokens_of(prompt, 8), ending=LENGTH)


def test_no_row_is_computed_beyond_last_allowed_token(overlapped):
    simulation = overlapped()
    simulation.add("a", prompt_that_goes_on(5), max_tokens=5)
    simulation.add("b", [3], max_tokens=0, prompt_logprobs=0)
    simulation.run()
    assert simulation.rows() == {"a": 6 + 4, "b": 1}
    assert (simulation.received["a"].ending, simulation.received["b"].ending) == (LENGTH, LENGTH)


def test_slot_frees_with_last_token_in_flight(overlapped):
    simulation = overlapped(max_num_seqs=1)
    for i in range(3):
        simulation.add(f"r{i}", prompt_that_goes_on(2, seed=i), max_tokens=2)
    simulation.run()
    names = [[str(entry.request.request_id) for entry in batch.entries] for batch in simulation.device.batches]
    assert names == [["r0"], ["r0"], ["r1"], ["r1"], ["r2"], ["r2"]]
    # and the device never waits for the host
    assert simulation.device.log == ["launch", *["launch", "results"] * 5, "results"]


def test_aborted_request_in_flight_is_drained_without_output(overlapped):
    simulation = overlapped()
    request_id = simulation.add("a", [1, 2, 3], "r8", ignore_eos=True, max_tokens=50)
    run_until(simulation, "a", 2)
    simulation.abort(request_id)
    stats = simulation.engine.stats()
    assert (stats.num_kv_blocks_used, simulation.pager.num_pins, stats.num_running) == (0, 0, 0)
    assert simulation.engine.has_requests
    assert simulation.step() == []
    assert not simulation.engine.has_requests
    simulation.check_idle()


def test_step_in_flight_is_collected_without_further_step(overlapped):
    simulation = overlapped()
    simulation.add("a", prompt_that_goes_on(1), max_tokens=1)
    simulation.pager.poll = lambda: []
    simulation.add("b", [1], "cold")
    assert simulation.step() == []
    simulation.abort("a")
    assert not simulation.engine.is_waiting
    simulation.step()
    assert simulation.engine.is_waiting


def test_request_preempted_in_flight_keeps_arriving_token(overlapped):
    simulation = overlapped(num_blocks=5)
    prompts = {"old": prompt_that_goes_on(10, length=7), "young": prompt_that_goes_on(10, length=7, seed=1)}
    for name, prompt in prompts.items():
        simulation.add(name, prompt, max_tokens=10)
    while simulation.engine.stats().num_preemptions == 0:
        simulation.step()
    # launched before it was preempted, and received after
    assert "young" not in [entry.request.request_id for entry in simulation.device.batches[-1].entries]
    assert "young" in [entry.request.request_id for entry in simulation.device.batches[-2].entries]
    assert simulation.received["young"].token_ids == tokens_of(prompts["young"], len(simulation.device.batches) - 1)
    assert simulation.engine._scheduler._requests["young"].num_computed_tokens == 0
    simulation.run()
    assert {name: got.token_ids for name, got in simulation.received.items()} == {
        name: tokens_of(prompt, 10) for name, prompt in prompts.items()
    }


def test_request_awaiting_last_token_yields_blocks_before_restarts(overlapped):
    simulation = overlapped(num_blocks=6)
    ending, going = prompt_that_goes_on(2, length=7), prompt_that_goes_on(7, length=15)
    simulation.add("ending", ending, max_tokens=2)
    simulation.add("going", going, max_tokens=7)
    simulation.run()
    assert simulation.engine.stats().num_preemptions == 1
    assert simulation.rows() == {"ending": 7 + 1, "going": 15 + 6}
    assert simulation.received["ending"].token_ids == tokens_of(ending, 2)
    assert simulation.received["going"].token_ids == tokens_of(going, 7)


def test_prompt_scores_are_complete_after_preemption_in_flight(is_lazy):
    def scores(overlap: bool, num_blocks: int) -> Received:
        simulation = Simulation(overlap=overlap, is_lazy=is_lazy, num_blocks=num_blocks, token_budget=6)
        simulation.add("first", prompt_that_goes_on(30, length=4), max_tokens=30)
        run_until(simulation, "first", 1)
        simulation.add("scored", list(range(11)), prompt_logprobs=0, max_tokens=3, ignore_eos=True)
        simulation.run()
        return simulation.received["scored"]

    whole = scores(overlap=False, num_blocks=64)
    assert len(whole.prompt_logprobs) == 11
    for num_blocks in range(9, 14):
        assert scores(overlap=True, num_blocks=num_blocks) == whole


def test_request_needing_history_runs_with_all_tokens_known(overlapped):
    plain = Simulation(overlap=False)
    simulation = overlapped()
    for each in (plain, simulation):
        each.add("penalised", [1, 2, 3], presence_penalty=1.0, ignore_eos=True, max_tokens=4)
        each.add("free", [4, 5, 6], ignore_eos=True, max_tokens=9)
        each.run()
    assert simulation.received == plain.received
    # overlapped again as soon as it has ended
    assert simulation.device.log[:8] == ["launch", "results"] * 4
    assert simulation.device.log[8:11] == ["launch", "launch", "results"]


def test_chunk_without_last_token_needs_no_results_first(overlapped):
    simulation = overlapped(token_budget=4)
    simulation.add("penalised", list(range(10)), presence_penalty=1.0, max_tokens=1)
    simulation.run()
    assert simulation.device.log == ["launch", "launch", "results", "launch", "results", "results"]


def test_raising_launch_fails_culprit_after_steps_in_flight(overlapped, caplog):
    simulation = overlapped()
    prompts = {f"r{i}": prompt_that_goes_on(8, seed=i) for i in range(5)}
    ends = prompt_that_ends(after=2)

    def fail(batch) -> None:
        if any(entry.request.request_id == "r2" and entry.end == 8 for entry in batch.entries):
            raise FloatingPointError("no")

    simulation.device.fail_launch = fail
    for name, prompt in prompts.items():
        simulation.add(name, prompt)
    # ends by the step in flight when the launch of the next one raises
    simulation.add("ends", ends)
    simulation.run()
    assert simulation.received["r2"] == Received(
        tokens_of(prompts["r2"], 2), ending=(FinishReason.ERROR, None, "engine_error")
    )
    assert simulation.received["ends"] == Received(tokens_of(ends, 2), ending=STOP)
    for name in ("r0", "r1", "r3", "r4"):
        assert simulation.received[name] == Received(tokens_of(prompts[name], 8), ending=LENGTH)


def test_innocent_request_survives_end_of_culprit(overlapped):
    simulation = overlapped()
    ends, goes_on = prompt_that_ends(after=2), prompt_that_goes_on(8)

    def fail(batch) -> None:
        if any(entry.request.request_id == "ends" and entry.end == 8 for entry in batch.entries):
            raise FloatingPointError("no")

    simulation.device.fail_launch = fail
    simulation.add("ends", ends)
    simulation.add("goes on", goes_on)
    simulation.run()
    assert simulation.received["goes on"] == Received(tokens_of(goes_on, 8), ending=LENGTH)
    assert simulation.received["ends"].ending == STOP


def test_raising_results_fail_culprit_despite_step_in_flight(overlapped):
    simulation = overlapped()
    prompts = {f"r{i}": prompt_that_goes_on(8, seed=i) for i in range(5)}

    def fail(batch) -> None:
        if any(entry.request.request_id == "r2" and entry.end == 8 for entry in batch.entries):
            raise FloatingPointError("no")

    simulation.device.fail_results = fail
    for name, prompt in prompts.items():
        simulation.add(name, prompt)
    simulation.run()
    assert simulation.received["r2"].ending == (FinishReason.ERROR, None, "engine_error")
    for name in ("r0", "r1", "r3", "r4"):
        assert simulation.received[name] == Received(tokens_of(prompts[name], 8), ending=LENGTH)


def test_token_of_failed_step_is_recomputed_after_preemption(overlapped):
    simulation = overlapped(num_blocks=5)
    prompts = {"old": prompt_that_goes_on(10, length=7), "young": prompt_that_goes_on(10, length=7, seed=1)}
    num_raised = 0

    def fail(batch) -> None:
        nonlocal num_raised
        if simulation.engine._scheduler.num_preemptions and not num_raised:
            num_raised += 1
            raise FloatingPointError("no")

    simulation.device.fail_results = fail
    for name, prompt in prompts.items():
        simulation.add(name, prompt, max_tokens=10)
    simulation.run()
    assert num_raised == 1
    assert {name: got.token_ids for name, got in simulation.received.items()} == {
        name: tokens_of(prompt, 10) for name, prompt in prompts.items()
    }


def test_a_lost_device_is_nobodys_fault(overlapped):
    simulation = overlapped()

    def fail(batch) -> None:
        raise DeviceLost("an illegal memory access")

    simulation.add("a", [1, 2, 3])
    simulation.device.fail_results = fail
    simulation.step()
    with pytest.raises(DeviceLost):
        simulation.step()
    assert simulation.received["a"] == Received()


def test_steps_are_counted_at_launch(overlapped):
    simulation = overlapped()
    simulation.add("a", prompt_that_goes_on(3), max_tokens=3)
    simulation.run()
    assert simulation.engine.stats().num_steps == 3


# whole schedules


@dataclass
class Schedule:
    """What comes, who goes away, what goes wrong, and on how little memory."""

    requests: list[tuple[str, dict[str, object]]]
    leaving: dict[str, int]
    """A client that goes away once it has so many tokens."""
    bad: set[tuple[str, int]]
    """The logits for this position of this request aren't finite."""
    raising: dict[str, int]
    """Steps raise that choose a token for this request at this position or later."""
    raises_at_launch: bool
    options: dict[str, int]


def random_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    has_penalties, has_scores = rng.random() < 0.2, rng.random() < 0.4
    schedule = Schedule([], {}, set(), {}, rng.random() < 0.5, {})
    for i in range(rng.randint(4, 14)):
        name = f"r{i}"
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
        params: dict[str, object] = {
            "prompt": shared[: rng.choice([0, 0, 8, 12])] + own,
            "adapter": rng.choice([None, None, "a", "b", "c"]),
            "max_tokens": rng.choice([1, 2, 5, 16, 24]),
            "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
            "ignore_eos": rng.random() < 0.5,
            "logprobs": rng.choice([None, None, 0]),
        }
        if has_penalties and rng.random() < 0.3:
            params["presence_penalty"] = 1.0
        if has_scores and rng.random() < 0.5:
            params |= {"prompt_logprobs": 0} | ({"max_tokens": 0} if rng.random() < 0.3 else {})
        schedule.requests.append((name, params))
        position = len(params["prompt"]) + rng.randint(0, 8)
        match rng.randrange(10):
            case 0:
                schedule.leaving[name] = rng.choice([0, 1, 3])
            case 1:
                schedule.bad.add((name, position))
            case 2:
                schedule.raising[name] = position
    schedule.options = {
        "num_blocks": rng.randint(13, 20),
        "max_num_seqs": rng.randint(1, 8),
        "token_budget": rng.choice([5, 8, 16, 64]),
        "seed": seed,
    }
    return schedule


def play(simulation: Simulation, schedule: Schedule, seed: int) -> dict[str, Received]:
    """Requests arrive while others run; clients go away once they have what they wanted."""
    rng = random.Random(seed)
    device = simulation.device

    def fail(batch) -> None:
        for entry in batch.entries:
            if entry.is_sampled and entry.end >= schedule.raising.get(entry.request.request_id, 1000):
                raise FloatingPointError("no")

    if schedule.raises_at_launch:
        device.fail_launch = fail
    else:
        device.fail_results = fail
    device.bad = schedule.bad
    coming, leaving = list(schedule.requests), dict(schedule.leaving)
    for _ in range(3000):
        if not coming and not simulation.engine.has_requests:
            simulation.check_idle()
            return simulation.received
        while coming and (rng.random() < 0.6 or not simulation.engine.has_requests):
            name, params = coming.pop(0)
            simulation.add(name, **params)
        for name, count in list(leaving.items()):
            got = simulation.received.get(name)
            if got is not None and len(got.token_ids) >= count and (count or rng.random() < 0.3):
                del leaving[name]
                simulation.abort(name)
        simulation.step()
    raise AssertionError("requests never ended")


def assert_same(overlapped: dict[str, Received], plain: dict[str, Received]) -> None:
    for name in plain:
        if ("abort",) in (plain[name].ending, overlapped[name].ending):
            # who goes away has a little more or less: what came before is the same
            shorter, longer = sorted((plain[name].token_ids, overlapped[name].token_ids), key=len)
            assert longer[: len(shorter)] == shorter, name
        else:
            assert overlapped[name] == plain[name], name


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_equal_plain_steps_for_every_client(seed, is_lazy):
    schedule = random_schedule(seed)
    plain = play(Simulation(overlap=False, **schedule.options), schedule, seed)
    overlapped = play(Simulation(overlap=True, is_lazy=is_lazy, **schedule.options), schedule, seed)
    assert_same(overlapped, plain)


@pytest.mark.parametrize("seed", range(10))
def test_replay_after_crash_continues_with_same_text(seed, is_lazy):
    rng = random.Random(seed)
    requests = random_schedule(seed).requests
    work = [(name, params | {"prompt_logprobs": None, "max_tokens": 12}) for name, params in requests]
    plain = Simulation(overlap=False, seed=seed)
    for name, params in work:
        plain.add(name, **params)
    plain.run()
    received = {name: Received() for name, _ in work}
    while any(got.ending is None for got in received.values()):
        simulation = Simulation(overlap=True, is_lazy=is_lazy, num_blocks=24, token_budget=16, seed=rng.randrange(100))
        for name, params in work:
            if received[name].ending is None:
                simulation.add(name, **params, output=tuple(received[name].token_ids))
        for _ in range(rng.randint(3, 12)):
            if simulation.engine.has_requests:
                simulation.step()
        for name, got in simulation.received.items():
            received[name].token_ids += got.token_ids
            received[name].logprobs += got.logprobs
            received[name].ending = got.ending
    assert received == plain.received
