"""A GPU's engine, its kernels in Triton's interpreter, with adapters of other kinds: DoRA on
linears with biases, on the embedding and on the head; aLoRA; tokens of an adapter's own, at both
ends of a tied base, beside biases of its own.

PEFT's probabilities are the oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from adapters_store import open_store
from loraserve.config import EngineConfig
from loraserve.engine.worker.startup import build_engine
from loraserve.limits import MIB
from loraserve.types import TokenOutput

from .conftest import World, store_adapter
from .test_engine import add, run

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::UserWarning")]

DORA = {"r": 3, "lora_alpha": 4, "use_dora": True, "target_modules": ["k_proj", "down_proj", "embed_tokens", "lm_head"]}
ACTIVATED = {
    "r": 3,
    "lora_alpha": 4,
    "alora_invocation_tokens": [5, 33],
    "target_modules": ["k_proj", "down_proj", "lm_head"],
}
TOKENS = {
    "r": 3,
    "lora_alpha": 4,
    "bias": "all",
    "target_modules": ["k_proj", "down_proj"],
    "trainable_token_indices": [5, 9, 33],
}
PROMPTS = [("adapter", [5, 33, 5, 33, 2]), (None, [7, 1, 60]), ("adapter", [7, 5, 79, 5, 33]), ("adapter", [33, 5, 9])]


def make_world(root: Path, options: dict[str, object]) -> World:
    """A tied base whose q, k and v have biases, and a random adapter."""
    import peft
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=80,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(config).eval()
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter.data)
    base.save_pretrained(root / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data.mul_(1 + 0.5 * torch.rand_like(parameter))
        elif "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
        elif parameter.requires_grad:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(root / "adapter")
    store_url = f"file://{root}/blobs"
    ref = store_adapter(open_store(store_url), root / "adapter")
    return World(root / "base", store_url, {"adapter": ref}, model.eval())


@pytest.mark.parametrize("options", [DORA, ACTIVATED, TOKENS], ids=["dora", "activated", "tokens"])
@torch.inference_mode()
def test_adapters_rows_beside_the_bases_equal_pefts(tmp_path, options):
    from transformers import AutoModelForCausalLM

    world = make_world(tmp_path, options)
    config = EngineConfig(
        model_dir=str(world.model_dir),
        model_id="tiny",
        store_url=world.store_url,
        memory_budget_bytes=4 * MIB,
        host_cache_bytes=4 * MIB,
        device="cuda",
        dtype="float16",
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    engine = build_engine(config).engine
    try:
        outputs: list[TokenOutput] = []
        ids = [
            add(engine, world, prompt, name, max_tokens=2, logprobs=1, prompt_logprobs=1) for name, prompt in PROMPTS
        ]
        tokens = run(engine, outputs)
    finally:
        engine.pager.close()
    for request_id, (name, prompt) in zip(ids, PROMPTS, strict=True):
        text = torch.tensor([[*prompt, *tokens[request_id]]])
        # an adapter that PEFT turns off leaves its biases behind
        model = world.model if name is not None else AutoModelForCausalLM.from_pretrained(world.model_dir).eval()
        expected = model(text).logits[0].log_softmax(-1)
        mine = [output for output in outputs if output.request_id == request_id]
        scores = [s for output in mine for s in (*(output.prompt_logprobs or ())[1:], *(output.logprobs or ()))]
        assert len(scores) == text.shape[1] - 1
        for i, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(expected[i, score.token_id]), abs=0.05)
