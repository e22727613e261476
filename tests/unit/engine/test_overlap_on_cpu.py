"""Overlapped steps on the CPU's runner, on a random Llama with PEFT adapters: every way of sampling
says what it says in plain steps.
"""

from __future__ import annotations

import random

import pytest

from loraserve.engine.engine import Engine
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.messages import AddRequest
from loraserve.types import RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import ADAPTERS, World

NAMES = [None, *ADAPTERS]


@pytest.fixture
def make_engine(world: World):
    engines: list[Engine] = []

    def make(overlap: bool, **changes: object) -> Engine:
        config = world.config(**changes)
        plain = build_engine(config).engine
        engines.append(plain)
        return Engine(config, plain.base, plain._pipeline._runner, plain.pager, overlap=overlap)

    yield make
    for engine in engines:
        engine.pager.close()


def answer(engine: Engine, world: World, work: list[tuple[str | None, list[int], dict]]) -> list[list[TokenOutput]]:
    """The outputs of each request, without the times in them."""
    for i, (adapter, prompt, params) in enumerate(work):
        engine.add(
            AddRequest(
                request_id=RequestId(str(i)),
                tenant=TenantId("t"),
                adapter=None if adapter is None else world.refs[adapter],
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**params),
            )
        )
    answers: list[list[TokenOutput]] = [[] for _ in work]
    while engine.has_requests:
        for output in engine.step():
            answers[int(output.request_id)].append(output)
        assert engine.check() == []
    stats = engine.stats()
    assert (stats.num_kv_blocks_used, stats.num_pins, stats.invariant_violations) == (0, 0, 0)
    return answers


def text(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_mixed_batch_equals_peft(world, make_engine):
    rng = random.Random(0)
    prompts = [[rng.randrange(320) for _ in range(rng.randint(1, 40))] for _ in range(10)]
    work = [(NAMES[i % len(NAMES)], prompt, {"max_tokens": 12, "temperature": 0.0}) for i, prompt in enumerate(prompts)]
    answers = answer(make_engine(overlap=True), world, work)
    assert [text(outputs) for outputs in answers] == [world.expected(name, prompt, 12) for name, prompt, _ in work]


def test_every_sampling_method_equals_plain_steps(world, make_engine):
    rng = random.Random(1)
    ways: list[dict[str, object]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "stop_token_ids": tuple(range(0, 320, 3)), "min_tokens": 6},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, 320, 2)), "min_tokens": 3},
        {"temperature": 1.0, "logit_bias": {5: 4.0, 6: -100.0}},
    ]
    penalised = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "max_tokens": 7}
    work = []
    for i in range(14):
        prompt = [rng.randrange(320) for _ in range(rng.randint(1, 40))]
        params = {"max_tokens": 14, "seed": i} | (penalised if i == 13 else ways[i % len(ways)])
        work.append((NAMES[i % len(NAMES)], prompt, params))
    answers = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, max_num_batched_tokens=23, max_num_seqs=6)
        answers.append(answer(engine, world, work))
    plain, overlapped = answers
    assert [text(outputs) for outputs in overlapped] == [text(outputs) for outputs in plain]
    assert [outputs[-1].finish_reason for outputs in overlapped] == [outputs[-1].finish_reason for outputs in plain]
    assert [outputs[-1].stop_reason for outputs in overlapped] == [outputs[-1].stop_reason for outputs in plain]
    for one, other in zip(plain[2] + plain[8], overlapped[2] + overlapped[8], strict=True):
        assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs]
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)
        scores = [entry and entry.logprob for entry in one.prompt_logprobs or ()]
        assert scores == pytest.approx([entry and entry.logprob for entry in other.prompt_logprobs or ()], abs=1e-4)


def test_chunks_preemption_and_prefix_hits_change_no_token(world, make_engine, quick_loads):
    # 13 blocks of 16 tokens, less what adapters take, for 8 requests of up to 70: they can't all
    # stay
    engine = make_engine(
        overlap=True,
        memory_budget_bytes=13 * 16 * 3 * 2 * 2 * 16 * 4,
        max_model_len=96,
        max_num_batched_tokens=23,
        max_num_seqs=8,
    )
    rng = random.Random(5)
    shared = [rng.randrange(320) for _ in range(40)]
    work = []
    for i in range(10):
        tail = [rng.randrange(320) for _ in range(rng.randint(1, 8))]
        work.append((NAMES[i % 2], shared + tail, {"max_tokens": 22, "temperature": 0.0}))
    answers = answer(engine, world, work)
    assert [text(outputs) for outputs in answers] == [world.expected(name, prompt, 22) for name, prompt, _ in work]
    assert engine.stats().num_preemptions > 0
    assert engine.stats().prefix_tokens_hit > 0
