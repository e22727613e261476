"""The same weights and adapters in transformers and PEFT, where these are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, LoraModule

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


def make_model(config_json: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A model of this config.json with weights of transformers' own choosing.

    Raises:
        ModuleNotFoundError: transformers is missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: value for key, value in config_json.items() if key != "architectures"}
    model_type = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[config_json["architectures"][0]]
    config = AutoConfig.for_model(model_type, **known)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def add_adapters(model: Any, ranks: Sequence[int]) -> Any:
    """Wrap the model, with an adapter ``a0``, ``a1``, … for each rank on all seven linears of each
    layer, in the model's dtype.

    Raises:
        ModuleNotFoundError: PEFT is missing.
    """
    from peft import LoraConfig, get_peft_model

    wrapped = None
    for i, rank in enumerate(ranks):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LAYER_MODULES), init_lora_weights=False)
        if wrapped is None:
            wrapped = get_peft_model(model, config, adapter_name=f"a{i}", autocast_adapter_dtype=False)
        else:
            wrapped.add_adapter(f"a{i}", config, autocast_adapter_dtype=False)
    return wrapped.eval() if wrapped is not None else model


def set_weights(
    wrapped: Any, weights: Mapping[str, Tensor], adapters: Sequence[Mapping[tuple[int, str], LoraModule]]
) -> None:
    """Put a base's weights (by their names in a checkpoint) and the adapters' into a model that
    `add_adapters` has wrapped.
    """
    inner = wrapped.get_base_model()
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            plain = name.replace(".base_layer.", ".")
            if "lora_" not in name:
                parameter.copy_(weights[plain])
        for i, modules in enumerate(adapters):
            for (layer, short), module in modules.items():
                block = "self_attn" if short in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                linear = inner.get_submodule(f"model.layers.{layer}.{block}.{short}")
                linear.lora_A[f"a{i}"].weight.copy_(module.lora_a)
                linear.lora_B[f"a{i}"].weight.copy_(module.lora_b)
                linear.scaling[f"a{i}"] = module.scaling


@torch.inference_mode()
def logits(wrapped: Any, prompts: Sequence[Sequence[int]], names: Sequence[str], device: torch.device) -> list[Tensor]:
    """Each prompt's logits [num_tokens, vocab_size], from one mixed batch."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)], mask[i, : len(prompt)] = torch.tensor(prompt, device=device), 1
    out = wrapped(input_ids=ids, attention_mask=mask, adapter_names=list(names)).logits
    return [out[i, : len(prompt)] for i, prompt in enumerate(prompts)]
