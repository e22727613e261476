"""What adapters change beside ranks of layers' linears (biases, outputs' scales, whole weights,
tokens, norms), from PEFT's files to logits that are PEFT's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from campaigns import default_and_campaign
from torch import Tensor

from loraserve.adapters.composition import composition_digest
from loraserve.errors import AdapterUnservable
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.precision import EXACT, Precision
from loraserve.types import AdapterPart, AdapterRef
from loraserve_kernels.cpu.lora.layout import PackedAdapter

from .conftest import random_tokens, reference_logits
from .test_adapter_kinds import LINEARS, Serving, open_model, publish, run_together

# PEFT remarks on tied embeddings, on biases and on what it saves of the base
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM"}
KINDS: dict[str, peft.PeftConfig] = {
    "every bias": peft.LoraConfig(**LORA, bias="all", target_modules=["q_proj", "o_proj"]),
    "targets' biases": peft.LoraConfig(**LORA, bias="lora_only", target_modules=["k_proj", "down_proj"]),
    "lora_B's bias": peft.LoraConfig(**LORA, lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "dora and biases": peft.LoraConfig(**LORA, bias="all", use_dora=True, target_modules=["q_proj", "up_proj"]),
    "ia3": peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "whole head": peft.LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "whole embedding": peft.LoraConfig(**LORA, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    "whole linears": peft.LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["k_proj", "up_proj"]),
    "norms": peft.LoraConfig(
        **LORA, target_modules=["q_proj"], modules_to_save=["input_layernorm", "post_attention_layernorm", "norm"]
    ),
    "norms with an offset": peft.LoraConfig(
        **LORA,
        target_modules=["q_proj"],
        modules_to_save=["input_layernorm", "pre_feedforward_layernorm", "model.norm"],
    ),
    "tokens": peft.LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[3, 50, 100]),
}
CASES = [
    *(("qwen2", {}, kind) for kind in KINDS if kind != "norms with an offset"),
    ("qwen2", {"tie_word_embeddings": True}, "every bias"),
    ("qwen2", {"tie_word_embeddings": True}, "tokens"),
    ("granite", {"embedding_multiplier": 3.0}, "tokens"),
    ("granite", {"embedding_multiplier": 3.0}, "whole embedding"),
    ("gemma2", {"tie_word_embeddings": False}, "norms with an offset"),
]


@torch.no_grad()
def train(model: Any, seed: int) -> None:
    """Change whatever an adapter's training changes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_A" in name or "lora_B" in name:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise * parameter.abs().mean().clamp(min=0.5))


def save(serving: Serving, config: peft.PeftConfig, name: str, *, seed: int = 0) -> Any:
    """Save a trained adapter with PEFT; returns the model as PEFT loads it back."""
    model = peft.get_peft_model(open_model(serving.base_dir), config)
    train(model, seed)
    model.save_pretrained(serving.root / name)
    return peft.PeftModel.from_pretrained(open_model(serving.base_dir), serving.root / name).eval()


def load(
    serving: Serving, ref: AdapterRef, dtype: torch.dtype | None = None, precision: Precision = EXACT
) -> tuple[PackedAdapter, LoadedAdapter]:
    device = CpuDevice(serving.decoder.spec, 1 << 30, dtype)
    loaded = load_adapter(serving.store, ref, serving.decoder.spec, device, serving.decoder, precision)
    assert isinstance(loaded.host, PackedAdapter)
    return loaded.host, loaded


def logits(serving: Serving, packed: PackedAdapter, prompt: list[int]) -> Tensor:
    """The adapter's, beside the base's own in the same batch."""
    return run_together(serving.decoder, [prompt, prompt], [None, packed])[1]


@pytest.mark.parametrize(("base", "options", "kind"), CASES)
def test_each_kind_answers_as_peft_does(base: str, options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, base, options)
    model = save(serving, KINDS[kind], "adapter")
    packed, _ = load(serving, publish(tmp_path / "adapter", serving.store))
    prompt = [3, *random_tokens(9), 100, 50]
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(logits(serving, packed, prompt), expected, atol=1e-4, rtol=0)
    assert float((expected - reference_logits(open_model(serving.base_dir), prompt)).abs().max()) > 0.01


