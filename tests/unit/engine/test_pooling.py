"""Requests that pool: transformers' and PEFT's hidden states after the last norm are the oracle."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from loraserve.engine.engine import Engine
from loraserve.engine.pooler import Pooler
from loraserve.engine_client.messages import AddRequest
from loraserve.types import FinishReason, PoolingKind, PoolingParams, RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import ADAPTERS, World, make_engines
from .simulated import Simulation, hidden_states

_ids = itertools.count()
KINDS = tuple(PoolingKind)
NAMES = (None, *ADAPTERS)


@pytest.fixture
def make_engine(world: World) -> Iterator[Any]:
    yield from make_engines(world)


def add(
    engine: Engine, world: World, prompt: list[int], adapter: str | None = None, max_tokens: int = 12, **params: Any
) -> RequestId:
    pooling = PoolingParams(**{"kind": PoolingKind.MEAN, **params}) if params.get("kind") != "none" else None
    request_id = RequestId(f"p{next(_ids)}")
    engine.add(
        AddRequest(
            request_id=request_id,
            tenant=TenantId("t"),
            adapter=None if adapter is None else world.refs[adapter],
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens if pooling is None else 0, temperature=0.0),
            pooling=pooling,
        )
    )
    return request_id


def run(engine: Engine) -> dict[RequestId, list[TokenOutput]]:
    # processor time: a busy machine is no hang
    deadline = time.process_time() + 60
    outputs: dict[RequestId, list[TokenOutput]] = {}
    while engine.has_requests:
        assert time.process_time() < deadline
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        assert engine.check() == []
    assert engine.stats().num_kv_blocks_used == 0
    assert engine.stats().num_pins == 0
    return outputs


def vector(outputs: list[TokenOutput]) -> np.ndarray:
    """The only output's vector."""
    [output] = outputs
    assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, ())
    assert output.pooled is not None
    return np.frombuffer(output.pooled, dtype="<f4")


def expected(
    world: World, prompt: list[int], adapter: str | None, kind: PoolingKind, *, normalize: bool = True
) -> np.ndarray:
    with torch.inference_mode():
        model = world.model
        if adapter is not None:
            model.set_adapter(adapter)
        causal = model.get_base_model()
        context = model.disable_adapter() if adapter is None else torch.inference_mode()
        with context:
            states = causal.model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = {PoolingKind.MEAN: states.mean(0), PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0]}[kind]
    return (pooled / pooled.norm() if normalize else pooled).numpy()


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(rng.randint(low, high))] for _ in range(count)]


def test_mixed_batch_pools_as_in_transformers_and_peft(world: World, make_engine: Any) -> None:
    engine = make_engine()
    cases = {}
    for i, prompt in enumerate(prompts(18)):
        name, kind = NAMES[i % len(NAMES)], KINDS[i % 3]
        normalize = i % 4 != 0
        request_id = add(engine, world, prompt, name, kind=kind, normalize=normalize)
        cases[request_id] = expected(world, prompt, name, kind, normalize=normalize)
        # beside requests that make tokens, in the same steps
        cases[add(engine, world, prompt, name, kind="none")] = None
    outputs = run(engine)
    for request_id, wanted in cases.items():
        if wanted is not None:
            np.testing.assert_allclose(vector(outputs[request_id]), wanted, atol=1e-4)
    assert engine.stats().generation_tokens == 18 * 12
    tokens = [[t for output in outputs[r] for t in output.token_ids] for r, wanted in cases.items() if wanted is None]
    assert tokens == [world.expected(NAMES[i % len(NAMES)], prompt, 12) for i, prompt in enumerate(prompts(18))]


def test_vector_is_cut_before_normalization(world: World, make_engine: Any) -> None:
    engine, prompt = make_engine(), prompts(1, seed=3)[0]
    whole, cut, raw = (
        add(engine, world, prompt, **params)
        for params in ({"normalize": False}, {"dimensions": 5}, {"dimensions": 5, "normalize": False})
    )
    outputs = run(engine)
    first = vector(outputs[whole])[:5]
    np.testing.assert_array_equal(vector(outputs[raw]), first)
    np.testing.assert_allclose(vector(outputs[cut]), first / np.linalg.norm(first), rtol=1e-6)


def test_chunks_preemption_and_neighbours_change_no_bit(world: World, make_engine: Any) -> None:
    alone = make_engine(max_num_batched_tokens=128)
    # 13 blocks for up to 8 requests of 60 tokens and more: they can't all stay
    engine = make_engine(
        memory_budget_bytes=13 * 16 * 3 * 2 * 2 * 16 * 4, max_model_len=96, max_num_batched_tokens=23, max_num_seqs=8
    )
    preempted: set[Any] = set()
    engine.listener.before_launch = lambda scheduled: preempted.update(  # type: ignore[method-assign]
        entry.request.pooler for entry in scheduled if entry.epoch and entry.start
    )
    for kind in KINDS:
        work = [(prompt, NAMES[i % 2]) for i, prompt in enumerate(prompts(6, seed=6, low=30, high=70))]
        solo = []
        for prompt, name in work:
            request_id = add(alone, world, prompt, name, kind=kind)
            solo.append(run(alone)[request_id][0].pooled)
        ids = []
        for prompt, name in work:
            add(engine, world, prompt[:20], name, kind="none", max_tokens=40)
            ids.append(add(engine, world, prompt, name, kind=kind))
        outputs = run(engine)
        assert [outputs[request_id][0].pooled for request_id in ids] == solo
    assert {pooler._params.kind for pooler in preempted - {None}} == set(KINDS)


