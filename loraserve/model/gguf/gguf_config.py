"""A config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.architecture import Architecture, Window
from loraserve.model.config.gguf_types import FLOAT_TYPES
from loraserve.model.gguf.gguf_file import Gguf
from loraserve.model.gguf.gguf_layout import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    architecture_of,
    place_tensors,
)

_LLAMA3: Sequence[Mapping[str, Any]] = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0, 16.0)
)
"""Scalings that Llama 3.1, 3.2 and 4 were published with."""
_FACTORS_TOLERANCE = 1e-3
_MULTIMODAL = ("qwen2vl", "qwen3vl")
"""Architectures whose positions have several axes, for images."""
_YARN: Mapping[str, tuple[str, float]] = {
    "rope.scaling.yarn_beta_fast": ("beta_fast", 32.0),
    "rope.scaling.yarn_beta_slow": ("beta_slow", 1.0),
}
"""Settings of yarn → field of config.json, and what it is where a file is silent."""
_NOT_NORMED = ("OlmoeForCausalLM", "Qwen2MoeForCausalLM")
"""Architectures whose experts' probabilities aren't scaled to sum to 1; files lack the flag."""
_LAYERS_OF_27B = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
"""Layers of the models whose scores have another scale than those of their family."""


def make_config(gguf: Gguf) -> dict[str, Any]:
    """Build the config.json that a Hugging Face directory of the same base has.

    Its `quantization_config` names the type of each tensor that isn't in a float dtype.

    Raises:
        UnknownArchitecture, ModelError: what isn't implemented, or is missing.
    """
    architecture = architecture_of(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.files[0]} has no embedding, token_embd.weight.", hint="Give a file with a whole base.")
    heads = gguf.count("attention.head_count")
    hidden = gguf.count("embedding_length")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.count("feed_forward_length"),
        "num_hidden_layers": gguf.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.count("attention.head_count_kv", heads),
        "head_dim": gguf.count("attention.key_length", hidden // heads),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": gguf.count("context_length"),
        "rope_theta": gguf.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }
    value_length = gguf.count("attention.value_length", config["head_dim"])
    if value_length != config["head_dim"]:
        raise gguf.refusal("attention.value_length", str(config["head_dim"]))
    rotated = gguf.count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    config |= _biases(gguf) | _scales(gguf) | _window(gguf, architecture) | _experts(gguf, architecture)
    _check_sections(gguf)
    scaling = _rope_scaling(gguf, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    types = {
        placed.name.removesuffix(".weight"): placed.tensor.type.name
        for placed in place_tensors(gguf)
        if placed.tensor.type.name not in FLOAT_TYPES
    }
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _biases(gguf: Gguf) -> dict[str, Any]:
    """Read the flags of biases, of those architectures that need them."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "use_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }


def _scales(gguf: Gguf) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {ours: gguf.number(name) for name, ours in names.items() if gguf.value(name) is not None}


def _window(gguf: Gguf, architecture: Architecture) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": None}
    if gguf.value("attention.sliding_window"):
        if architecture.window not in (Window.EVERY_LAYER, Window.BY_PATTERN, Window.BY_PATTERN_IF_SET):
            # files don't list the layers that have it
            raise gguf.refusal("attention.sliding_window", "none")
        found["sliding_window"] = gguf.count("attention.sliding_window")
        found |= _layer_types(gguf)
    if architecture.name in _LAYERS_OF_27B:
        # files lack it; the largest published models have another scale than the others
        scalar = gguf.count("attention.key_length", 256)
        if gguf.count("block_count") == _LAYERS_OF_27B[architecture.name]:
            scalar = gguf.count("embedding_length") // gguf.count("attention.head_count")
        found["query_pre_attn_scalar"] = scalar
    return found


def _layer_types(gguf: Gguf) -> dict[str, Any]:
    """Read which layers have the window, where the file has it for each."""
    flags = gguf.value("attention.sliding_window_pattern")
    if not isinstance(flags, list):
        return {}
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags]}


def _experts(gguf: Gguf, architecture: Architecture) -> dict[str, Any]:
    if not gguf.value("expert_count"):
        return {}
    inner = gguf.count("expert_feed_forward_length", gguf.count("feed_forward_length"))
    number, chosen = gguf.count("expert_count"), gguf.count("expert_used_count")
    if gguf.value("expert_shared_count"):
        raise gguf.refusal("expert_shared_count", "0")
    shared = gguf.value("expert_shared_feed_forward_length")
    return {
        **({} if shared is None else {"shared_expert_intermediate_size": shared}),
        "num_local_experts": number,
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        # as llama.cpp's graphs do
        "norm_topk_prob": architecture.name not in _NOT_NORMED,
    }


def _check_sections(gguf: Gguf) -> None:
    """Refuse positions of several axes, but where they are one for text and rows lie as they did.

    Of the others the converter reorders queries and keys.

    Raises:
        ModelError: the file has such positions.
    """
    sections = gguf.value("rope.dimension_sections")
    if sections and any(sections) and gguf.architecture not in _MULTIMODAL:
        raise gguf.refusal("rope.dimension_sections", "none")


def _rope_scaling(gguf: Gguf, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if LONG_FACTORS in gguf.tensors or SHORT_FACTORS in gguf.tensors:
        return _longrope_scaling(gguf)
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, config)
    kind = gguf.value("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = gguf.number("rope.scaling.factor")
    if kind == "linear":
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = gguf.count("rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name, (ours, default) in _YARN.items():
            scaling[ours] = gguf.number(name, default)
        for name in ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.attn_factor"):
            if gguf.value(name) not in (None, 1, 1.0):
                raise gguf.refusal(name, "1")
        if gguf.value("rope.scaling.yarn_log_multiplier") is not None:
            scaling |= {"mscale": 1.0, "mscale_all_dim": gguf.number("rope.scaling.yarn_log_multiplier")}
        return scaling
    raise gguf.refusal("rope.scaling.type", "linear or yarn")


def _llama3_scaling(gguf: Gguf, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the published scaling whose factors these are."""
    tensor, found = gguf.tensors[ROPE_FACTORS], _factors(gguf, ROPE_FACTORS)
    for scaling in _LLAMA3:
        expected = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
        if len(expected) == len(found) and all(
            abs(a - b) <= _FACTORS_TOLERANCE * b for a, b in zip(found, expected, strict=True)
        ):
            return dict(scaling)
    raise ModelError(
        f"{tensor.file}: the factors in {ROPE_FACTORS} are of no scaling that Llama 3 was published with.",
        hint="Give the Hugging Face directory of the base.",
    )


def _longrope_scaling(gguf: Gguf) -> dict[str, Any]:
    """Read the factors of Phi 3, and what cosines and sines are multiplied with."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(_factors(gguf, SHORT_FACTORS)),
        "long_factor": list(_factors(gguf, LONG_FACTORS)),
        "original_max_position_embeddings": gguf.count("rope.scaling.original_context_length"),
    }
    if gguf.value("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = gguf.number("rope.scaling.attn_factor")
    return scaling


def _factors(gguf: Gguf, name: str) -> tuple[float, ...]:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.files[0]} has no {name}.", hint="Convert the model again.")
    if tensor.type.name != "F32":
        raise ModelError(f"{tensor.file}: {name} is {tensor.type.name}; expected F32.")
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        return struct.unpack(f"<{tensor.shape[-1]}f", file.read(tensor.end - tensor.begin))


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """Compute what each frequency is divided by."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
