"""A base model's ``config.json``, read and checked: every number the decoder needs, no Hugging Face class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.architectures import ArchitectureSpec, Bias, Window, find_architecture
from loraserve.model.rotary import Rope, read_rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one base.

    Attributes:
        windows: per layer, how many positions a row sees, its own included; None: all.
        eos_token_ids: of ``generation_config.json`` first, then ``config.json``.
    """

    architecture: str
    spec: ArchitectureSpec
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    rope: Rope
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Linear's short name → (out_features, in_features)."""
        q, kv, hidden, inter = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        return {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (inter, hidden),
            "up_proj": (inter, hidden),
            "down_proj": (hidden, inter),
        }


MODULE_PATHS: Mapping[str, str] = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
LAYERS_PATH = "model.layers"


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read and check ``config.json`` (and ``generation_config.json`` where it is there).

    Raises:
        UnknownArchitecture, ModelError: the file, or the field, that is wrong; what was found and what was expected.
    """
    raw = _read_json(model_dir / "config.json")
    architecture, spec = find_architecture(raw)
    if raw.get("quantization_config"):
        raise ModelError(
            "config.json has a quantization_config: pre-quantized checkpoints can't be loaded yet.",
            hint="Load the float checkpoint with --quantize int8.",
        )
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f'config.json says hidden_act "{act}"; {architecture} is served with "silu".')
    hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
    num_layers = _count(raw, "num_hidden_layers")
    head_dim = _count(raw, "head_dim", spec.explicit_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}.")
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd; rotary embeddings turn pairs.")
    max_positions = _count(raw, "max_position_embeddings")
    generation = _read_json(model_dir / "generation_config.json", is_optional=True)
    return ModelConfig(
        architecture=architecture,
        spec=spec,
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_count(raw, "vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=_has_bias(spec.qkv_bias, raw.get("attention_bias")),
        has_o_bias=_has_bias(spec.o_bias, raw.get("attention_bias")),
        has_mlp_bias=_has_bias(spec.mlp_bias, raw.get("mlp_bias")),
        rope=read_rope(raw, head_dim, max_positions),
        windows=_windows(raw, spec, num_layers),
        eos_token_ids=_eos(generation) or _eos(raw),
    )


def _read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.name} is missing in {path.parent}.", hint="--model takes a Hugging Face directory."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; a JSON object was expected.")
    return value


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json says {name} = {value!r}; a whole number above 0 was expected.")
    return value


def _has_bias(rule: Bias, configured: object) -> bool:
    return rule is Bias.ALWAYS or (rule is Bias.CONFIGURED and bool(configured))


def _windows(raw: Mapping[str, Any], spec: ArchitectureSpec, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", spec.default_window)
    if spec.window is Window.NONE or window is None:
        return (None,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json says sliding_window = {window!r}; a whole number above 0 was expected.")
    if spec.window is Window.ALL:
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(f"config.json's layer_types should name {' or '.join(known)} for each of {num_layers} layers.")
    return tuple(known[kind] for kind in kinds)


def _eos(raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ModelError(f"eos_token_id is {value!r}; a token id or a list of them was expected.")
    return tuple(values)
