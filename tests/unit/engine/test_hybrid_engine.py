"""The engine on bases whose layers keep recurrent states: what shares a step, chunks, preemption
and steps that are computed again change no token. transformers and PEFT are the oracles.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign

from loraserve.engine.engine import Engine
from loraserve.engine.execution.runner import FinishedStep
from loraserve.engine.scheduled import StepResult
from loraserve.errors import ConfigError
from loraserve.limits import MIB
from loraserve.memory.arena import Owner
from loraserve.model.states import state_bytes
from loraserve.types import FinishReason, TokenOutput

from .conftest import World, make_engines, save_modelled_world
from .test_engine import add, prompts, run

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "FalconH1": (
        {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 8, "mamba_chunk_size": 8},
        ["q_proj", "in_proj", "down_proj"],
    ),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        ["in_proj", "out_proj", "q_proj", "w1"],
    ),
    "Qwen3_5Text": (
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
        },
        ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "down_proj"],
    ),
}
"""transformers' config → fields of its own, and the linears that adapters change."""
NAMES = [None, "first", "second"]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    options, targets = FAMILIES[request.param]
    return save_modelled_world(
        request.param, tmp_path_factory.mktemp(request.param), {"num_key_value_heads": 2, **options}, targets
    )


@pytest.fixture
def make_engine(hybrid_world: World) -> Iterator[MakeEngine]:
    yield from make_engines(hybrid_world)


