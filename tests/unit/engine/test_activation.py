"""Adapters that act from their invocation on: where that is, which rows of a step are theirs, and
whose KV blocks they share.
"""

from __future__ import annotations

import random

import pytest

from loraserve.engine.activation import find_activation, find_last
from loraserve.engine.execution.batch import build_batch
from loraserve.engine.scheduled import StepResult
from loraserve.errors import EngineError
from loraserve.memory.kv.prefix_cache import Activation
from loraserve.types import Digest, Residency

from .conftest import Harness, make_ref, make_request
from .simulated import Received, Simulation, digest_of, last_start, next_token

INVOCATION = (91, 92)
PROMPT = list(range(1, 25))
"""24 tokens, six blocks; none of them is the invocation's."""


def test_last_occurrence_is_found_at_any_position():
    # much of the whole looks like the part, until it doesn't
    rng = random.Random(0)
    num_found = 0
    for _ in range(5000):
        part = [int(rng.random() < 0.3) for _ in range(rng.randint(1, 12))]
        ends = [part[rng.randint(1, len(part)) :] for _ in range(6)]
        whole = [token for end in ends for token in (*end, *rng.choice([[], [0], [1]]))]
        assert find_last(part, whole) == last_start(tuple(part), whole), (part, whole)
        num_found += find_last(part, whole) is not None
    assert 1000 < num_found < 4000


@pytest.mark.parametrize(
    ("invocation", "prompt", "start"),
    [
        ((), [5, 6], 0),
        (INVOCATION, [5, 91, 92, 6], 1),
        (INVOCATION, [91, 92, 91, 92, 7], 2),
        (INVOCATION, [5, 91, 92], 1),
        (INVOCATION, [5, 6, 91], None),
        (INVOCATION, [92, 91], None),
        ((4, 4), [4, 4, 4], 1),
        (INVOCATION, [92], None),
    ],
)
def test_adapter_acts_from_last_invocation_on(invocation, prompt, start):
    wanted = None if start is None else Activation(Digest("a"), start)
    assert find_activation(Digest("a"), invocation, prompt) == wanted


# whose blocks are shared


@pytest.fixture
def harness() -> Harness:
    harness = Harness(num_blocks=200, token_budget=100)
    for name in ("a", "b"):
        harness.adapters.set(name, Residency.RESIDENT, INVOCATION)
    harness.adapters.set("plain", Residency.RESIDENT)
    return harness


def cached(harness: Harness, adapter: str | None, tokens: list[int], max_tokens: int = 1) -> int:
    """Run such a request alone; how many of its tokens were there already."""
    harness.add(make_request(adapter=adapter, tokens=tokens, max_tokens=max_tokens))
    return harness.run()[0].num_cached_tokens


def invoked_at(start: int, tail: int = 6) -> list[int]:
    return [*PROMPT[:start], *INVOCATION, *range(200, 200 + tail)]


@pytest.mark.parametrize(("start", "shared"), [(8, 8), (9, 8), (11, 8), (12, 12), (3, 0), (0, 0)])
def test_blocks_before_invocation_are_shared_with_base(harness, start, shared):
    assert cached(harness, None, PROMPT) == 0
    assert cached(harness, "a", invoked_at(start)) == shared
    assert cached(harness, None, invoked_at(start)) == shared

    other = Harness(num_blocks=200, token_budget=100)
    other.adapters.set("a", Residency.RESIDENT, INVOCATION)
    assert cached(other, "a", invoked_at(start)) == 0
    assert cached(other, None, PROMPT) == shared


def test_blocks_before_invocation_are_shared_among_activated_adapters(harness):
    assert cached(harness, "a", invoked_at(20)) == 0
    assert cached(harness, "b", invoked_at(20)) == 20
    assert harness.scheduler.base_prefix_tokens_hit == 20


def test_blocks_after_invocation_belong_to_adapter(harness):
    tokens = invoked_at(8, tail=12)
    for adapter in ("a", "b", None):
        cached(harness, adapter, tokens)
        assert cached(harness, adapter, tokens) == 20
    # what it has in common with the base, though more was found
    assert harness.scheduler.base_prefix_tokens_hit == 8 + 8 + 8


def test_always_active_adapter_shares_no_block(harness):
    assert cached(harness, None, PROMPT) == 0
    assert cached(harness, "plain", PROMPT) == 0
    assert cached(harness, "plain", invoked_at(20)) == 20
    assert cached(harness, "a", invoked_at(20)) == 20
    assert harness.scheduler.base_prefix_tokens_hit == 20


def test_new_version_has_own_blocks_after_invocation(harness):
    tokens = invoked_at(8, tail=12)
    cached(harness, "a", tokens)
    harness.adapters.set("a, uploaded again", Residency.RESIDENT, INVOCATION)
    assert cached(harness, "a, uploaded again", tokens) == 8


def test_generated_invocation_is_not_reused_by_later_prompts(harness):
    # the same 12 tokens under the same adapter, activated at 5 in the first and at 9 in the second
    first, rest = [*PROMPT[:5], *INVOCATION, 7], [8, *INVOCATION, 9]
    request = make_request(adapter="a", tokens=first, max_tokens=5)
    harness.add(request)
    for token in (*rest, 3):
        harness.step(token)
    assert request.token_ids == [*first, *rest, 3]
    assert cached(harness, "a", [*first, *rest, 3, 3]) == 4
    assert cached(harness, "a", [*first, *rest, 3, 3]) == 12


