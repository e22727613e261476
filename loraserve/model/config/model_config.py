"""config.json as a checked value.

Understands what transformers 4 and 5 write; what would change the answers and isn't implemented is
refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.architecture import Architecture, Window
from loraserve.model.config.architectures import find_architecture
from loraserve.model.config.config_fields import Fields, shown
from loraserve.model.config.quantization_config import QuantizationConfig, parse_quantization
from loraserve.model.config.ropes import RopeConfig, RopeType, check_rotated, read_ropes, stretched_context
from loraserve.model.config.wrappers import text_config, wrapper_of

_MAX_CONFIG_BYTES = 16 << 20


class ActivationFunction(Enum):
    """Activation of the MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes of the mixture of experts that each layer has in the place of an MLP.

    Attributes:
        num_chosen: experts for each row.
        intermediate_size: of one expert.
        is_normed: whether the chosen experts' probabilities are scaled to sum to 1.
        shared_intermediate_size: of the expert that all rows pass; None: there is none.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_normed: bool
    shared_intermediate_size: int | None = None

    @property
    def widest_intermediate_size(self) -> int:
        """Inner features of the widest expert."""
        return max(self.intermediate_size, self.shared_intermediate_size or 0)

    @property
    def share_of_token(self) -> float:
        """Part of all experts' weights that a token is multiplied with."""
        shared = self.shared_intermediate_size or 0
        chosen, every = (count * self.intermediate_size for count in (self.num_chosen, self.num_experts))
        return (chosen + shared) / (every + shared)

    def identity(self) -> dict[str, object]:
        """Fields, JSON-able; a shared expert's alone where there is one."""
        fields: dict[str, object] = {
            "num_experts": self.num_experts,
            "num_chosen": self.num_chosen,
            "intermediate_size": self.intermediate_size,
            "is_normed": self.is_normed,
        }
        shared = self.shared_intermediate_size
        return fields if shared is None else {**fields, "shared_intermediate_size": shared}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the decoder needs of a base model, but its weights.

    Attributes:
        sliding_windows: per layer, the window or None.
        rope, local_rope: of the layers; of those with a window, where that is another one.
        layer_ropes: per layer, its rope's place in `ropes`; None: its queries and keys aren't
            rotated.
        embedding_scale: what embeddings are multiplied with; logits_scale: logits.
        residual_scale: what the attention's and the MLP's outputs are multiplied with before they
            are added to the residual stream.
        attention_scale: what the products of queries and keys are multiplied with.
        attention_cap, logits_cap: what those and the logits are softly kept below: cap * tanh(x /
            cap); None: they aren't.
        max_model_len: the context that the config states.
        max_stretched_len: the longest context that the rope scaling covers, at least max_model_len.
        eos_token_ids: of config.json and generation_config.json together.
        quantization: how linears are stored; None: in a float dtype.
        experts: None: layers have MLPs.
        wrapper: class of the model of images and text whose decoder this is; None: of none.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    local_rope: RopeConfig | None
    layer_ropes: tuple[int | None, ...]
    max_model_len: int
    max_stretched_len: int
    eos_token_ids: tuple[int, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_cap: float | None = None
    logits_cap: float | None = None
    activation: ActivationFunction = ActivationFunction.SILU
    quantization: QuantizationConfig | None = None
    experts: ExpertsConfig | None = None
    wrapper: str | None = None

    def for_context(self, max_model_len: int) -> ModelConfig:
        """Build the config of a base that serves contexts up to this length."""
        local_rope = None if self.local_rope is None else self.local_rope.within(max_model_len)
        return replace(self, rope=self.rope.within(max_model_len), local_rope=local_rope)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Ways in which positions become angles in this model."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Linear's short name → (out_features, in_features).

        Experts and their router aren't among them.
        """
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        if self.experts is not None:
            return attention
        return {**attention, "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    def has_bias(self, module: str) -> bool:
        """Check whether this linear, by its short name, has a bias."""
        if module in ("q_proj", "k_proj", "v_proj"):
            return self.has_qkv_bias
        return self.has_o_bias if module == "o_proj" else self.has_mlp_bias

    def identity(self) -> dict[str, object]:
        """Collect the settings that, with the weights, decide what the model computes; JSON-able.

        Contexts and EOS aren't part of it.
        """
        names = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        identity = {
            "architecture": self.architecture.name,
            **{name: getattr(self, name) for name in names},
            "rms_norm_eps": self.rms_norm_eps,
            "biases": [self.has_qkv_bias, self.has_o_bias, self.has_mlp_bias],
            "sliding_windows": list(self.sliding_windows),
            "rope": self.rope.identity(),
        }
        scales = {
            "embedding": (self.embedding_scale, 1.0),
            "residual": (self.residual_scale, 1.0),
            "attention": (self.attention_scale, self.head_dim**-0.5),
            "logits": (self.logits_scale, 1.0),
        }
        # what a base doesn't have isn't named: its digest stays what it was before the decoder
        # supported it
        if any(value != plain for value, plain in scales.values()):
            identity["scales"] = {name: value for name, (value, _) in scales.items()}
        if self.attention_cap is not None or self.logits_cap is not None:
            identity["caps"] = [self.attention_cap, self.logits_cap]
        if self.activation is not ActivationFunction.SILU:
            identity["activation"] = self.activation.value
        if any(rope != 0 for rope in self.layer_ropes):
            identity["layer_ropes"] = list(self.layer_ropes)
        if self.experts is not None:
            identity["experts"] = self.experts.identity()
        if self.local_rope is not None:
            identity["local_rope"] = self.local_rope.identity()
        return identity if self.quantization is None else {**identity, "quantization": self.quantization.identity()}


def read_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and, where it's there, ``generation_config.json``.

    Raises:
        UnknownArchitecture: the architecture isn't in the table.
        ModelError: a file is missing or isn't a JSON object, or a field is missing, odd or requires
            what isn't implemented; the message names it.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelError(f"config.json is missing in {model_dir}.", hint="Give --model a Hugging Face directory.")
    config = _with_quantization(read_object(path), model_dir)
    generation_path = model_dir / "generation_config.json"
    return parse_config(config, read_object(generation_path) if generation_path.is_file() else {})


_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""File in which older libraries keep what config.json lacks → the method that it means."""


def _with_quantization(config: Mapping[str, Any], model_dir: Path) -> Mapping[str, Any]:
    """Add to config.json the quantization_config that stands in a file of its own."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in _QUANTIZATION_FILES.items():
        if (model_dir / name).is_file():
            value = read_object(model_dir / name)
            return {**config, "quantization_config": {"quant_method": method, **value}}
    return config


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Parse and check the two JSON objects.

    Raises:
        UnknownArchitecture, ModelError: as `read_config`.
    """
    wrapper, config = wrapper_of(config), text_config(config)
    architecture = find_architecture(config.get("architectures"), config.get("model_type"))
    fields = Fields(config, architecture)
    for name, allowed in architecture.refused.items():
        fields.refuse(name, allowed)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    num_kv_heads = fields.optional_count("num_key_value_heads") or num_heads
    head_dim = fields.optional_count("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json has no head_dim, and hidden_size {hidden_size} isn't a multiple of num_attention_heads "
                f"{num_heads}."
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(
            f"config.json gives heads of {head_dim} elements (head_dim); rotary positions need an even number."
        )
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} isn't a multiple of num_key_value_heads {num_kv_heads}."
        )
    context = stated = fields.count("max_position_embeddings")
    rope, local_rope = read_ropes(fields, context)
    for some in (rope, local_rope):
        if some is not None:
            check_rotated(some, head_dim)
    if rope.type is RopeType.LONGROPE or architecture.has_query_scale:
        # past that longrope turns every position otherwise
        if rope.original_max_position_embeddings == 0:
            raise ModelError(
                f"config.json has no rope_parameters.original_max_position_embeddings, which {architecture.name} needs."
            )
        context = min(context, rope.original_max_position_embeddings)
    windows, layer_ropes = _layers(fields, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        is_tied=fields.flag("tie_word_embeddings"),
        has_qkv_bias=fields.rule(architecture.qkv_bias),
        has_o_bias=fields.rule(architecture.o_bias),
        has_mlp_bias=fields.rule(architecture.mlp_bias),
        sliding_windows=windows,
        rope=rope,
        local_rope=local_rope,
        layer_ropes=layer_ropes,
        max_model_len=context,
        max_stretched_len=_stretched_len(architecture, (rope, local_rope), context, stated),
        eos_token_ids=read_end_tokens(config, generation_config),
        attention_scale=_attention_scale(fields, head_dim),
        embedding_scale=math.sqrt(hidden_size)
        if architecture.is_embedding_scaled
        else fields.multiplier(architecture.embedding_multiplier),
        residual_scale=fields.multiplier(architecture.residual_multiplier),
        logits_scale=1.0 / fields.multiplier(architecture.logits_divisor),
        attention_cap=fields.cap(architecture.attention_cap),
        logits_cap=fields.cap(architecture.logits_cap),
        activation=_activation(fields),
        quantization=_quantization(config, is_wrapped=wrapper is not None),
        experts=_experts(fields),
        wrapper=wrapper,
    )


