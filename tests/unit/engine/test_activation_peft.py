"""Activated LoRAs on a random Llama: the engine says what PEFT's own `generate` says, however their
prompts are cut and shared.
"""

from __future__ import annotations

import itertools
import random

import peft
import pytest
import torch
import transformers

from adapters_store import open_store
from loraserve.engine.engine import Engine
from loraserve.engine_client.messages import AddRequest
from loraserve.types import RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import World, make_engines, store_adapter

INVOCATION = [301, 302, 303]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "activated": {"r": 8, "lora_alpha": 16, "target_modules": [*ALL, "lm_head"], "alora_invocation_tokens": INVOCATION},
    "other": {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [302]},
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
}
VOCAB = 320

_ids = itertools.count()


@pytest.fixture(scope="module")
def activated(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.manual_seed(1)
    root = tmp_path_factory.mktemp("activated")
    store_url = f"file://{root}/blobs"
    store = open_store(store_url)
    base = transformers.AutoModelForCausalLM.from_pretrained(world.model_dir, dtype=torch.float32)
    configs = {name: peft.LoraConfig(task_type="CAUSAL_LM", **options) for name, options in ADAPTERS.items()}
    model = peft.get_peft_model(base, configs["activated"], adapter_name="activated")
    refs = {}
    for name, config in configs.items():
        if name != "activated":
            model.add_adapter(name, config)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                torch.nn.init.normal_(parameter.data, std=0.2)
        model.save_pretrained(str(root), selected_adapters=[name], save_embedding_layers=False)
        refs[name] = store_adapter(store, root / name)
    return World(world.model_dir, store_url, refs, model.eval())


@pytest.fixture
def make_engine(activated: World):
    yield from make_engines(activated)


def add(engine: Engine, world: World, prompt: list[int], adapter: str | None, **params: object) -> RequestId:
    request_id = RequestId(f"r{next(_ids)}")
    output = tuple(params.pop("output", ()))
    message = AddRequest(
        request_id=request_id,
        tenant=TenantId("t"),
        adapter=None if adapter is None else world.refs[adapter],
        prompt_token_ids=tuple(prompt),
        output_token_ids=output,
        params=SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **params}),  # type: ignore[arg-type]
    )
    engine.add(message)
    return request_id


def run(engine: Engine) -> dict[RequestId, list[TokenOutput]]:
    outputs: dict[RequestId, list[TokenOutput]] = {}
    while engine.has_requests:
        for output in engine.step():
            assert output.error_code is None, output
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.check() == []
    assert (engine.stats().num_kv_blocks_used, engine.stats().num_pins) == (0, 0)
    return outputs


