"""A draft base on a CPU, beside a random Llama with PEFT adapters: whatever it says, and however
often it is right, each answer has the tokens and the logprobs of plain steps, to the last bit.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraserve.engine.engine import Engine
from loraserve.engine.execution.runner import allocate_kv
from loraserve.engine.request import Request
from loraserve.engine.speculation import draft_base
from loraserve.engine.speculation.draft_base import DraftBase
from loraserve.engine.speculation.drafting import Drafting
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.worker import startup
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.messages import AddRequest
from loraserve.errors import ConfigError, ModelError, TokenizerMismatch
from loraserve.memory.memory_plan import DRAFT_SEQUENCES
from loraserve.model.checkpoint.loader import load_model
from loraserve.types import RequestId, SamplingParams, TenantId

from .conftest import World, make_request
from .test_overlap_on_cpu import answer, text
from .test_speculation import FlatCosts
from .test_speculation_on_cpu import NAMES, facts, random_work


def write_draft(base: Path, out: Path, num_layers: int = 3, *, noise: float = 0.0, vocab_size: int = 320) -> Path:
    """Write a base of another's first layers, or of all with some noise, that may lack tokens."""
    tensors = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers:
            continue
        if noise:
            tensor = tensor + noise * torch.randn(tensor.shape, generator=generator)
        is_ends = name in ("model.embed_tokens.weight", "lm_head.weight")
        kept[name] = tensor[:vocab_size].contiguous() if is_ends else tensor
    shutil.copytree(base, out)
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": num_layers, "vocab_size": vocab_size, "layer_types": None})
    )
    return out


