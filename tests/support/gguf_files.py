"""GGUF files of transformers' models, written by llama.cpp's own package as its converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gemma": "gemma",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "glm4": "glm4",
    "qwen2_moe": "qwen2moe",
    "ministral3": "mistral3",
}
_PERMUTED = ("llama", "granite", "smollm3", "mistral3")
FLOATS = {"F32": np.float32, "F16": np.float16}


def words(count: int) -> tuple[list[str], list[str]]:
    """Return a byte-level vocabulary of so many tokens and its merges, which spell anything."""
    alphabet = [*map(chr, range(ord("!"), ord("~") + 1)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
    alphabet += [chr(0x100 + number) for number in range(256 - len(alphabet))]
    tokens, merges = alphabet[:count], []
    for left in "abcdefghij":
        for right in "klmnopqrst":
            if len(tokens) < count:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    tokens += [f"<|{number}|>" for number in range(count - len(tokens))]
    return tokens, merges


def write_gguf(
    model: Any,
    path: Path,
    form: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, np.ndarray] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model; its linears and its embedding in this type.

    Args:
        metadata: more keys, or others' values.
        raw: rows of blocks of a matrix by its name in the model, of a type that the package doesn't
            write.
        extra: more tensors, by their names in the file.
    """
    config = model.config
    name = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, name)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta") or _theta(config))
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "glm4":
        writer.add_rope_dimension_count(head_dim(config) // 2)
    if config.model_type == "ministral3":
        rope = config.rope_parameters
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type.startswith("gemma") and config.model_type != "gemma":
        writer.add_sliding_window(config.sliding_window)
        if config.model_type == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    tokens, merges = words(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if "tokenizer.ggml.pre" not in (metadata or {}):
        writer.add_tokenizer_pre("gpt-2")
    if "tokenizer.ggml.tokens" not in (metadata or {}):
        writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config.eos_token_id if isinstance(config.eos_token_id, int) else 2)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    for tensor_name, tensor in _tensors(model, name, heads, kv_heads, raw or {}):
        if isinstance(tensor, Tensor):
            _add(writer, tensor_name, tensor, form)
        else:
            writer.add_tensor(tensor_name, tensor, raw_dtype=GGMLQuantizationType[form])
    for tensor_name, array in (extra or {}).items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _theta(config: Any) -> float:
    """The theta of layers without a window, where configs have one for each kind of layer."""
    return float(config.rope_parameters["full_attention"]["rope_theta"])


def _tensors(
    model: Any, name: str, heads: int, kv_heads: int, raw: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    architecture = next(arch for arch, words_ in gguf.MODEL_ARCH_NAMES.items() if words_ == name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for path, tensor in model.state_dict().items():
        if path == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        block = path.split(".")[2] if ".layers." in path else ""
        if path.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{block}.ffn_gate_exps.weight", gate.contiguous()
            yield f"blk.{block}.ffn_up_exps.weight", up.contiguous()
            continue
        if path.endswith("experts.down_proj"):
            yield f"blk.{block}.ffn_down_exps.weight", tensor
            continue
        if path.endswith("mlp.gate.weight"):
            yield f"blk.{block}.ffn_gate_inp.weight", tensor
            continue
        if path.endswith("shared_expert_gate.weight"):
            yield f"blk.{block}.ffn_gate_inp_shexp.weight", tensor.flatten()
            continue
        new = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert new is not None, path
        if name in _PERMUTED and ".q_proj." in path:
            tensor = _permuted(tensor, heads)
        if name in _PERMUTED and ".k_proj." in path:
            tensor = _permuted(tensor, kv_heads)
        if name.startswith("gemma") and path.endswith("norm.weight"):
            tensor = tensor + 1
        if path in raw:
            rows = torch.from_numpy(raw[path])
            permuted = name in _PERMUTED and (".q_proj." in path or ".k_proj." in path)
            yield new, (_permuted(rows, heads if ".q_proj." in path else kv_heads) if permuted else rows).numpy()
            continue
        yield new, tensor


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """As the converter's `LlamaModel.permute`."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _add(writer: GGUFWriter, name: str, tensor: Tensor, form: str) -> None:
    array = tensor.detach().to(torch.float32).contiguous().numpy()
    is_float = tensor.dim() == 1 or "norm" in name or "gate_inp" in name
    if is_float or form == "F32":
        writer.add_tensor(name, array)
    elif form in FLOATS:
        writer.add_tensor(name, array.astype(FLOATS[form]))
    else:
        kind = GGMLQuantizationType[form]
        writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)


def dequantized(model: Any, form: str) -> Any:
    """The model with each weight as the file of this type means it."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 or "norm" in name or name.endswith("mlp.gate.weight") or form == "F32":
                continue
            array = tensor.to(torch.float32).numpy()
            if form in FLOATS:
                tensor.copy_(torch.from_numpy(array.astype(FLOATS[form]).astype(np.float32)))
                continue
            kind = GGMLQuantizationType[form]
            tensor.copy_(torch.from_numpy(quants.dequantize(quants.quantize(array, kind), kind).reshape(array.shape)))
    return model


def write_gguf_adapter(
    tensors: Mapping[str, Tensor],
    config: Any,
    path: Path,
    *,
    alpha: float,
    form: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write PEFT's tensors of an adapter as llama.cpp's `convert_lora_to_gguf.py` does.

    Args:
        config: transformers' config of its base.
        form: type of the factors' numbers: F32, F16 or Q8_0, which rows of 32 have.
        metadata: more strings, or other ones; None of a value leaves the key out.
    """
    name = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, name)
    strings = {"general.type": "adapter", "adapter.type": "lora", **(metadata or {})}
    for key, value in strings.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    architecture = next(arch for arch, words_ in gguf.MODEL_ARCH_NAMES.items() if words_ == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for peft_name, tensor in tensors.items():
        module, _, part = peft_name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        new = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert new is not None, peft_name
        if part == "B" and name in _PERMUTED and module.endswith("q_proj"):
            tensor = _permuted(tensor, config.num_attention_heads)
        if part == "B" and name in _PERMUTED and module.endswith("k_proj"):
            tensor = _permuted(tensor, config.num_key_value_heads)
        if part == "embedding_A":
            tensor = tensor.T.contiguous()
        is_block = tensor.shape[1] % 32 == 0
        _add(writer, f"{new}.lora_{part[-1].lower()}", tensor, form if is_block or form in FLOATS else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