def text(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def generate(world: World, adapter: str | None, prompt: list[int], count: int = 5) -> tuple[list[int], torch.Tensor]:
    """PEFT's tokens, and the log probabilities that they were chosen by: [count, vocab_size]."""
    ids = torch.tensor([prompt])
    how = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode():
        if adapter is None:
            with world.model.disable_adapter():
                said = world.model.base_model.generate(input_ids=ids, **how)
        else:
            world.model.set_adapter(adapter)
            said = world.model.generate(input_ids=ids, **how)
    return said.sequences[0, len(prompt) :].tolist(), torch.cat(said.logits).log_softmax(-1)


def prompt_of(*lengths: int, seed: int = 0) -> list[int]:
    """Random tokens, so many at a time, with the invocation between each two."""
    rng = random.Random(seed)
    parts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    return [token for i, part in enumerate(parts) for token in (*(INVOCATION if i else ()), *part)]


PROMPTS = [
    prompt_of(*lengths, seed=i)
    for i, lengths in enumerate([(20, 5), (15, 4), (16, 0), (0, 7), (9, 12, 3), (18,), (30, 1, 1)])
]


def test_mixed_batch_logits_equal_peft_generation(activated, make_engine):
    engine = make_engine()
    names = ["activated", "other", "plain", None]
    asked = {
        add(engine, activated, prompt, name, logprobs=VOCAB): (name, prompt) for prompt in PROMPTS for name in names
    }
    answers = run(engine)
    for request_id, (name, prompt) in asked.items():
        tokens, logprobs = generate(activated, name, prompt)
        assert text(answers[request_id]) == tokens, (name, prompt)
        for output, wanted in zip(answers[request_id], logprobs, strict=True):
            ours = dict(output.logprobs[0].top)
            assert max(abs(ours[t] - float(wanted[t])) for t in range(VOCAB)) < 1e-4
    # the tests below would be none if it didn't matter where the adapter acts
    texts = {tuple(generate(activated, name, PROMPTS[0])[0]) for name in names}
    assert len(texts) == 4


def test_text_is_same_for_any_prompt_split(activated, make_engine):
    engine = make_engine(enable_prefix_cache=False)
    prompt = PROMPTS[4]
    wanted = generate(activated, "activated", prompt)[0]
    for budget in range(1, len(prompt) + 1):
        engine._scheduler._token_budget = budget
        request_id = add(engine, activated, prompt, "activated")
        assert text(run(engine)[request_id]) == wanted


def test_prompts_are_scored_by_base_up_to_invocation(activated, make_engine):
    engine = make_engine()
    engine._scheduler._token_budget = 7
    prompt = PROMPTS[1]
    request_id = add(engine, activated, prompt, "activated", max_tokens=0, prompt_logprobs=0)
    scores = run(engine)[request_id][0].prompt_logprobs
    activated.model.set_adapter("activated")
    with torch.inference_mode():
        wanted = activated.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position in range(1, len(prompt)):
        assert scores[position].token_id == prompt[position]
        assert abs(scores[position].logprob - float(wanted[position - 1, prompt[position]])) < 1e-4


def test_base_conversation_prefix_is_shared_with_activated_adapters(activated, make_engine):
    engine = make_engine()
    shared = PROMPTS[5] + PROMPTS[6][:30]
    work = [
        (None, shared, 0),
        ("activated", [*shared, *INVOCATION, 5], 48),
        ("other", [*shared, *INVOCATION, 5], 48),
        ("plain", [*shared, *INVOCATION, 5], 0),
        (None, [*shared, *INVOCATION, 5], 48),
        ("activated", [*shared, *INVOCATION, 5], 48),
        # invoked in the fourth block, and then not at all
        ("activated", [*shared[:30], *shared[:30], *INVOCATION, *shared[:10]], 16),
        (None, [*shared[:30], *shared[:30], 7], 48),
        ("activated", [*shared[:30], *shared[:30], 7], 48),
    ]
    for name, prompt, num_cached in work:
        request_id = add(engine, activated, prompt, name)
        outputs = run(engine)[request_id]
        assert (text(outputs), outputs[0].num_cached_tokens) == (generate(activated, name, prompt)[0], num_cached), name
    assert engine.stats().base_prefix_tokens_hit == 48 * 3 + 16 + 48


def test_preemption_changes_no_token(activated, make_engine, quick_loads):
    # 18 blocks of 16 tokens, less what adapters take, for 8 requests of up to 50: they can't all
    # stay
    engine = make_engine(
        memory_budget_bytes=18 * 16 * 3 * 2 * 2 * 16 * 4,
        max_model_len=96,
        max_num_batched_tokens=23,
        max_num_seqs=8,
    )
    prompts = [prompt_of(17, i, i % 3, seed=3) for i in range(8)]
    names = ["activated", "other", None, "activated"]
    asked = [add(engine, activated, prompt, names[i % 4], max_tokens=20) for i, prompt in enumerate(prompts)]
    answers = run(engine)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().base_prefix_tokens_hit > 0
    for i, prompt in enumerate(prompts):
        assert text(answers[asked[i]]) == generate(activated, names[i % 4], prompt, 20)[0]


def test_answer_with_invocation_continues_after_crash_unchanged(activated, make_engine):
    engine = make_engine()
    prompt = PROMPTS[0]
    said = [*INVOCATION, 4, *INVOCATION]
    request_id = add(engine, activated, prompt, "activated", output=said, max_tokens=len(said) + 1, logprobs=VOCAB)
    output = run(engine)[request_id][0]
    ids = torch.tensor([[*prompt, *said]])
    activated.model.set_adapter("activated")
    with torch.inference_mode():
        wanted = activated.model(ids, alora_offsets=[ids.shape[1] - 20]).logits[0, -1].log_softmax(-1)
    ours = dict(output.logprobs[0].top)
    assert max(abs(ours[t] - float(wanted[t])) for t in range(VOCAB)) < 1e-4


def test_int8_base_text_equals_alone_and_cobatched(activated, make_engine):
    engine = make_engine(quantize="int8", enable_prefix_cache=False)
    work = [(prompt, name) for prompt in PROMPTS for name in ("activated", "other", None)]
    alone = []
    for prompt, name in work:
        request_id = add(engine, activated, prompt, name)
        alone.append(text(run(engine)[request_id]))
    together = [add(engine, activated, prompt, name) for prompt, name in work]
    answers = run(engine)
    assert [text(answers[request_id]) for request_id in together] == alone