def _quantization(config: Mapping[str, Any], *, is_wrapped: bool) -> QuantizationConfig | None:
    found = parse_quantization(config)
    return replace(found, is_wrapped=True) if found is not None and is_wrapped else found


def _activation(fields: Fields) -> ActivationFunction:
    field = fields.architecture.activation
    name, known = fields.get(field), [activation.value for activation in ActivationFunction]
    if isinstance(name, str):
        name = fields.architecture.activation_names.get(name, name)
    if name not in known:
        raise ModelError(f"config.json: {field} is {shown(name)}; only {' and '.join(known)} are implemented.")
    return ActivationFunction(name)


def _experts(fields: Fields) -> ExpertsConfig | None:
    paths = fields.architecture.experts
    if paths is None:
        return None
    name = next((name for name in paths.num_experts if name in fields.config), paths.num_experts[0])
    num_experts, num_chosen = fields.count(name), fields.count("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {num_chosen}; expected at most {num_experts}, "
            f"the number of experts ({name})."
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.count(paths.intermediate_size),
        is_normed=fields.rule(paths.is_normed),
        shared_intermediate_size=None if paths.shared is None else fields.count(paths.shared_intermediate_size),
    )


def _attention_scale(fields: Fields, head_dim: int) -> float:
    architecture = fields.architecture
    if architecture.query_scalar is not None:
        return 1.0 / math.sqrt(fields.number(architecture.query_scalar))
    return fields.multiplier(architecture.attention_multiplier, head_dim**-0.5)