def load_draft(directory: Path, base: Engine, num_tokens: int = 128) -> DraftBase:
    decoder = load_model(
        directory, model_id="draft", dtype=torch.float32, quantize="none", device="cpu", max_model_len=num_tokens
    )
    return DraftBase(decoder, allocate_kv(decoder, DRAFT_SEQUENCES * num_tokens // 16, 16), base.base)


DRAFTS = {"the base itself": {}, "nearly the base": {"noise": 0.01}, "two of its layers": {"num_layers": 2}}


@pytest.fixture(scope="module")
def draft_dirs(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: write_draft(world.model_dir, root / name.replace(" ", "-"), **of) for name, of in DRAFTS.items()}


@pytest.fixture
def make_engine(world: World):
    engines: list[Engine] = []

    def make(draft_dir: Path | None = None, *, num_tokens: int = 128, **changes: object) -> Engine:
        plain = build_engine(world.config(speculation="off", **changes)).engine
        engines.append(plain)
        if draft_dir is None:
            return plain
        speculation = Speculation(drafting=Drafting(load_draft(draft_dir, plain, num_tokens)))
        speculation.costs = FlatCosts()
        config = world.config(**changes)
        return Engine(config, plain.base, plain._pipeline._runner, plain.pager, overlap=False, speculation=speculation)

    yield make
    for engine in engines:
        engine.pager.close()


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_answers_are_the_same_to_the_last_bit(world, make_engine, draft_dirs, draft, quantize):
    work = random_work(3, 20, NAMES)
    options = {"max_num_seqs": 6, "quantize": quantize}
    expected = answer(make_engine(**options), world, work)
    engine = make_engine(draft_dirs[draft], **options)
    assert [facts(outputs) for outputs in answer(engine, world, work)] == [facts(outputs) for outputs in expected]
    stats = engine.stats()
    assert stats.proposed_draft_tokens > len(work)
    assert stats.accepted_draft_tokens > 0
    assert stats.draft_s > 0
    assert not engine._speculation._drafting._is_broken


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(36))
def test_no_token_differs_in_thousands_of_requests(world, make_engine, draft_dirs, seed):
    # each work has 80, before a draft base that is always, mostly or seldom right; each combination
    # occurs twice
    work, quantize = random_work(seed, 80, NAMES), ("none", "int8")[seed % 2]
    draft = draft_dirs[list(DRAFTS)[seed % len(DRAFTS)]]
    options = {"quantize": quantize, "max_num_seqs": (1, 3, 8)[seed // 6 % 3]}
    expected = answer(make_engine(**options), world, work)
    engine = make_engine(draft, **options)
    assert [facts(outputs) for outputs in answer(engine, world, work)] == [facts(outputs) for outputs in expected]
    assert engine.stats().accepted_draft_tokens > 0
    assert not engine._speculation._drafting._is_broken


def test_answers_are_the_same_where_requests_are_preempted(world, make_engine, draft_dirs, quick_loads):
    # as in test_speculation_on_cpu: 13 blocks for 8 requests of up to 6
    work = random_work(1, 20, [None, "r1"])
    memory = {
        "memory_budget_bytes": 13 * 16 * 3 * 2 * 2 * 16 * 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 32,
    }
    plain = make_engine(**memory)
    expected = answer(plain, world, work)
    assert plain.stats().num_preemptions > 0
    engine = make_engine(draft_dirs["nearly the base"], **memory)
    assert [facts(outputs) for outputs in answer(engine, world, work)] == [facts(outputs) for outputs in expected]
    assert engine.stats().accepted_draft_tokens > 0


def test_answers_continue_with_same_tokens_in_successor_engine(world, make_engine, draft_dirs):
    work = random_work(5, 12, NAMES)
    expected = answer(make_engine(max_num_seqs=4), world, work)
    received: list[list[int]] = [[] for _ in work]
    has_ended = [False for _ in work]
    while not all(has_ended):
        engine = make_engine(draft_dirs["nearly the base"], max_num_seqs=4)
        for i, (adapter, prompt, params) in enumerate(work):
            if not has_ended[i]:
                params = {**params, "prompt_logprobs": None}
                engine.add(add_request(i, world, adapter, prompt, params, received[i]))
        # more than one step without an end: the engine is gone in the middle of all its answers
        for _ in range(8):
            for output in engine.step() if engine.has_requests else ():
                received[int(output.request_id)] += output.token_ids
                has_ended[int(output.request_id)] |= output.finish_reason is not None
    assert received == [text(outputs) for outputs in expected]


def add_request(number: int, world: World, adapter: str | None, prompt: list[int], params, output=()) -> AddRequest:
    return AddRequest(
        request_id=RequestId(str(number)),
        tenant=TenantId("t"),
        adapter=None if adapter is None else world.refs[adapter],
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        output_token_ids=tuple(output),
    )


def test_self_drafting_base_is_right_without_adapters(world, make_engine, draft_dirs):
    work = [(None, prompt, {**params, "max_tokens": 24}) for _, prompt, params in random_work(3, 10, [None])]
    engine = make_engine(draft_dirs["the base itself"], max_num_seqs=4)
    answer(engine, world, work)
    stats = engine.stats()
    # but for what an answer ends before: also where tokens are drawn, with the same random numbers
    assert stats.accepted_draft_tokens >= 0.98 * stats.proposed_draft_tokens > 100
    assert stats.num_steps < 60


def test_requests_longer_than_cache_slot_get_no_drafts(world, make_engine, draft_dirs):
    engine = make_engine(draft_dirs["the base itself"], num_tokens=32)
    params = {"temperature": 0.0, "max_tokens": 60}
    work = [(None, list(range(10, 20)), params), (None, list(range(40, 80)), params)]
    answers = answer(engine, world, work)
    assert [text(outputs) for outputs in answers] == [world.expected(None, prompt, 60) for _, prompt, _ in work]
    assert 0 < engine.stats().proposed_draft_tokens <= 22


def test_draft_base_with_smaller_vocabulary_proposes_known_tokens(world, make_engine, tmp_path):
    draft = write_draft(world.model_dir, tmp_path / "draft", vocab_size=256)
    rng = random.Random(0)
    # of tokens that both have, of one that the draft base lacks, and biases to such
    work = [
        (None, [rng.randrange(200) for _ in range(20)], {"max_tokens": 24, "temperature": 0.0}),
        (None, [5, 6, 300, 7], {"max_tokens": 24, "temperature": 0.0}),
        (None, [5, 6, 7], {"max_tokens": 24, "temperature": 1.0, "logit_bias": {300: 5.0, 310: 5.0}}),
        (None, [5, 6, 7], {"max_tokens": 24, "temperature": 1.0, "allowed_token_ids": (300, 301, 10)}),
    ]
    engine = make_engine(draft)
    expected = answer(make_engine(), world, work)
    assert [facts(outputs) for outputs in answer(engine, world, work)] == [facts(outputs) for outputs in expected]
    assert engine.stats().proposed_draft_tokens > 0
    assert not engine._speculation._drafting._is_broken


def test_failing_draft_base_ends_no_request(world, make_engine, draft_dirs, caplog):
    engine = make_engine(draft_dirs["the base itself"])
    base = engine._speculation._drafting._base
    advance, passes = base.advance, itertools.count()

    def fail(drafted):
        if next(passes) == 5:
            raise FloatingPointError("no")
        return advance(drafted)

    base.advance = fail
    prompt = list(range(10, 20))
    (outputs,) = answer(engine, world, [(None, prompt, {"temperature": 0.0, "max_tokens": 40})])
    assert text(outputs) == world.expected(None, prompt, 40)
    assert next(passes) == 6
    assert "the draft base failed" in caplog.text


def test_ended_requests_free_cache_slots(world, make_engine, draft_dirs):
    engine = make_engine(draft_dirs["nearly the base"], max_num_seqs=8)
    answer(engine, world, random_work(6, 16, [None]))
    base = engine._speculation._drafting._base
    assert not base._seats
    assert sorted(base._free) == list(range(DRAFT_SEQUENCES))


# the engine's start


def test_engine_loads_draft_base_within_budget(world, draft_dirs):
    plain = build_engine(world.config())
    parts = build_engine(world.config(draft_model_dir=str(draft_dirs["two of its layers"])))
    drafting = parts.engine._speculation._drafting
    # 4 sequences of 256 tokens: 2 layers of 2 heads of 16 numbers, keys and values, float32
    num_bytes = 4 * 256 * 2 * 2 * 16 * 2 * 4
    assert drafting._base.kv_num_bytes == num_bytes
    assert drafting._base.max_tokens == 256
    left = plain.engine.stats().device_bytes - parts.engine.stats().device_bytes
    for made in (plain, parts):
        made.close()
    assert left == num_bytes


def test_draft_base_with_different_tokenizer_is_refused_early(world, draft_dirs, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(draft_dirs["two of its layers"], draft)
    definition = json.loads((draft / "tokenizer.json").read_text())
    definition["model"]["vocab"]["new"] = definition["model"]["vocab"].pop("a")
    (draft / "tokenizer.json").write_text(json.dumps(definition))
    config = world.config(draft_model_dir=str(draft), quantize="unknown")
    with pytest.raises(TokenizerMismatch, match="the token 'a' has the id"):
        build_engine(config)


def test_answer_changing_draft_base_is_refused(world, draft_dirs, monkeypatch):
    monkeypatch.setattr(startup, "has_exact_rows", lambda decoder, config: False)
    with pytest.raises(ConfigError, match="--draft-model needs steps whose rows") as caught:
        build_engine(world.config(draft_model_dir=str(draft_dirs["two of its layers"])))
    assert "--dtype float32" in (caught.value.hint or "")


def test_directory_without_base_is_refused_by_missing_file(world, tmp_path):
    shutil.copy(world.model_dir / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        build_engine(world.config(draft_model_dir=str(tmp_path)))


def test_cache_over_half_of_budget_is_refused(world, draft_dirs):
    config = world.config(draft_model_dir=str(draft_dirs["the base itself"]), memory_budget_bytes=1 << 20)
    with pytest.raises(ConfigError, match="half of the memory budget"):
        build_engine(config)


# what it says


def say(draft: DraftBase, requests: list[Request], count: int = 4) -> list[tuple[int, ...]]:
    going = drafted = draft.begin(requests, [count] * len(requests))
    while going:
        going = draft.advance(going)
    said = {one.request: tuple(one.said) for one in drafted}
    return [said[request] for request in requests]


def test_drafts_after_any_rejections_equal_fresh_drafts(world, make_engine, draft_dirs):
    plain = make_engine()
    draft, rng = load_draft(draft_dirs["two of its layers"], plain), random.Random(0)
    # more requests than seats, in changing companies, each with right and with wrong guesses
    requests = [make_request(tokens=rng.choices(range(320), k=rng.randint(1, 30)), max_tokens=100) for _ in range(6)]
    for _ in range(20):
        some = rng.sample(requests, rng.randint(1, DRAFT_SEQUENCES))
        said = say(draft, some)
        assert said == say(load_draft(draft_dirs["two of its layers"], plain), some)
        for request, guesses in zip(some, said, strict=True):
            num_right = rng.randint(0, len(guesses))
            # and what it said in steps without the draft base
            request.token_ids += [*guesses[:num_right], *rng.choices(range(320), k=rng.randint(1, 4))]


def test_a_long_text_is_read_in_several_steps(world, make_engine, draft_dirs, monkeypatch):
    monkeypatch.setattr(draft_base, "MAX_CATCH_UP", 32)
    draft = load_draft(draft_dirs["two of its layers"], make_engine())
    request = make_request(tokens=random.Random(0).choices(range(320), k=52), max_tokens=100)
    assert draft.num_behind(request) == 52
    assert say(draft, [request]) == [()]
    assert draft.num_behind(request) == 20
    (said,) = say(draft, [request])
    assert len(said) == 4
    # the last one has to be computed again, for the row that says the next
    assert draft.num_behind(request) == 1