@pytest.mark.parametrize("outside", [False, True], ids=["layers", "head and embedding"])
def test_dora_on_fused_linears_equals_peft(outside: bool, tmp_path: Path) -> None:
    serving = Serving(tmp_path, "phi3", {"pad_token_id": 0})
    targets = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(**LORA, use_dora=True, target_modules=[*targets, *(["lm_head"] if outside else [])])
    model = save(serving, config, "adapter")
    packed, _ = load(serving, publish(tmp_path / "adapter", serving.store))
    prompt = random_tokens(9)
    torch.testing.assert_close(logits(serving, packed, prompt), reference_logits(model, prompt), atol=1e-4, rtol=0)


ADDABLE: dict[str, tuple[peft.PeftConfig, float]] = {
    "lora with biases": (peft.LoraConfig(**LORA, bias="all", target_modules=["q_proj", "o_proj"]), 0.5),
    "lora outside": (peft.LoraConfig(**LORA, use_rslora=True, target_modules=["embed_tokens", "lm_head"]), -0.75),
    "lora_B's bias": (peft.LoraConfig(**LORA, lora_bias=True, target_modules=["q_proj", "v_proj"]), 1.25),
    "loha": (peft.LoHaConfig(r=2, alpha=3, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"), 0.3),
    "lokr": (peft.LoKrConfig(r=2, alpha=3, target_modules=["k_proj", "up_proj"], task_type="CAUSAL_LM"), 0.6),
}


def composition(parts: list[AdapterPart]) -> AdapterRef:
    return AdapterRef(
        tenant="t",
        name="sum",
        version=1,
        digest=composition_digest(parts),
        config_blob="",
        weights_blob="",
        parts=tuple(parts),
    )


@torch.no_grad()
def test_composition_adds_weighted_differences_to_base(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "qwen2", {})
    model = open_model(serving.base_dir)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged, parts = {name: tensor.clone() for name, tensor in base.items()}, []
    for seed, (name, (config, weight)) in enumerate(ADDABLE.items()):
        trained = save(serving, config, name, seed=seed).merge_and_unload().state_dict()
        parts.append(AdapterPart(adapter=publish(serving.root / name, serving.store), weight=weight))
        for key, tensor in merged.items():
            tensor += weight * (trained[key] - base[key])
    model.load_state_dict(merged)
    prompt = random_tokens(9)
    expected = reference_logits(model, prompt)
    packed, _ = load(serving, composition(parts))
    torch.testing.assert_close(logits(serving, packed, prompt), expected, atol=2e-4, rtol=0)


def test_composition_with_cancelling_weights_equals_base(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "qwen2", {})
    save(serving, KINDS["every bias"], "adapter")
    adapter = publish(tmp_path / "adapter", serving.store)
    packed, _ = load(serving, composition([AdapterPart(adapter=adapter, weight=weight) for weight in (0.5, -0.5)]))
    prompt = random_tokens(9)
    base, composed = run_together(serving.decoder, [prompt, prompt], [None, packed])
    assert packed.num_bytes == 0
    assert torch.equal(base, composed)


@pytest.mark.parametrize(
    ("rank_error", "dtype"),
    default_and_campaign([(None, "int8"), (0.4, "float32"), (0.4, "int8")], default=[(0.4, "int8")]),
)
def test_answer_loss_is_comparable_to_module_loss(rank_error: float | None, dtype: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {})
    config = peft.LoraConfig(r=6, lora_alpha=5, target_modules=LINEARS, use_dora=True, task_type="CAUSAL_LM")
    model = save(serving, config, "adapter")
    ref = publish(tmp_path / "adapter", serving.store)
    packed, loaded = load(serving, ref, getattr(torch, dtype), Precision(rank_error))
    prompt = random_tokens(9)
    expected, base = reference_logits(model, prompt), reference_logits(open_model(serving.base_dir), prompt)
    error = (logits(serving, packed, prompt) - expected).norm() / (expected - base).norm()
    assert 1e-3 < loaded.metadata.precision_loss < (0.03 if rank_error is None else 1.01 * rank_error)
    assert float(error) < 2 * loaded.metadata.precision_loss
    with pytest.raises(AdapterUnservable, match="has a precision loss of"):
        load(serving, ref, getattr(torch, dtype), Precision(rank_error, loaded.metadata.precision_loss * 0.99))
