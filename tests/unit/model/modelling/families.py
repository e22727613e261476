"""Small random bases of transformers' own classes, of families that aren't in the native table and
of some that are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from loraserve.model.modelling.loading import load_modelled
from loraserve.model.modelling.modelled_base import ModelledBase

from ..conftest import SMALL, randomize, save_model

_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 2}
_GPT = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128, "rotary_dim": 8}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ApertusForCausalLM": ("Apertus", {}),
    "ArceeForCausalLM": ("Arcee", {}),
    "CodeGenForCausalLM": ("CodeGen", _GPT),
    "Cohere2ForCausalLM": ("Cohere2", {"sliding_window": 9, "num_hidden_layers": 4}),
    "CohereForCausalLM": ("Cohere", {"logit_scale": 0.5}),
    "DeepseekV3ForCausalLM": ("DeepseekV3", {**_MLA, **_EXPERTS}),
    "Ernie4_5_MoeForCausalLM": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "FlexOlmoForCausalLM": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GPTBigCodeForCausalLM": ("GPTBigCode", {}),
    "GPTJForCausalLM": ("GPTJ", _GPT),
    "GPTNeoXForCausalLM": ("GPTNeoX", {}),
    "Glm4MoeForCausalLM": ("Glm4Moe", _EXPERTS),
    "GptOssForCausalLM": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16},
    ),
    "GraniteMoeForCausalLM": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "NanoChatForCausalLM": ("NanoChat", {}),
    "NemotronForCausalLM": ("Nemotron", {}),
    "OPTForCausalLM": ("OPT", {}),
    "OlmoForCausalLM": ("Olmo", {}),
    "PersimmonForCausalLM": ("Persimmon", {}),
    "PhiForCausalLM": ("Phi", {}),
    "PhimoeForCausalLM": ("Phimoe", {"num_local_experts": 4}),
    "Starcoder2ForCausalLM": ("Starcoder2", {"sliding_window": 9}),
}
"""Class of transformers → its config, and the fields that make it small."""
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "FalconH1ForCausalLM": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 96, "ssm_in_multiplier": 0.7, "mamba_rms_norm": False},
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "Lfm2ForCausalLM": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "Lfm2MoeForCausalLM": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3Next",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "Qwen3_5ForCausalLM": ("Qwen3_5Text", _DELTA),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3_5MoeText",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
        },
    ),
}
"""The same of classes some of whose layers are recurrent."""

BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "Exaone4ForCausalLM": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 4}),
    "Gemma2ForCausalLM": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "Gemma3ForCausalLM": ("Gemma3Text", {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6}),
    "LlamaForCausalLM": ("Llama", {}),
    "MixtralForCausalLM": ("Mixtral", {"num_local_experts": 4}),
    "Phi3ForCausalLM": ("Phi3", {}),
    "Qwen3ForCausalLM": ("Qwen3", {"head_dim": 16}),
}
"""The same of classes that the native decoder reads."""


def build(name: str, **overrides: Any) -> Any:
    """Return transformers' small random model of a class."""
    config_name, options = {**OTHERS, **HYBRIDS, **BOTH}[name]
    values = {**SMALL, "pad_token_id": 0, "bos_token_id": 1, **options, **overrides}
    config = getattr(transformers, f"{config_name}Config")(**values)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def save(name: str, directory: Path, **overrides: Any) -> Any:
    """Save a small random model, and return it."""
    model = build(name, **overrides)
    save_model(model, directory)
    return model


def load(directory: Path, **options: Any) -> ModelledBase:
    settings = {
        "model_id": "org/base",
        "dtype": torch.float32,
        "quantize": "none",
        "device": "cpu",
        "max_model_len": None,
        **options,
    }
    return load_modelled(directory, **settings)
