"""The engine in this process, on a random Llama with PEFT adapters:
transformers and PEFT are the oracles.
"""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
import torch
import zmq

from loraserve.engine.engine import Engine
from loraserve.engine.worker.main import Wakeup, Worker
from loraserve.engine_client.messages import AddRequest
from loraserve.types import FinishReason, RequestId, Residency, SamplingParams, TenantId, TokenOutput

from .conftest import ADAPTERS, World, make_engines

_ids = itertools.count()


@pytest.fixture
def make_engine(world: World):
    yield from make_engines(world)


def add(engine: Engine, world: World, prompt: list[int], adapter: str | None = None, **params: object) -> RequestId:
    request_id = RequestId(f"r{next(_ids)}")
    engine.add(
        AddRequest(
            request_id=request_id,
            tenant=TenantId("t"),
            adapter=None if adapter is None else world.refs[adapter],
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        )
    )
    return request_id


def run(engine: Engine, outputs: list[TokenOutput] | None = None) -> dict[RequestId, list[int]]:
    # processor time: a busy machine is no hang
    deadline = time.process_time() + 60
    tokens: dict[RequestId, list[int]] = {}
    while engine.has_requests:
        assert time.process_time() < deadline, f"{engine.stats().num_running} requests still run"
        for output in engine.step():
            assert output.finish_reason is not FinishReason.ERROR, output
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if outputs is not None:
                outputs.append(output)
    assert engine.check() == []
    assert engine.stats().num_kv_blocks_used == 0
    assert engine.stats().num_pins == 0
    return tokens


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(rng.randint(low, high))] for _ in range(count)]


NAMES = [None, *ADAPTERS]


def test_mixed_batch_equals_peft(world, make_engine):
    engine = make_engine()
    wanted = {}
    for i, prompt in enumerate(prompts(15)):
        name = NAMES[i % len(NAMES)]
        wanted[add(engine, world, prompt, name)] = world.expected(name, prompt, 12)
    assert run(engine) == wanted


def test_chunks_preemption_and_prefix_hits_change_no_token(world, make_engine, quick_loads):
    # 13 blocks of 16 tokens, less what adapters take, for 8 requests of up to 70: they can't all
    # stay
    engine = make_engine(
        memory_budget_bytes=13 * 16 * 3 * 2 * 2 * 16 * 4,
        max_model_len=96,
        max_num_batched_tokens=23,
        max_num_seqs=8,
    )
    wanted = {}
    shared = prompts(1, seed=5, low=40, high=40)[0]
    for i, tail in enumerate(prompts(10, seed=6, low=1, high=8)):
        name = NAMES[i % 2]
        wanted[add(engine, world, shared + tail, name, max_tokens=22)] = world.expected(name, shared + tail, 22)
    assert run(engine) == wanted
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_tokens_hit > 0


def test_an_adapters_prefix_is_not_anothers(world, make_engine):
    engine = make_engine()
    prompt = prompts(1, seed=9, low=40, high=40)[0]
    for name in NAMES:
        request_id = add(engine, world, prompt, name)
        assert run(engine)[request_id] == world.expected(name, prompt, 12)


def test_logits_equal_pefts_within_1e_4(world, make_engine):
    engine = make_engine()
    outputs: list[TokenOutput] = []
    wanted = {}
    for i, prompt in enumerate(prompts(10, seed=3, low=2)):
        name = NAMES[i % len(NAMES)]
        request_id = add(engine, world, prompt, name, max_tokens=1, logprobs=320, prompt_logprobs=0)
        wanted[request_id] = (name, prompt)
    run(engine, outputs)
    assert len(outputs) == 10
    for output in outputs:
        name, prompt = wanted[output.request_id]
        with torch.inference_mode():
            if name is None:
                with world.model.disable_adapter():
                    scores = world.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            else:
                world.model.set_adapter(name)
                scores = world.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        ours = dict(output.logprobs[0].top)
        assert len(ours) == 320
        assert max(abs(ours[t] - float(scores[-1, t])) for t in range(320)) < 1e-4
        assert output.prompt_logprobs[0] is None
        for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry.token_id == prompt[position]
            assert abs(entry.logprob - float(scores[position - 1, prompt[position]])) < 1e-4


