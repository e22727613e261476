"""Checkpoints of real sizes that take no room: headers, and behind them a hole in the file."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 128001,
}
"""The sizes of Llama 3.1 8B."""


def save_sparse(folder: Path) -> Path:
    """Save a base of `LLAMA_8B`'s sizes in bfloat16, all of it zeros that no disk holds."""
    hidden, inner, vocab, kv = 4096, 14336, 128256, 1024
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(32):
        prefix = f"model.layers.{layer}."
        for name, out_features, in_features in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder
