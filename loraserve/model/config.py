"""config.json as a checked value. Understands what transformers 4 and 5 write; what would change the answers and isn't implemented is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.architectures import Architecture, Window, find_architecture
from loraserve.model.quantization_config import QuantizationConfig, parse_quantization

_MAX_CONFIG_BYTES = 16 << 20


class Activation(Enum):
    """Of the MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class RopeType(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. Fields that a type doesn't use keep their defaults.

    Attributes:
        theta: base of the frequencies.
        factor: by how much the context is stretched.
        original_max_position_embeddings: context before it was stretched (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's.
        beta_fast, beta_slow, truncate: yarn's.
        attention_factor: what cosines and sines are multiplied with (yarn, longrope).
        short_factors: what each pair's period is multiplied with (longrope, within the original context; past it there are others, which aren't implemented).
        rotated: the part of a head's elements that turn: the first ones.
    """

    type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    rotated: float = 1.0

    def rotated_dim(self, head_dim: int) -> int:
        """How many of a head's elements turn."""
        return int(head_dim * self.rotated)

    def identity(self) -> dict[str, object]:
        """Every field, JSON-able."""
        later = {"short_factors": (), "rotated": 1.0}
        # a base whose rope doesn't have these keeps the digest that it had before they were known
        names = [name for name in RopeConfig.__slots__ if name != "type" and getattr(self, name) != later.get(name)]
        return {"type": self.type.value, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Of the mixture of experts that each layer has in the place of an MLP.

    Attributes:
        num_chosen: experts for each row.
        intermediate_size: of one expert.
        is_normed: whether the chosen experts' probabilities are scaled to sum to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_normed: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the decoder needs to know of a base model, but its weights.

    Attributes:
        sliding_windows: per layer, the window or None.
        rope, local_rope: of the layers; of those with a window, where that is another one.
        layer_ropes: per layer, its rope's place in `ropes`; None: its queries and keys aren't rotated.
        embedding_scale: what embeddings are multiplied with; logits_scale: logits.
        residual_scale: what the attention's and the MLP's outputs are multiplied with before they are added to the residual stream.
        attention_scale: what the products of queries and keys are multiplied with.
        attention_cap, logits_cap: what those and the logits are softly kept below: cap * tanh(x / cap); None: they aren't.
        max_model_len: the context that the config states.
        max_stretched_len: the longest context that the rope scaling covers, at least max_model_len.
        eos_token_ids: of config.json and generation_config.json together.
        quantization: how linears are stored; None: in a float dtype.
        experts: None: layers have MLPs.
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
    activation: Activation = Activation.SILU
    quantization: QuantizationConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Every way in which positions become angles in this model."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Linear's short name → (out_features, in_features). Experts and their router aren't among them."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        if self.experts is not None:
            return attention
        return {**attention, "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    def has_bias(self, module: str) -> bool:
        """Whether this linear, by its short name, has a bias."""
        if module in ("q_proj", "k_proj", "v_proj"):
            return self.has_qkv_bias
        return self.has_o_bias if module == "o_proj" else self.has_mlp_bias

    def identity(self) -> dict[str, object]:
        """What, beside the weights, decides which function the model computes; JSON-able. Contexts and EOS aren't part of it."""
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
        # what a base doesn't have isn't named: its digest stays what it was before the decoder knew of it
        if any(value != plain for value, plain in scales.values()):
            identity["scales"] = {name: value for name, (value, _) in scales.items()}
        if self.attention_cap is not None or self.logits_cap is not None:
            identity["caps"] = [self.attention_cap, self.logits_cap]
        if self.activation is not Activation.SILU:
            identity["activation"] = self.activation.value
        if any(rope != 0 for rope in self.layer_ropes):
            identity["layer_ropes"] = list(self.layer_ropes)
        if self.experts is not None:
            identity["experts"] = {name: getattr(self.experts, name) for name in ExpertsConfig.__slots__}
        if self.local_rope is not None:
            identity["local_rope"] = self.local_rope.identity()
        return identity if self.quantization is None else {**identity, "quantization": self.quantization.identity()}


def read_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and, where it's there, ``generation_config.json``.

    Raises:
        UnknownArchitecture: the architecture isn't in the table.
        ModelError: a file is missing or isn't a JSON object, or a field is missing, odd or asks for what isn't implemented; the message names it.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelError(f"config.json is missing in {model_dir}.", hint="--model takes a Hugging Face directory.")
    config = _read_object(path)
    generation_path = model_dir / "generation_config.json"
    return parse_config(config, _read_object(generation_path) if generation_path.is_file() else {})


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Return the checked form of the two JSON objects.

    Raises:
        UnknownArchitecture, ModelError: as `read_config`.
    """
    architecture = find_architecture(config.get("architectures"), config.get("model_type"))
    fields = _Fields(config, architecture)
    for name, allowed in architecture.refused.items():
        fields.refuse(name, allowed)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    num_kv_heads = fields.optional_count("num_key_value_heads") or num_heads
    head_dim = fields.optional_count("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json has no head_dim, and hidden_size {hidden_size} isn't a multiple of num_attention_heads {num_heads}."
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
    context = fields.count("max_position_embeddings")
    rope, local_rope = _ropes(fields, context)
    for some in (rope, local_rope):
        if some is not None:
            _check_rotated(some, head_dim)
    if rope.type is RopeType.LONGROPE:
        # past that it turns every position otherwise, those whose keys are cached too
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
        max_stretched_len=min(_stretched(r, context) for r in (rope, local_rope) if r is not None),
        eos_token_ids=_eos(config, generation_config),
        attention_scale=_attention_scale(fields, head_dim),
        embedding_scale=math.sqrt(hidden_size)
        if architecture.is_embedding_scaled
        else fields.multiplier(architecture.embedding_multiplier),
        residual_scale=fields.multiplier(architecture.residual_multiplier),
        logits_scale=1.0 / fields.multiplier(architecture.logits_divisor),
        attention_cap=fields.cap(architecture.attention_cap),
        logits_cap=fields.cap(architecture.logits_cap),
        activation=fields.activation(),
        quantization=parse_quantization(config),
        experts=_experts(fields),
    )


class _Fields:
    """The config's fields, with the architecture's defaults behind them; each getter raises ModelError naming the field."""

    def __init__(self, config: Mapping[str, Any], architecture: Architecture) -> None:
        self.config, self.architecture = config, architecture

    def get(self, name: str) -> Any:
        if name in self.config:
            return self.config[name]
        if name not in self.architecture.defaults:
            raise ModelError(f"config.json has no {name}, which {self.architecture.name} needs.")
        return self.architecture.defaults[name]

    def refuse(self, name: str, allowed: object) -> None:
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise ModelError(f"config.json: {name} is {_shown(value)}; only {_shown(allowed)} is implemented.")

    def activation(self) -> Activation:
        name = self.get(self.architecture.activation)
        known = [activation.value for activation in Activation]
        if name not in known:
            raise ModelError(
                f"config.json: {self.architecture.activation} is {_shown(name)}; only {' and '.join(known)} are implemented."
            )
        return Activation(name)

    def count(self, name: str) -> int:
        return _count(self.get(name), name)

    def optional_count(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else _count(value, name)

    def number(self, name: str) -> float:
        return _number(self.get(name), name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {_shown(value)}; expected true or false.")
        return value

    def rule(self, rule: bool | str) -> bool:
        return self.flag(rule) if isinstance(rule, str) else rule

    def multiplier(self, name: str | None, default: float = 1.0) -> float:
        return default if name is None else self.number(name)

    def cap(self, name: str | None) -> float | None:
        return None if name is None or self.get(name) is None else self.number(name)


def _experts(fields: _Fields) -> ExpertsConfig | None:
    paths = fields.architecture.experts
    if paths is None:
        return None
    name = next((name for name in paths.num_experts if name in fields.config), paths.num_experts[0])
    num_experts, num_chosen = fields.count(name), fields.count("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok is {num_chosen}, of {num_experts} experts ({name}).")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.count(paths.intermediate_size),
        is_normed=fields.rule(paths.is_normed),
    )


def _attention_scale(fields: _Fields, head_dim: int) -> float:
    architecture = fields.architecture
    if architecture.query_scalar is not None:
        return 1.0 / math.sqrt(fields.number(architecture.query_scalar))
    return fields.multiplier(architecture.attention_multiplier, head_dim**-0.5)


def _layers(fields: _Fields, num_layers: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Each layer's window, and its rope's place in the model's `ropes`."""
    ropes = _layer_ropes(fields, num_layers)
    windows = _windows(fields, ropes)
    if fields.architecture.has_local_rope:
        ropes = tuple(0 if window is None else 1 for window in windows)
    return windows, ropes


def _layer_ropes(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    if not fields.architecture.has_layers_without_rope:
        return (0,) * num_layers
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval")
        return tuple(0 if (layer + 1) % interval else None for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(
            f"config.json: no_rope_layers is {_shown(flags)}; expected a list of {num_layers}, 1 for each layer with rotary positions and 0 for each without."
        )
    return tuple(0 if flag else None for flag in flags[:num_layers])


def _windows(fields: _Fields, layer_ropes: tuple[int | None, ...]) -> tuple[int | None, ...]:
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
                f"config.json: layer_types is {_shown(types)}; {architecture.name} with sliding_window {window} has {expected} in each of {num_layers} layers."
            )
        return (window,) * num_layers
    has_window = architecture.window is Window.BY_PATTERN or fields.flag("use_sliding_window")
    window = fields.optional_count("sliding_window") if has_window else None
    types = fields.get("layer_types")
    if types is None and architecture.window is Window.BY_PATTERN:
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
            raise ModelError(f"config.json: max_window_layers is {_shown(first)}; expected a number of layers.")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(
            f"config.json: layer_types is {_shown(types)}; expected a list of {num_layers}, one per layer."
        )
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer_types[{layer}] is {_shown(kind)}; only full_attention and sliding_attention are implemented."
            )
        if kind == "sliding_attention" and window is None:
            raise ModelError(
                f"config.json: layer_types[{layer}] is sliding_attention, but use_sliding_window is off or sliding_window is null."
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ropes(fields: _Fields, context: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The ropes as transformers 5 resolves them: ``rope_scaling`` (the older form) before ``rope_parameters``, theta inside before theta outside."""
    older, newer = (_object(fields.config.get(name), name) for name in ("rope_scaling", "rope_parameters"))
    if not fields.architecture.has_local_rope:
        source, rope = ("rope_scaling", older) if older else ("rope_parameters", newer)
        return _rope(fields, context, source, rope), None
    kinds = ("full_attention", "sliding_attention")
    if any(kind not in kinds for kind in newer):
        raise ModelError(f"config.json: rope_parameters is {_shown(newer)}; expected {' and '.join(kinds)} in it.")
    full, local = (_object(newer.get(kind), f"rope_parameters.{kind}") for kind in kinds)
    return (
        _rope(fields, context, "rope_scaling" if older else "rope_parameters.full_attention", {**full, **older}),
        _rope(fields, context, "rope_parameters.sliding_attention", local, theta_field="rope_local_base_freq"),
    )


def _check_rotated(rope: RopeConfig, head_dim: int) -> None:
    """Return if the part of a head that turns is made of pairs, and longrope has a factor for each."""
    dim = rope.rotated_dim(head_dim)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor {rope.rotated:g} of heads of {head_dim} elements is {dim}; expected an even number."
        )
    if rope.type is RopeType.LONGROPE and len(rope.short_factors) != dim // 2:
        raise ModelError(f"config.json: short_factor has {len(rope.short_factors)} numbers; expected {dim // 2}.")


def _object(value: object, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {_shown(value)}; expected an object.")
    return value or {}


def _rope(
    fields: _Fields, context: int, source: str, rope: Mapping[str, Any], *, theta_field: str = "rope_theta"
) -> RopeConfig:
    config = fields.config
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"config.json: {source} differs by layer type; only one for all layers is implemented.")
    name = rope.get("rope_type", rope.get("type", "default"))
    name = fields.architecture.rope_names.get(name, name) if isinstance(name, str) else name
    if name not in [rope_type.value for rope_type in RopeType]:
        known = ", ".join(rope_type.value for rope_type in RopeType)
        raise ModelError(f"config.json: {source}.rope_type is {_shown(name)}; expected one of {known}.")
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = 1.0 if rotated is None else _number(rotated, "partial_rotary_factor")
    if rotated > 1:
        raise ModelError(f"config.json: partial_rotary_factor is {rotated:g}; expected at most 1.")
    if rotated != 1 and not fields.architecture.has_partial_rope:
        raise ModelError(
            f"config.json: partial_rotary_factor is {rotated:g}; only 1 is implemented for {fields.architecture.name}."
        )
    rope_type = RopeType(name)
    theta = _number(rope["rope_theta"], f"{source}.rope_theta") if rope.get("rope_theta") is not None else None
    if theta is None:
        theta = fields.number(theta_field)
    if theta <= 1:
        raise ModelError(f"config.json: {theta_field} is {theta}; expected a number above 1.")
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta, rotated=rotated)

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"config.json has no {source}.{key}, which rope type {name} needs.")
            return default
        return _number(value, f"{source}.{key}")

    if rope_type is RopeType.LINEAR:
        return RopeConfig(type=rope_type, theta=theta, factor=number("factor"), rotated=rotated)
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))
    original = _count(original, f"{source}.original_max_position_embeddings")
    if rope_type is RopeType.LLAMA3:
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low == high:
            raise ModelError(
                f"config.json: {source}.low_freq_factor and high_freq_factor are both {low}; they must differ."
            )
        return RopeConfig(
            type=rope_type,
            theta=theta,
            factor=number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
            rotated=rotated,
        )
    factor = number("factor", context / original)
    if rope_type is RopeType.LONGROPE:
        stretch = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeConfig(
            type=rope_type,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=number("attention_factor", stretch),
            short_factors=_factors(rope.get("short_factor"), f"{source}.short_factor"),
            rotated=rotated,
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config.json: {source}.truncate is {_shown(truncate)}; expected true or false.")
    return RopeConfig(
        type=rope_type,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=number("attention_factor", _yarn_attention_factor(factor, rope, source)),
        rotated=rotated,
    )


def _factors(value: object, name: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ModelError(f"config.json: {name} is {_shown(value)}; expected a list of numbers.")
    return tuple(_number(factor, name) for factor in value)


def _yarn_attention_factor(factor: float, rope: Mapping[str, Any], source: str) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return mscale(_number(above, f"{source}.mscale")) / mscale(_number(below, f"{source}.mscale_all_dim"))
    return mscale(1.0)


def _stretched(rope: RopeConfig, context: int) -> int:
    """Linear's and yarn's configs state either context, the original or the stretched one; llama3's state the stretched one."""
    if rope.type is RopeType.LINEAR:
        return max(context, int(context * rope.factor))
    if rope.type is RopeType.YARN:
        return max(context, int(rope.original_max_position_embeddings * rope.factor))
    return context


def _eos(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for file, holder in (("generation_config.json", generation_config), ("config.json", config)):
        value = holder.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"{file}: eos_token_id is {_shown(value)}; expected a token id or a list of them.")
            ids[token_id] = None
    return tuple(ids)


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {name} is {_shown(value)}; expected a whole number above 0.")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {name} is {_shown(value)}; expected a number above 0.")
    return float(value)


def _read_object(path: Path) -> dict[str, Any]:
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


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:119] + "…"
