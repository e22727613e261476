"""Speculation on the CPU's runner, over a random Llama with PEFT adapters: in every format, and for
every way of sampling, each answer has the tokens and the logprobs of plain steps, to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from adapters_store import open_store
from loraserve.engine.engine import Engine
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.worker.startup import build_engine
from loraserve.types import ThinkingBudget, TokenOutput

from .conftest import ADAPTERS, World, store_adapter
from .test_overlap_on_cpu import answer, text
from .test_speculation import eager

NAMES = [None, *ADAPTERS]
FEW = tuple(range(40, 46))
"""Tokens that answers are made of, so that they repeat themselves."""
WAYS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": FEW, "logprobs": 1, "logprob_token_ids": (3, 1)},
    {"temperature": 1.0, "allowed_token_ids": FEW[:2]},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.01, "allowed_token_ids": FEW, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": FEW, "repetition_penalty": 1.05},
    {"temperature": 0.0, "allowed_token_ids": FEW, "frequency_penalty": 0.05, "presence_penalty": 0.1, "logprobs": 3},
    {"temperature": 1.0, "allowed_token_ids": FEW, "stop_token_ids": FEW[:1], "min_tokens": 9},
    {"temperature": 0.0, "allowed_token_ids": FEW, "bad_words": ((40, 41), (42,))},
    {"temperature": 0.0, "allowed_token_ids": FEW, "logit_bias": {41: 3.0}},
    {"temperature": 0.0, "thinking": ThinkingBudget(num_tokens=5, closers=(7,), is_open=True), "logprobs": 1},
    {
        "temperature": 1.0,
        "allowed_token_ids": FEW,
        "thinking": ThinkingBudget(num_tokens=3, closers=(FEW[1],), openers=(FEW[0],), blanks=FEW[2:4]),
    },
    {"temperature": 0.0, "prompt_logprobs": 1, "allowed_token_ids": FEW, "max_tokens": 9},
]

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine():
    engines: list[Engine] = []

    def make(world: World, speculation: Speculation | None, **changes: object) -> Engine:
        config = world.config(speculation="off", **changes)
        plain = build_engine(config).engine
        engines.append(plain)
        return Engine(config, plain.base, plain._pipeline._runner, plain.pager, overlap=False, speculation=speculation)

    yield make
    for engine in engines:
        engine.pager.close()


def random_work(seed: int, count: int, names: list[str | None], length: int = 40) -> list[tuple]:
    rng = random.Random(seed)
    shared = [rng.choice(FEW) for _ in range(24)]
    work = []
    for i in range(count):
        prompt = shared[: rng.choice([0, 0, 16, 24])] + [rng.randrange(5, 80) for _ in range(rng.randint(1, length))]
        work.append((rng.choice(names), prompt, {"max_tokens": 24, "seed": i, **WAYS[i % len(WAYS)]}))
    return work


def facts(outputs: list[TokenOutput]) -> tuple[object, ...]:
    """All that a client can see of an answer but times."""
    scores = [score for output in outputs for score in output.logprobs or ()]
    return text(outputs), scores, outputs[0].prompt_logprobs, outputs[-1].finish_reason, outputs[-1].stop_reason


def assert_equal(world: World, make_engine: MakeEngine, work: list[tuple], **changes: object) -> Speculation:
    speculation = eager()
    plain = answer(make_engine(world, None, **changes), world, work)
    proposing = answer(make_engine(world, speculation, **changes), world, work)
    for mine, expected in zip(proposing, plain, strict=True):
        assert facts(mine) == facts(expected)
    assert sum(speculation.num_proposed.values()) > sum(speculation.num_accepted.values()) > len(work)
    return speculation


@pytest.mark.parametrize(
    "format",
    [{"quantize": format} for format in ("none", "int8", "int4", "fp8")] + [{"dtype": "float16"}],
    ids=str,
)
def test_speculation_changes_no_bit_in_any_format(world, make_engine, format):
    assert_equal(world, make_engine, random_work(0, 20, NAMES), max_num_seqs=6, **format)


def test_answers_are_the_same_where_requests_are_preempted(world, make_engine, quick_loads):
    # 13 blocks of 16 tokens, less what adapters take, for 8 requests of up to 90
    work = random_work(1, 20, [None, "r1"])
    memory = {"memory_budget_bytes": 13 * 16 * 3 * 2 * 2 * 16 * 4, "max_model_len": 96}
    plain = make_engine(world, None, max_num_batched_tokens=32, **memory)
    expected = answer(plain, world, work)
    assert plain.stats().num_preemptions > 0
    speculation = eager()
    proposing = answer(make_engine(world, speculation, max_num_batched_tokens=32, **memory), world, work)
    assert [facts(outputs) for outputs in proposing] == [facts(outputs) for outputs in expected]
    assert sum(speculation.num_accepted.values()) > 0


KINDS = {
    "dora": {"use_dora": True, "target_modules": ["k_proj", "down_proj", "q_proj"]},
    "activated": {"alora_invocation_tokens": [40, 41], "target_modules": ["k_proj", "down_proj", "v_proj"]},
    "tokens": {"bias": "all", "target_modules": ["k_proj", "down_proj"], "trainable_token_indices": [40, 43, 77]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_answer_of_further_adapter_kinds(tmp_path, make_engine, kind):
    import peft
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=80,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(config).eval()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=4, **KINDS[kind]))
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data.mul_(1 + 0.5 * torch.rand_like(parameter))
        elif parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    store_url = f"file://{tmp_path}/blobs"
    ref = store_adapter(open_store(store_url), tmp_path / "adapter")
    world = World(tmp_path / "base", store_url, {"adapter": ref}, model.eval())
    assert_equal(world, make_engine, random_work(2, 20, [None, "adapter"]), max_num_seqs=5)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(36))
def test_no_token_differs_in_thousands_of_requests(world, make_engine, seed):
    # each work has 80; a speculation that chooses by what steps take is compared too
    quantize, work = ("none", "int8")[seed % 2], random_work(seed, 80, NAMES)
    assert_equal(world, make_engine, work, quantize=quantize, max_num_seqs=8)
    plain = answer(make_engine(world, None, quantize=quantize), world, work)
    proposing = answer(make_engine(world, Speculation(), quantize=quantize), world, work)
    assert [facts(outputs) for outputs in proposing] == [facts(outputs) for outputs in plain]


@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({}, True),
        ({"quantize": "int8"}, True),
        ({"dtype": "float16"}, True),
        ({"speculation": "off"}, False),
    ],
    ids=str,
)
def test_speculation_is_on_where_rows_are_exact(world, changes, is_on):
    engine = build_engine(world.config(**changes)).engine
    engine.pager.close()
    assert (engine._speculation is not None) == is_on


def test_speculation_is_off_where_library_rounds_to_bfloat16(world):
    engine = build_engine(world.config(dtype="bfloat16")).engine
    engine.pager.close()
    is_rounding = "bf16" in engine.base.arithmetic.split("+")
    assert (engine._speculation is None) == is_rounding