def test_chunked_prompt_has_single_score_per_token(world, make_engine):
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
    prompt = prompts(1, seed=4, low=40, high=40)[0]
    outputs: list[TokenOutput] = []
    add(engine, world, prompt, max_tokens=0, prompt_logprobs=2)
    run(engine, outputs)
    scores = outputs[0].prompt_logprobs
    assert scores[0] is None
    assert [entry.token_id for entry in scores[1:]] == prompt[1:]
    assert all(len(entry.top) == 2 for entry in scores[1:])
    assert outputs[0].token_ids == ()


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}])
def test_sampled_text_depends_on_seed_alone(world, make_engine, params):
    engine = make_engine()
    prompt = prompts(1, seed=11)[0]
    alone = add(engine, world, prompt, "r8", seed=5, **params)
    first = run(engine)[alone]
    again = add(engine, world, prompt, "r8", seed=5, **params)
    other = add(engine, world, prompt, "r8", seed=6, **params)
    for i, filler in enumerate(prompts(6, seed=12)):
        add(engine, world, filler, NAMES[i % len(NAMES)], seed=i, **params)
    tokens = run(engine)
    assert tokens[again] == first
    assert tokens[other] != first


def test_request_continues_from_given_tokens(world, make_engine):
    engine = make_engine()
    prompt = prompts(1, seed=13)[0]
    whole = add(engine, world, prompt, "rs", temperature=1.0, seed=3)
    tokens = run(engine)[whole]
    engine.add(
        AddRequest(
            request_id=RequestId("replayed"),
            tenant=TenantId("t"),
            adapter=world.refs["rs"],
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(tokens[:5]),
            params=SamplingParams(max_tokens=12, temperature=1.0, seed=3),
        )
    )
    assert run(engine)[RequestId("replayed")] == tokens[5:]


def test_raising_step_fails_culprit_alone(world, make_engine, monkeypatch, caplog):
    engine = make_engine()
    wanted = {}
    for i, prompt in enumerate(prompts(5, seed=14)):
        wanted[add(engine, world, prompt, NAMES[i])] = world.expected(NAMES[i], prompt, 12)
    culprit = add(engine, world, [7, 7, 7, 7, 7])
    forward = engine._pipeline._runner.forward

    def fragile(batch):
        if any(entry.request.request_id == culprit for entry in batch.entries):
            raise FloatingPointError("no")
        return forward(batch)

    monkeypatch.setattr(engine._pipeline._runner, "forward", fragile)
    tokens: dict[RequestId, list[int]] = {}
    failed = []
    while engine.has_requests:
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                failed.append(output.request_id)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert failed == [culprit]
    tokens.pop(culprit)
    assert tokens == wanted
    assert engine.stats().num_kv_blocks_used == 0


def test_non_finite_row_fails_alone(world, make_engine, monkeypatch):
    engine = make_engine()
    prompt = prompts(1, seed=15)[0]
    good, bad = add(engine, world, prompt), add(engine, world, [3, 3, 3], "r8")
    forward = engine._pipeline._runner.forward

    def poisoned(batch):
        logits = forward(batch).clone()
        for entry, (start, end) in zip(batch.entries, batch.logits_ranges, strict=True):
            if entry.request.request_id == bad:
                logits[start:end, 5] = float("nan")
        return logits

    monkeypatch.setattr(engine._pipeline._runner, "forward", poisoned)
    outputs = []
    while engine.has_requests:
        outputs += engine.step()
    errors = {o.request_id: o.error_code for o in outputs if o.finish_reason is FinishReason.ERROR}
    assert errors == {bad: "adapter_numerics"}
    tokens = [t for o in outputs if o.request_id == good for t in o.token_ids]
    assert tokens == world.expected(None, prompt, 12)


def test_int8_greedy_text_equals_alone_and_cobatched(world, make_engine):
    engine = make_engine(quantize="int8")
    work = [(prompt, NAMES[i % len(NAMES)]) for i, prompt in enumerate(prompts(10, seed=16))]
    alone = []
    for prompt, name in work:
        request_id = add(engine, world, prompt, name)
        alone.append(run(engine)[request_id])
    together = [add(engine, world, prompt, name) for prompt, name in work]
    tokens = run(engine)
    assert [tokens[request_id] for request_id in together] == alone