def test_activation_within_block_is_not_shared(harness):
    # the answer of the first says what the second is asked with, in the block in which both are
    # activated
    tokens = [1, 2, 3, 4, *INVOCATION]
    request = make_request(adapter="a", tokens=tokens, max_tokens=4)
    harness.add(request)
    for token in (*INVOCATION, 5, 6):
        harness.step(token)
    assert request.token_ids == [*tokens, *INVOCATION, 5, 6]
    assert cached(harness, "a", [*tokens, *INVOCATION, 5, 6]) == 4


def test_adapter_without_invocation_equals_base(harness):
    assert cached(harness, "a", PROMPT) == 0
    assert cached(harness, None, PROMPT) == 20
    assert cached(harness, "b", PROMPT) == 20
    harness.add(make_request(adapter="a", tokens=PROMPT))
    _, outputs = harness.step(is_finite=False)
    assert outputs[0].error_code == EngineError.code


def test_preempted_request_keeps_activation_despite_generated_invocation():
    harness = Harness(num_blocks=6, token_budget=16)
    harness.adapters.set("a", Residency.RESIDENT, INVOCATION)
    old, young = make_request(7, max_tokens=12), make_request(adapter="a", tokens=[1, 91, 92, 4, 5], max_tokens=12)
    harness.add(old, young)
    tokens = iter([91, 92] * 100)
    while young.num_preemptions == 0:
        scheduled = harness.schedule()
        harness.scheduler.update(scheduled, [StepResult((next(tokens),)) for _ in scheduled])
    assert young.activation == Activation(make_ref("a").digest, 1)
    harness.run()
    assert young.num_output_tokens == 12
    assert young.activation == Activation(make_ref("a").digest, 1)


# which rows are whose


def segments(harness: Harness, scheduled) -> list[tuple[str, int, int]]:
    names = {make_ref(name).digest: name for name in ("a", "b", "plain")}
    return build_batch(scheduled, 4, lambda digest: names[digest]).adapters


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (3, [[("a", 3, 4)], [("a", 0, 4)], [("a", 0, 3)]]),
        (4, [[], [("a", 0, 4)], [("a", 0, 3)]]),
        (6, [[], [("a", 2, 4)], [("a", 0, 3)]]),
        (9, [[], [], [("a", 1, 3)]]),
    ],
)
def test_base_rows_precede_adapter_rows_in_chunk(start, wanted):
    harness = Harness(token_budget=4)
    harness.adapters.set("a", Residency.RESIDENT, INVOCATION)
    harness.add(make_request(adapter="a", tokens=invoked_at(start, tail=9 - start)))
    assert [segments(harness, harness.step()[0]) for _ in range(3)] == wanted


def test_adapter_rows_are_single_slice_except_base_rows(harness):
    starts = {"plain": [0], "a": [0, 2, 0, 5], "b": [3]}
    requests = [
        make_request(adapter=name, tokens=invoked_at(start, tail=1)) for name, each in starts.items() for start in each
    ]
    harness.add(*requests, make_request(5), make_request(adapter="a", tokens=PROMPT[:5]))
    scheduled = harness.schedule()
    # ten rows of the base and of who isn't invoked; then "a", by its digest
    a = [("a", 10, 13), ("a", 15, 21), ("a", 26, 29)]
    assert segments(harness, scheduled) == [*a, ("b", 32, 35), ("plain", 35, 38)]


# whatever happens

INVOCATIONS = {"a": (1, 2), "b": (2,), "c": (1, 2, 1)}


def alone(adapter: str | None, prompt: list[int], count: int) -> list[int]:
    number = 0 if adapter is None else digest_of(make_ref(adapter).digest)
    if adapter in INVOCATIONS and last_start(INVOCATIONS[adapter], prompt) is None:
        number = 0
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(number, tokens) % 4)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_random_schedules_read_only_own_kv(is_lazy):
    # the device compares what each row reads with what its request would have computed alone
    num_preemptions = num_hits = num_replays = 0
    for seed in range(150):
        rng = random.Random(seed)
        stems = [[rng.randrange(4) for _ in range(14)] for _ in range(2)]
        work = {}
        for i in range(rng.randint(6, 16)):
            prompt = rng.choice(stems)[: rng.randint(1, 14)] + [rng.randrange(4) for _ in range(rng.randint(0, 3))]
            work[f"r{i}"] = (rng.choice([None, "plain", *INVOCATIONS, *INVOCATIONS]), prompt, rng.choice([1, 3, 12]))
        received = {name: Received() for name in work}
        while any(got.ending is None for got in received.values()):
            simulation = Simulation(
                overlap=rng.random() < 0.7,
                is_lazy=is_lazy,
                num_blocks=rng.randint(9, 16),
                max_num_seqs=rng.randint(1, 8),
                token_budget=rng.choice([3, 5, 8, 30]),
                seed=seed,
                vocab=4,
                invocations=INVOCATIONS,
            )
            coming = [name for name in work if received[name].ending is None]
            # sooner or later this engine crashes
            for _ in range(rng.choice([10, 30, 1000])):
                if coming and rng.random() < 0.7:
                    name = coming.pop(0)
                    adapter, prompt, max_tokens = work[name]
                    simulation.add(name, prompt, adapter, tuple(received[name].token_ids), max_tokens=max_tokens)
                if simulation.engine.has_requests:
                    simulation.step()
                elif not coming:
                    simulation.check_idle()
                    break
            stats = simulation.engine.stats()
            num_preemptions, num_hits = num_preemptions + stats.num_preemptions, num_hits + stats.base_prefix_tokens_hit
            for name, got in simulation.received.items():
                num_replays += got.ending is None and bool(got.token_ids)
                received[name].token_ids += got.token_ids
                received[name].ending = got.ending
        assert {name: got.token_ids for name, got in received.items()} == {
            name: alone(adapter, prompt, count) for name, (adapter, prompt, count) in work.items()
        }
    assert min(num_preemptions, num_hits, num_replays) > 100