def _layers(fields: Fields, num_layers: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Read each layer's window, and its rope's index in the model's `ropes`."""
    ropes = _layer_ropes(fields, num_layers)
    windows = _windows(fields, ropes)
    if fields.architecture.has_local_rope:
        ropes = tuple(0 if window is None else 1 for window in windows)
    if fields.architecture.is_rope_in_windows_only and fields.optional_count("sliding_window") is not None:
        ropes = tuple(None if window is None else 0 for window in windows)
    return windows, ropes


def _layer_ropes(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if not fields.architecture.has_layers_without_rope:
        return (0,) * num_layers
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval")
        return tuple(0 if (layer + 1) % interval else None for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(
            f"config.json: no_rope_layers is {shown(flags)}; expected a list of {num_layers}, "
            "1 for each layer with rotary positions and 0 for each without."
        )
    return tuple(0 if flag else None for flag in flags[:num_layers])


def _windows(fields: Fields, layer_ropes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    num_layers = len(layer_ropes)
    architecture, nowhere = fields.architecture, (None,) * num_layers
    if architecture.window is Window.NONE:
        return nowhere
    if architecture.window is Window.EVERY_LAYER:
        window = fields.optional_count("sliding_window")
        types = fields.config.get("layer_types")
        expected = "full_attention" if window is None else "sliding_attention"
        if types is not None and types != [expected] * num_layers:
            raise ModelError(
                f"config.json: layer_types is {shown(types)}; {architecture.name} with sliding_window {window} has "
                f"{expected} in each of {num_layers} layers."
            )
        return (window,) * num_layers
    is_switched = architecture.window in (Window.BY_LAYER_TYPE, Window.WITHOUT_ROPE)
    has_window = not is_switched or fields.flag("use_sliding_window")
    window = fields.optional_count("sliding_window") if has_window else None
    types = fields.get("layer_types")
    is_patterned = architecture.window in (Window.BY_PATTERN, Window.BY_PATTERN_IF_SET)
    if types is None and architecture.window is Window.BY_TYPE_OR_ALL:
        return (window,) * num_layers
    if types is None and architecture.window is Window.BY_PATTERN_IF_SET and window is None:
        return nowhere
    if types is None and is_patterned:
        pattern = architecture.window_pattern
        if isinstance(pattern, str):
            pattern = fields.count(pattern)
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    if types is None:
        if window is None:
            return nowhere
        if architecture.window is Window.WITHOUT_ROPE:
            return tuple(window if rope is None else None for rope in layer_ropes)
        first = fields.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelError(f"config.json: max_window_layers is {shown(first)}; expected a number of layers.")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types is {shown(types)}; expected a list of {num_layers}, one per layer.")
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer_types[{layer}] is {shown(kind)}; only full_attention and sliding_attention are "
                "implemented."
            )
        if kind == "sliding_attention" and window is None:
            raise ModelError(
                f"config.json: layer_types[{layer}] is sliding_attention, "
                "but use_sliding_window is off or sliding_window is null."
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_end_tokens(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the end tokens of both files together.

    Raises:
        ModelError: they are no token ids.
    """
    ids: dict[int, None] = {}
    for file, holder in (("generation_config.json", generation_config), ("config.json", config)):
        value = holder.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"{file}: eos_token_id is {shown(value)}; expected a token id or a list of them.")
            ids[token_id] = None
    return tuple(ids)


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file.

    Raises:
        ModelError: it is missing, too large, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{path} has {size:,} bytes; at most {_MAX_CONFIG_BYTES:,} are read.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} isn't JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; expected an object.")
    return value


def _stretched_len(architecture: Architecture, ropes: Sequence[RopeConfig | None], context: int, stated: int) -> int:
    """Compute the longest context that the ropes cover.

    Args:
        context: served unless more is asked for.
        stated: the config's.
    """
    if architecture.has_query_scale:
        return context
    return min(
        max(context, stated) if rope.long_factors else stretched_context(rope, context)
        for rope in ropes
        if rope is not None
    )
