"""A GPU's engine, its kernels in Triton's interpreter: the same base,
adapters and oracles as on a CPU, in float16.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from campaigns import default_and_campaign

pytest.importorskip("triton")

from loraserve.engine.execution.cuda_graphs import DecodeGraphs, bucket_sizes
from loraserve.engine.execution.runner import DeviceLost
from loraserve.engine.worker.startup import build_engine
from loraserve.types import Residency, TokenOutput

from .conftest import ADAPTERS, World
from .test_engine import add, prompts, run

pytestmark = pytest.mark.interpreted

GPU = {"device": "cuda", "dtype": "float16", "max_num_seqs": 5, "max_num_batched_tokens": 24}
NAMES = [None, *ADAPTERS]


@pytest.fixture
def make_gpu_engine(world: World):
    engines = []

    def make(**changes: object):
        engine = build_engine(world.config(**{**GPU, **changes})).engine
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.pager.close()


@torch.inference_mode()
def logprobs_of(world: World, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
    if adapter is None:
        with world.model.disable_adapter():
            logits = world.model(torch.tensor([token_ids])).logits[0]
    else:
        world.model.set_adapter(adapter)
        logits = world.model(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def test_mixed_batch_token_probabilities_equal_peft(world, make_gpu_engine):
    engine = make_gpu_engine()
    outputs: list[TokenOutput] = []
    wanted = {}
    for i, prompt in enumerate(prompts(5, high=20)):
        name = NAMES[i % len(NAMES)]
        wanted[add(engine, world, prompt, name, max_tokens=3, logprobs=2)] = (prompt, name)
    tokens = run(engine, outputs)
    for request_id, (prompt, name) in wanted.items():
        expected = logprobs_of(world, name, [*prompt, *tokens[request_id]])
        scores = [score for output in outputs if output.request_id == request_id for score in output.logprobs or ()]
        assert len(scores) == 3
        for i, score in enumerate(scores):
            row = expected[len(prompt) - 1 + i]
            assert score.logprob == pytest.approx(float(row[score.token_id]), abs=0.05)
            assert score.top[0][1] == pytest.approx(float(row.max()), abs=0.05)


@pytest.mark.parametrize("num_requests", default_and_campaign([2, 5], default=[2]))
def test_text_is_the_same_alone_and_cobatched(world, make_gpu_engine, num_requests):
    prompts_of_all = prompts(5, seed=3, high=20)
    # the last ones first: an adapter on all linears, drawn, beside one on few, greedy
    work = [(prompt, NAMES[i % len(NAMES)]) for i, prompt in enumerate(prompts_of_all)][-num_requests:]
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    engine = make_gpu_engine()
    ids = [
        add(engine, world, prompt, name, max_tokens=3, **(sampled if i % 2 else {}))
        for i, (prompt, name) in enumerate(work)
    ]
    together = run(engine)
    alone = {}
    for i, (prompt, name) in enumerate(work):
        request_id = add(engine, world, prompt, name, max_tokens=3, **(sampled if i % 2 else {}))
        alone[ids[i]] = run(engine)[request_id]
    assert together == alone


def test_overlapped_steps_equal_host_choice(world, make_gpu_engine):
    """Penalties, biases and minimal lengths are the host's: their requests wait for each result,
    and nobody's text changes.
    """
    prompt = prompts(1, seed=9, low=8, high=8)[0]
    hard = {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}, "min_tokens": 2}
    hard |= {"allowed_token_ids": tuple(range(100)), "bad_words": ((5,), (3, 3))}
    engine = make_gpu_engine()
    plain, biased = (
        add(engine, world, prompt, "r8", max_tokens=3),
        add(engine, world, prompt, "r8", max_tokens=3, **hard),
    )
    both = run(engine)
    again = add(engine, world, prompt, "r8", max_tokens=3)
    assert run(engine)[again] == both[plain]
    again = add(engine, world, prompt, "r8", max_tokens=3, **hard)
    assert run(engine)[again] == both[biased]
    assert max(both[biased]) < 100


def test_prompts_are_scored_as_in_peft(world, make_gpu_engine):
    engine = make_gpu_engine()
    prompt = prompts(1, seed=4, low=30, high=30)[0]
    outputs: list[TokenOutput] = []
    add(engine, world, prompt, "mixed", max_tokens=1, prompt_logprobs=1)
    run(engine, outputs)
    scores = outputs[0].prompt_logprobs
    expected = logprobs_of(world, "mixed", prompt)
    assert scores is not None
    assert [s.logprob for s in scores[1:]] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=0.05
    )


def test_named_tokens_are_reported_as_in_peft(world, make_gpu_engine):
    engine, prompt, named = make_gpu_engine(), prompts(1)[0], (5, 3, 11)
    beside = add(engine, world, prompt, None, max_tokens=3, logprobs=1)
    request = add(engine, world, prompt, "mixed", max_tokens=3, logprobs=1, logprob_token_ids=named)
    outputs: list[TokenOutput] = []
    tokens = run(engine, outputs)
    scores = {
        one: [score for output in outputs if output.request_id == one for score in output.logprobs or ()]
        for one in (beside, request)
    }
    assert [len(score.top) for score in scores[beside]] == [1, 1, 1]
    expected = logprobs_of(world, "mixed", [*prompt, *tokens[request]])
    for place, score in enumerate(scores[request], len(prompt) - 1):
        assert [token for token, _ in score.top] == list(named)
        assert [value for _, value in score.top] == pytest.approx(expected[place, list(named)].tolist(), abs=0.05)


def test_non_finite_adapter_fails_alone(world, make_gpu_engine):
    engine = make_gpu_engine()
    base = add(engine, world, [1, 2, 3], None, max_tokens=2)
    wanted = run(engine)[base]
    bad, base = add(engine, world, [1, 2, 3], "r8", max_tokens=2), add(engine, world, [1, 2, 3], None, max_tokens=2)
    while engine.pager.request(world.refs["r8"]) is not Residency.RESIDENT:
        engine.pager.poll()
    engine._pipeline._runner._adapters.pool.data.view(torch.float16).fill_(float("nan"))
    outputs: list[TokenOutput] = []
    while engine.has_requests:
        outputs += engine.step()
    assert [o.error_code for o in outputs if o.request_id == bad] == ["adapter_numerics"]
    assert [t for o in outputs if o.request_id == base for t in o.token_ids] == wanted
    assert engine.check() == []


def test_warming_up_leaves_cache_unchanged(world, make_gpu_engine):
    engine = make_gpu_engine(max_num_seqs=2)
    runner = engine._pipeline._runner
    for layer in (*runner._kv.k, *runner._kv.v):
        layer.fill_(3.0)
    runner.warm_up((3,))
    assert all(bool((layer == 3.0).all()) for layer in (*runner._kv.k, *runner._kv.v))


def test_failing_device_ends_process_and_no_request(world, make_gpu_engine, monkeypatch):
    engine = make_gpu_engine(max_num_seqs=2)
    launched = []
    monkeypatch.setattr(engine._pipeline._runner._adapters, "step_launched", lambda: launched.append(1))

    def fail(*_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(engine._pipeline._runner, "_launch", fail)
    add(engine, world, [1, 2, 3])
    with pytest.raises(DeviceLost):
        engine.step()
    # adapters that its kernels may still read aren't overwritten either
    assert launched == [1]


def test_decode_steps_are_filled_up_to_few_sizes():
    sizes = bucket_sizes(100)
    assert sizes == sorted({1, 100, *sizes})
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    graphs = DecodeGraphs(torch.device("cpu"), sizes, lambda *_: torch.empty(0))
    assert [graphs.bucket(count) for count in (1, 3, 9, 100, 101)] == [1, 4, 16, 100, None]
