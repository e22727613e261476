"""The shapes that are checked and measured: Llama-3.1-8B's, and toy ones for dry runs."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.limits import SiteShape
from loraserve_kernels.cpu.lora.layout import LAYER_SITES, SITES

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_LLAMA: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
}


def llama(is_tiny: bool) -> dict[str, Any]:
    """A config.json."""
    return TINY_LLAMA if is_tiny else LLAMA_8B


def module_shapes(is_tiny: bool) -> dict[str, tuple[int, int]]:
    """Linear's short name → (out_features, in_features), the head and the embedding included."""
    config = llama(is_tiny)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (vocab, hidden),
        "embed_tokens": (hidden, vocab),
    }


def site_shapes(is_tiny: bool) -> dict[str, SiteShape]:
    """The sites of a layer."""
    shapes = module_shapes(is_tiny)
    return {
        site: SiteShape(shapes[SITES[site][0]][1], tuple(shapes[module][0] for module in SITES[site]))
        for site in LAYER_SITES
    }