def test_mixed_batch_in_chunks_equals_peft(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    wanted = {}
    for i, prompt in enumerate(prompts(9)):
        name = NAMES[i % len(NAMES)]
        wanted[add(engine, hybrid_world, prompt, name)] = hybrid_world.expected(name, prompt, 12)
    assert run(engine) == wanted


def test_greedy_text_equals_generate(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine()
    wanted = {}
    for prompt in prompts(3, seed=4, low=5):
        with hybrid_world.model.disable_adapter(), torch.inference_mode():  # type: ignore[operator]
            ids = hybrid_world.model.generate(  # type: ignore[operator]
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=20,
                do_sample=False,
            )
        wanted[add(engine, hybrid_world, prompt, max_tokens=20)] = ids[0, len(prompt) :].tolist()
    assert run(engine) == wanted


def cached_tokens(engine: Engine, world: World, prompt: list[int], name: str | None = None) -> int:
    """Run a request whose text must be PEFT's; return how many of its tokens were cached."""
    outputs: list[TokenOutput] = []
    request_id = add(engine, world, prompt, name)
    assert run(engine, outputs)[request_id] == world.expected(name, prompt, 12)
    return outputs[0].num_cached_tokens


@pytest.mark.parametrize("budget", [23, 128])
def test_repeated_prompt_begins_from_snapshot(hybrid_world: World, make_engine: MakeEngine, budget: int) -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=budget)
    (prompt,) = prompts(1, seed=9, low=70, high=70)
    assert [cached_tokens(engine, hybrid_world, prompt, name) for name in (*NAMES, *NAMES)] == [0, 0, 0, 64, 64, 64]
    assert engine.stats().num_state_snapshots == 3


def test_conversation_begins_from_snapshot(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second, third = prompts(3, seed=10, low=35, high=35)
    assert cached_tokens(engine, hybrid_world, first, "first") == 0
    turn = [*first, *hybrid_world.expected("first", first, 12), *second]
    assert cached_tokens(engine, hybrid_world, turn, "first") == 32
    assert cached_tokens(engine, hybrid_world, turn + third, "first") == len(turn) // 16 * 16


def test_third_prompt_begins_from_shared_prefix(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine()
    (shared,) = prompts(1, seed=11, low=50, high=50)
    found = [cached_tokens(engine, hybrid_world, shared + tail) for tail in prompts(4, seed=12, low=20, high=30)]
    assert found == [0, 0, 48, 48]


def test_unfinished_prompt_leaves_no_snapshot(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    (prompt,) = prompts(1, seed=9, low=70, high=70)
    request_id = add(engine, hybrid_world, prompt)
    for _ in range(3):
        engine.step()
    engine.abort(request_id)
    assert engine.check() == []
    assert cached_tokens(engine, hybrid_world, prompt) == 0


def test_begun_request_unpins_snapshot(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine()
    (prompt,) = prompts(1, seed=9, low=70, high=70)
    assert cached_tokens(engine, hybrid_world, prompt) == 0
    add(engine, hybrid_world, prompt)
    outputs: list[TokenOutput] = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].num_cached_tokens == 64
    assert engine._kv.snapshots is not None
    assert not engine._kv.snapshots._pins
    assert engine.has_requests


def test_disabled_cache_counts_no_lookup(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_cache=False)
    (prompt,) = prompts(1, seed=9, low=70, high=70)
    assert [cached_tokens(engine, hybrid_world, prompt) for _ in range(2)] == [0, 0]
    assert engine.stats().prefix_tokens_queried == 0


@pytest.mark.usefixtures("quick_loads")
@pytest.mark.parametrize("seed", default_and_campaign(range(3), default=[1]))
def test_traffic_with_few_snapshots_changes_no_token(
    hybrid_world: World, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("loraserve.memory.memory_plan.SNAPSHOTS_PER_SLOT", 1)
    rng = random.Random(seed)
    engine = make_engine(max_num_batched_tokens=rng.choice([11, 23, 64]), max_num_seqs=3, max_model_len=128)
    stems = prompts(3, seed=seed, low=20, high=60)
    runner: Any = engine._pipeline._runner
    launch, calls = runner.launch, itertools.count(1)

    def late(batch: Any) -> Any:
        found = launch(batch)
        return found if next(calls) % 5 else FinishedStep([StepResult(is_deferred=True)] * len(batch.entries))

    monkeypatch.setattr(runner, "launch", late)
    wanted: dict[Any, Sequence[int]] = {}
    found: dict[Any, list[int]] = {}
    going: dict[Any, list[int]] = {}
    todo = 24
    while todo or engine.has_requests:
        if todo and rng.random() < 0.3:
            todo -= 1
            name = rng.choice(NAMES)
            prompt = rng.choice(stems)[: rng.choice([17, 33, 60])] + [rng.randrange(3) for _ in range(rng.randrange(9))]
            request_id = add(engine, hybrid_world, prompt, name)
            if rng.random() < 0.2:
                engine.abort(request_id)
            else:
                wanted[request_id] = hybrid_world.expected(name, prompt, 12)
                going[request_id] = prompt
        for output in engine.step() if engine.has_requests else ():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None and output.request_id in going:
                # a later turn
                stems.append([*going.pop(output.request_id), *found[output.request_id], 7][:100])
        assert engine.check() == []
    assert {name: found[name] for name in wanted} == wanted
    assert engine.stats().prefix_tokens_hit > 0
    assert engine.stats().state_snapshot_evictions > 0


@pytest.mark.usefixtures("quick_loads")
def test_preemption_changes_no_token(hybrid_world: World, make_engine: MakeEngine) -> None:
    probing = make_engine(max_num_seqs=8)
    add(probing, hybrid_world, [3], "first")
    run(probing)
    arena = probing._kv._layout.client.arena  # type: ignore[union-attr]
    num_pages = 13 * probing._kv._layout.pages_per_group + arena.client(Owner.ADAPTERS).num_allocated  # type: ignore[union-attr]
    num_bytes = num_pages * arena.page_num_bytes
    # 13 blocks of 16 tokens and an adapter, for 6 requests of up to 70 tokens
    states = probing._pipeline._runner._kv.states  # type: ignore[attr-defined]
    one = states.num_bytes // (2 * 8 + states.num_snapshots)
    # two states of each sequence, and as many snapshots as a quarter of all has room for
    num_snapshots = next(n for n in range(24, 0, -1) if num_bytes + (12 + n) * one >= 4 * n * one)
    engine = make_engine(
        memory_budget_bytes=num_bytes + (12 + num_snapshots) * one,
        max_model_len=96,
        max_num_batched_tokens=23,
        max_num_seqs=6,
    )
    assert engine._pipeline._runner._kv.states.num_slots > 3  # type: ignore[attr-defined]
    wanted = {}
    (shared,) = prompts(1, seed=5, low=40, high=40)
    for i, tail in enumerate(prompts(10, seed=6, low=1, high=8)):
        name = NAMES[i % 2]
        request_id = add(engine, hybrid_world, shared + tail, name, max_tokens=22)
        wanted[request_id] = hybrid_world.expected(name, shared + tail, 22)
    assert run(engine) == wanted
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("after", [False, True])
def test_step_computed_again_advances_states_once(
    hybrid_world: World, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    wanted = {}
    for prompt in prompts(4, seed=14):
        wanted[add(engine, hybrid_world, prompt)] = hybrid_world.expected(None, prompt, 12)
    culprit = add(engine, hybrid_world, [7, 7, 7, 7, 7], "first")
    runner: Any = engine._pipeline._runner
    forward = runner.forward

    def fragile(batch: Any) -> Any:
        is_there = any(entry.request.request_id == culprit for entry in batch.entries)
        found = forward(batch) if after or not is_there else None
        if is_there:
            raise FloatingPointError("no")
        return found

    monkeypatch.setattr(runner, "forward", fragile)
    tokens: dict[Any, list[int]] = {}
    while engine.has_requests:
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                assert output.request_id == culprit
            else:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == wanted
    assert engine.check() == []


def test_deferred_step_advances_states_once(
    hybrid_world: World, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    wanted = {}
    for prompt in prompts(4, seed=16):
        wanted[add(engine, hybrid_world, prompt)] = hybrid_world.expected(None, prompt, 12)
    runner: Any = engine._pipeline._runner
    launch, calls = runner.launch, itertools.count(1)

    def late(batch: Any) -> Any:
        found = launch(batch)
        # as where masks of allowed tokens come too late
        return found if next(calls) % 3 else FinishedStep([StepResult(is_deferred=True)] * len(batch.entries))

    monkeypatch.setattr(runner, "launch", late)
    assert run(engine) == wanted


def test_failing_layer_leaves_states_whole(
    hybrid_world: World, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    wanted = {}
    for prompt in prompts(4, seed=15):
        wanted[add(engine, hybrid_world, prompt)] = hybrid_world.expected(None, prompt, 12)
    calls = {"count": 0}

    def fault(name: str) -> None:
        calls["count"] += 1
        if calls["count"] % 31 == 0:
            raise FloatingPointError("no")

    monkeypatch.setattr("loraserve.model.modelling.modelled_base.faults.hit", fault)
    assert run(engine) == wanted


def test_states_are_part_of_budget(hybrid_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=8)
    runner: Any = engine._pipeline._runner
    shapes = {layer: tuple(tensor.shape[1:] for tensor in every) for layer, every in runner._kv.states._tensors.items()}
    one = state_bytes(shapes)
    states = runner._kv.states
    assert states.num_snapshots == min(4 * 8, 2 * MIB // one)
    assert states.num_bytes == (2 * 8 + states.num_snapshots) * one
    arena = engine._kv._layout.client.arena  # type: ignore[union-attr]
    assert 0 <= 8 * MIB - states.num_bytes - arena.num_pages * arena.page_num_bytes < arena.page_num_bytes
    narrow = make_engine(max_num_seqs=4096)
    assert narrow._pipeline._runner._kv.states.num_slots == 4 * MIB // (2 * one)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="recurrent state"):
        make_engine(memory_budget_bytes=2 * one)
