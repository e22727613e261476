"""An engine whose KV blocks and adapters share a small arena says what PEFT says,
whatever makes way for what.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from loraserve.engine.engine import Engine
from loraserve.engine_client.messages import AddRequest
from loraserve.memory.arena import Owner
from loraserve.types import RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import ADAPTERS, World, make_engines

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
"""Sixteen tokens, three layers, two heads of sixteen, keys and values."""
_ids = itertools.count()


@pytest.fixture
def make_engine(world: World) -> Iterator[Callable[..., Engine]]:
    yield from make_engines(world, max_model_len=96)


def add(engine: Engine, world: World, prompt: list[int], adapter: str | None, max_tokens: int) -> RequestId:
    request_id = RequestId(f"arena-{next(_ids)}")
    engine.add(
        AddRequest(
            request_id=request_id,
            tenant=TenantId("t"),
            adapter=None if adapter is None else world.refs[adapter],
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
    )
    return request_id


def run(engine: Engine) -> dict[RequestId, list[TokenOutput]]:
    outputs: dict[RequestId, list[TokenOutput]] = {}
    while engine.has_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        assert engine.check() == []
    return outputs


def text(outputs: list[TokenOutput]) -> list[int]:
    assert outputs[-1].error_code is None, outputs[-1]
    return [token for output in outputs for token in output.token_ids]


def test_evictions_change_no_token(world: World, make_engine: Callable[..., Engine]) -> None:
    # two of the adapters and three sequences at most
    engine = make_engine(memory_budget_bytes=22 * BLOCK_BYTES, max_num_batched_tokens=40, max_num_seqs=4)
    rng, names = random.Random(7), [None, *ADAPTERS]
    shared = [rng.randrange(320) for _ in range(32)]
    kv, pool = engine._kv, engine.pager._pool
    # which of the two makes way depends on what prefills and loads were measured to take
    for _ in range(5):
        asked = {}
        for i in range(24):
            prompt = [*(shared if i % 2 else []), *(rng.randrange(320) for _ in range(rng.randint(1, 40)))]
            name = names[rng.randrange(len(names))]
            asked[add(engine, world, prompt, name, 10)] = name, prompt
        answers = run(engine)
        for request_id, (name, prompt) in asked.items():
            assert text(answers[request_id]) == world.expected(name, prompt, 10)
        if kv.num_evictions_for[Owner.ADAPTERS] and pool.num_evictions_for.total():
            break
    assert kv.num_evictions_for[Owner.ADAPTERS] > 0
    assert pool.num_evictions_for[Owner.KV] + pool.num_evictions_for[Owner.ADAPTERS] > 0
    assert kv.prefix_cache.prefill_cost.seconds_per_unit > 0
    assert engine.stats().invariant_violations == 0


def test_full_length_sequence_runs_beside_pinned_adapters(world: World, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(memory_budget_bytes=20 * BLOCK_BYTES, max_num_batched_tokens=40)
    for name in ADAPTERS:
        engine.pager.set_operator_pin(world.refs[name], True)
    prompt = [i * 7 % 320 for i in range(60)]
    request_id = add(engine, world, prompt, "r8", 36)
    other = add(engine, world, prompt[:30], None, 36)
    answers = run(engine)
    assert text(answers[request_id]) == world.expected("r8", prompt, 36)
    assert text(answers[other]) == world.expected(None, prompt[:30], 36)
    pool = engine.pager._pool
    assert pool.num_bytes <= pool.budget_bytes == 14 * BLOCK_BYTES


def test_oversized_adapter_is_refused_with_numbers(world: World, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(memory_budget_bytes=7 * BLOCK_BYTES)
    request_id = add(engine, world, [1, 2, 3], "r8", 4)
    refused = run(engine)[request_id][-1]
    assert refused.error_code == "adapter_too_large"
    assert f"the memory for adapters has {BLOCK_BYTES:,}" in (refused.error_message or "")