def test_pin_released_twice_is_counted(world, make_engine, caplog):
    engine = make_engine()
    prompt = prompts(1, seed=17)[0]
    good, twice = add(engine, world, prompt), add(engine, world, [5, 5, 5], "r8", max_tokens=40)
    outputs: list[TokenOutput] = []
    while not any(output.request_id == twice for output in outputs):
        outputs += engine.step()
    engine._scheduler._requests[twice].pin.release()
    engine.abort(twice)
    while engine.has_requests:
        outputs += engine.step()
    assert [t for o in outputs if o.request_id == good for t in o.token_ids] == world.expected(None, prompt, 12)
    assert engine.stats().invariant_violations == 1
    assert "released twice" in caplog.text
    assert engine.check() == []


def test_pin_outliving_all_requests_is_counted(world, make_engine, caplog):
    engine = make_engine()
    request_id = add(engine, world, [5, 5, 5], "r8", max_tokens=2)
    while not engine.step():
        pass
    engine._scheduler._requests[request_id].pin = None
    while engine.has_requests:
        engine.step()
    assert engine.stats().invariant_violations == 1
    assert "1 adapter pins" in caplog.text


def test_worker_sleeps_while_requests_wait_for_slots(world, make_engine):
    config = world.config()
    engine = make_engine()
    pool = engine.pager._pool
    # an operator's pin leaves no place, and nothing is being loaded
    engine.pager.set_operator_pin(world.refs["r8"], True)
    while engine.pager.request(world.refs["r8"]) is not Residency.RESIDENT:
        engine.pager.poll()
    pool.device.limits = pool.used
    add(engine, world, [5, 5, 5], "mixed")
    with zmq.Context() as context, context.socket(zmq.PULL) as inputs, context.socket(zmq.PUSH) as outputs:
        wakeup = Wakeup()
        worker = Worker(config, engine, engine.listener, inputs, outputs, wakeup, server_pid=os.getppid())
        deadline = time.monotonic() + 10
        while engine.pager.num_loading or not engine.pager._history.size(world.refs["mixed"].digest):
            assert time.monotonic() < deadline
            engine.step()
        started = time.monotonic()
        for _ in range(20):
            worker._receive()
            engine.step()
        assert time.monotonic() - started > 0.3
        wakeup.close()


def test_lent_adapter_is_loaded_for_requesting_tenant(world, make_engine, monkeypatch):
    engine = make_engine()
    asked = []
    request = engine.pager.request
    monkeypatch.setattr(engine.pager, "request", lambda ref: asked.append(ref.tenant) or request(ref))
    engine.add(
        AddRequest(
            request_id=RequestId("r"),
            tenant=TenantId("borrower"),
            adapter=world.refs["rs"],
            prompt_token_ids=(5, 6, 7),
            params=SamplingParams(max_tokens=1, temperature=0.0),
        )
    )
    while engine.has_requests:
        engine.step()
    assert set(asked) == {"borrower"}


def test_restricted_requests_keep_tokens_and_change_no_neighbour(world, make_engine):
    prompt = prompts(1, seed=3, low=8, high=8)[0]
    engine = make_engine()
    plain = add(engine, world, prompt, "r8")
    free = run(engine)[plain]
    word = tuple(free[1:3])
    asked = {
        add(engine, world, prompt, "r8"): None,
        add(engine, world, prompt, "r8", allowed_token_ids=(3, 5, 8)): {3, 5, 8},
        add(engine, world, prompt, "r8", allowed_token_ids=(3, 5, 8), temperature=1.0, seed=4): {3, 5, 8},
        add(engine, world, prompt, "r8", bad_words=(word,)): None,
        add(engine, world, prompt, "r8", bad_words=((free[0],), (free[1],)), temperature=0.9, seed=1): None,
    }
    texts = run(engine)
    same, narrow, drawn, clean, cleaner = (texts[request_id] for request_id in asked)
    assert same == free
    for text in (narrow, drawn):
        assert set(text) <= {3, 5, 8}
    assert clean[:2] == free[:2]
    assert word not in list(itertools.pairwise(clean))
    assert not {free[0], free[1]} & set(cleaner)