def test_only_last_token_pooling_uses_cached_blocks(world: World, make_engine: Any) -> None:
    engine, prompt = make_engine(), prompts(1, seed=9, low=40, high=40)[0]
    add(engine, world, prompt, kind="none")
    run(engine)
    for kind in KINDS:
        for tail in ([1, 2, 3], [4, 5, 6]):
            before = engine.stats().prefix_tokens_hit
            request_id = add(engine, world, [*prompt, *tail], kind=kind)
            pooled = vector(run(engine)[request_id])
            np.testing.assert_allclose(pooled, expected(world, [*prompt, *tail], None, kind), atol=1e-4)
            assert (engine.stats().prefix_tokens_hit > before) == (kind is PoolingKind.LAST)


@pytest.mark.parametrize("kind", KINDS)
def test_only_requests_using_cached_blocks_leave_blocks(world: World, make_engine: Any, kind: PoolingKind) -> None:
    engine, prompt = make_engine(), prompts(1, seed=4, low=40, high=40)[0]
    add(engine, world, prompt, "r8", kind=kind)
    run(engine)
    assert (engine.stats().num_kv_blocks_cached > 0) == (kind is PoolingKind.LAST)


def test_non_finite_hidden_states_fail_own_request_alone(world: World, make_engine: Any) -> None:
    engine = make_engine()
    runner = engine._pipeline._runner
    forward = runner.forward_pooled

    def poison(batch: Any) -> Any:
        logits, hidden = forward(batch)
        hidden = hidden.clone()
        for entry, (start, end) in zip(batch.entries, batch.pooled_ranges, strict=True):
            if entry.request.request_id == bad:
                hidden[start:end] = float("nan")
        return logits, hidden

    runner.forward_pooled = poison
    bad, good = (add(engine, world, [1, 2, 3], "r8", kind=PoolingKind.MEAN) for _ in range(2))
    outputs = run(engine)
    [failed] = outputs[bad]
    assert (failed.finish_reason, failed.error_code) == (FinishReason.ERROR, "adapter_numerics")
    assert "hidden states" in (failed.error_message or "")
    assert vector(outputs[good]).shape == (64,)


def test_mean_does_not_depend_on_sequence_split() -> None:
    states = torch.randn(1000, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 48)
    rng = random.Random(1)
    means = set()
    for _ in range(20):
        pooler, start = Pooler(PoolingParams(kind=PoolingKind.MEAN, normalize=False)), 0
        while start < 1000:
            end = min(1000, start + rng.choice((1, 2, 63, 255, 256, 257, 600)))
            first, last = pooler.tokens_of(start, end, 1000)
            pooler.add(states[start + first : start + last])
            start = end
        means.add(pooler.finish())
    [mean] = means
    assert mean is not None
    np.testing.assert_allclose(np.frombuffer(mean, dtype="<f4"), states.double().mean(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_schedule_changes_pooled_vector(overlap: bool) -> None:
    """Few blocks and small steps, adapters that come and go, requests that make tokens beside."""
    num_preemptions = 0
    for seed in range(40):
        rng = random.Random(seed)
        world = Simulation(
            overlap=overlap, is_lazy=overlap, num_blocks=10, token_budget=rng.choice((5, 9, 16)), seed=seed
        )
        wanted = {}
        for number in range(12):
            adapter = rng.choice((None, "a", "b"))
            prompt = [rng.randrange(20) for _ in range(rng.randint(1, 24))]
            if number % 3 == 2:
                world.add(f"t{number}", prompt, adapter, max_tokens=rng.randint(1, 16))
            else:
                params = PoolingParams(kind=rng.choice(KINDS), normalize=False)
                request_id = world.add(f"p{number}", prompt, adapter, pooling=params, max_tokens=0)
                [request] = [r for r in world.engine._scheduler._requests.values() if r.request_id == request_id]
                states = hidden_states(world.device._plain_kv(request, prompt))
                pooler = Pooler(params)
                pooler.add(states[slice(*pooler.tokens_of(0, len(prompt), len(prompt)))])
                wanted[request_id] = pooler.finish()
            for _ in range(rng.randint(0, 3)):
                world.step()
        world.run()
        for request_id, pooled in wanted.items():
            assert world.received[request_id].ending == (FinishReason.STOP, None, None)
            assert world.received[request_id].pooled == pooled
        num_preemptions += world.engine.stats().num_preemptions
    assert num_preemptions > 20
