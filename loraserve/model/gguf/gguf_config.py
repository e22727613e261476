"""A config.json of what a GGUF file says of its base."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.gguf.gguf_file import Gguf
from loraserve.model.gguf.gguf_layout import ROPE_FACTORS, architecture_of, head_counts, place_tensors

FLOAT_TYPES = ("F32", "F16", "BF16")
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
_LAYERS_OF_27B = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


def make_config(gguf: Gguf) -> dict[str, Any]:
    """Return the config.json that a Hugging Face directory of the same base has.

    Its `quantization_config` names the type of each tensor that isn't in a float dtype.

    Raises:
        UnknownArchitecture, ModelError: what isn't implemented, or is missing.
    """
    architecture, metadata = architecture_of(gguf), _Metadata(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.files[0]} has no embedding, token_embd.weight.", hint="Give a file with a whole base.")
    (heads, kv_heads), context = head_counts(gguf), metadata.count("context_length")
    hidden = metadata.count("embedding_length")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": metadata.count("attention.key_length", hidden // heads),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }
    value_length = metadata.count("attention.value_length", config["head_dim"])
    if value_length != config["head_dim"]:
        raise metadata.refusal("attention.value_length", str(config["head_dim"]))
    rotated = metadata.count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    config |= _biases(gguf) | _scales(metadata) | _window(metadata, architecture.name) | _experts(metadata)
    scaling = _rope_scaling(gguf, metadata, config)
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


class _Metadata:
    """A file's values about its base, whose keys begin with its architecture."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self._prefix = f"{gguf.metadata['general.architecture']}."

    def get(self, name: str) -> Any:
        return self._gguf.metadata.get(self._prefix + name)

    def refusal(self, name: str, expected: str) -> ModelError:
        return ModelError(
            f"{self._gguf.files[0]}: {self._prefix}{name} is {str(self.get(name))[:200]}; only {expected} is "
            "implemented."
        )

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number above 0, the same for each layer.

        Raises:
            ModelError: it is missing and has no default, or is something else.
        """
        value = self.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(name, "a number above 0, the same in each layer,")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; one of float32 as the shortest decimal that means it.

        Raises:
            ModelError: as `count`.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refusal(name, "a finite number")
        return shortest(value)


def shortest(value: float) -> float:
    """Return the number of the fewest digits that float32 rounds to this one."""
    for digits in range(1, 10):
        near = float(f"{value:.{digits}g}")
        if struct.pack("<f", near) == struct.pack("<f", value):
            return near
    return value


def _biases(gguf: Gguf) -> dict[str, Any]:
    """Return the flags of biases, of those architectures that ask for them."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }


def _scales(metadata: _Metadata) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {ours: metadata.number(name) for name, ours in names.items() if metadata.get(name) is not None}


def _window(metadata: _Metadata, architecture: str) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    found: dict[str, Any] = {"sliding_window": None if not window else metadata.count("attention.sliding_window")}
    if architecture in _LAYERS_OF_27B:
        # files don't say it; the largest published models have another scale than the others
        scalar = metadata.count("attention.key_length", 256)
        if metadata.count("block_count") == _LAYERS_OF_27B[architecture]:
            scalar = metadata.count("embedding_length") // metadata.count("attention.head_count")
        found["query_pre_attn_scalar"] = scalar
    return found


def _experts(metadata: _Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {}
    inner = metadata.count("expert_feed_forward_length", metadata.count("feed_forward_length"))
    number, chosen = metadata.count("expert_count"), metadata.count("expert_used_count")
    if metadata.get("expert_shared_count"):
        raise metadata.refusal("expert_shared_count", "0")
    return {
        "num_local_experts": number,
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        # llama.cpp's graphs of these architectures do
        "norm_topk_prob": True,
    }


def _rope_scaling(gguf: Gguf, metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if any(name.startswith("rope_factors_") for name in gguf.tensors):
        raise ModelError(
            f"{gguf.files[0]} has rope_factors_long, a longrope whose settings the file doesn't hold.",
            hint="Give the Hugging Face directory of the base.",
        )
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, config)
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = metadata.number("rope.scaling.factor")
    if kind == "linear":
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.count("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise metadata.refusal("rope.scaling.type", "linear or yarn")


def _llama3_scaling(gguf: Gguf, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published scaling whose factors these are."""
    tensor = gguf.tensors[ROPE_FACTORS]
    if tensor.type.name != "F32":
        raise ModelError(f"{tensor.file}: {ROPE_FACTORS} is {tensor.type.name}; expected F32.")
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        found = struct.unpack(f"<{tensor.shape[-1]}f", file.read(tensor.end - tensor.begin))
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


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """Return what each frequency is divided by."""
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
