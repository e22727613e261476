"""Rotary embeddings as config.json describes them.

There is one for all layers, or another for those with a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.config_fields import Fields, shown, to_count, to_number, to_object

_DYNAMIC = "dynamic"


class RopeType(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    NTK_ALPHA = "ntk_alpha"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of a rotary embedding. Fields that a type doesn't use keep their defaults.

    Attributes:
        theta: base of the frequencies.
        factor: by how much the context is stretched; of ntk_alpha, its alpha.
        original_max_position_embeddings: context before it was stretched (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's.
        beta_fast, beta_slow, truncate: yarn's.
        attention_factor: what cosines and sines are multiplied with (yarn, longrope).
        short_factors: what each pair's period is multiplied with (longrope).
        long_factors: the same of contexts past the original one; empty: there are none.
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
    long_factors: tuple[float, ...] = ()

    def within(self, context: int) -> RopeConfig:
        """Choose the rope of contexts up to this length.

        Past the original one, longrope turns every position by other factors: transformers turns a
        sequence by those of its length, keys that are cached too. Here a base has one rope.
        """
        if not self.long_factors or context <= self.original_max_position_embeddings:
            return self
        return replace(self, short_factors=self.long_factors, long_factors=())

    def rotated_dim(self, head_dim: int) -> int:
        """Compute the number of a head's elements that turn."""
        return int(head_dim * self.rotated)

    def identity(self) -> dict[str, object]:
        """Fields, JSON-able."""
        later = {"short_factors": (), "rotated": 1.0, "long_factors": self.long_factors}
        # a base whose rope doesn't have these keeps the digest that it had before they were known
        names = [name for name in RopeConfig.__slots__ if name != "type" and getattr(self, name) != later.get(name)]
        return {"type": self.type.value, **{name: getattr(self, name) for name in names}}


def read_ropes(fields: Fields, context: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the rope, and that of layers with a window where it's another one.

    They are as transformers 5 resolves them: ``rope_scaling`` (the older form) before
    ``rope_parameters``, theta inside before theta outside.

    Args:
        context: the config's own, before anything stretches it.

    Raises:
        ModelError: a field is missing, odd, or requires what isn't implemented.
    """
    older, newer = (to_object(fields.config.get(name), name) for name in ("rope_scaling", "rope_parameters"))
    if not fields.architecture.has_local_rope:
        source, rope = ("rope_scaling", older) if older else ("rope_parameters", newer)
        return _rope(fields, context, source, rope), None
    kinds = ("full_attention", "sliding_attention")
    if any(kind not in kinds for kind in newer):
        raise ModelError(f"config.json: rope_parameters is {shown(newer)}; expected {' and '.join(kinds)} in it.")
    full, local = (to_object(newer.get(kind), f"rope_parameters.{kind}") for kind in kinds)
    return (
        _rope(fields, context, "rope_scaling" if older else "rope_parameters.full_attention", {**full, **older}),
        _rope(fields, context, "rope_parameters.sliding_attention", local, theta_field=fields.architecture.local_theta),
    )


def check_rotated(rope: RopeConfig, head_dim: int) -> None:
    """Check that the rotated part of a head is pairs, and that longrope has a factor for each.

    Raises:
        ModelError: it isn't, or hasn't.
    """
    dim = rope.rotated_dim(head_dim)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor {rope.rotated:g} of heads of {head_dim} elements is {dim}; "
            "expected an even number."
        )
    if rope.type is RopeType.LONGROPE:
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if len(factors) != dim // 2 and (factors or name == "short_factor"):
                raise ModelError(f"config.json: {name} has {len(factors)} numbers; expected {dim // 2}.")


def _rope(
    fields: Fields, context: int, source: str, rope: Mapping[str, Any], *, theta_field: str = "rope_theta"
) -> RopeConfig:
    config = fields.config
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"config.json: {source} differs by layer type; only one value for all layers is implemented.")
    rope_type = _rope_type(fields, source, rope)
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated is None:
        rotated = fields.architecture.defaults.get("partial_rotary_factor")
    rotated = 1.0 if rotated is None else to_number(rotated, "partial_rotary_factor")
    if rotated > 1:
        raise ModelError(f"config.json: partial_rotary_factor is {rotated:g}; expected at most 1.")
    if rotated != 1 and not fields.architecture.has_partial_rope:
        raise ModelError(
            f"config.json: partial_rotary_factor is {rotated:g}; only 1 is implemented for {fields.architecture.name}."
        )
    theta = to_number(rope["rope_theta"], f"{source}.rope_theta") if rope.get("rope_theta") is not None else None
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
                raise ModelError(f"config.json has no {source}.{key}, which rope type {rope_type.value} needs.")
            return default
        return to_number(value, f"{source}.{key}")

    if rope_type is RopeType.LINEAR:
        return RopeConfig(type=rope_type, theta=theta, factor=number("factor"), rotated=rotated)
    if rope_type is RopeType.NTK_ALPHA:
        return RopeConfig(type=rope_type, theta=theta, factor=number("alpha"), rotated=rotated)
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))
    original = to_count(original, f"{source}.original_max_position_embeddings")
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
            long_factors=_factors(rope.get("long_factor", []), f"{source}.long_factor"),
            rotated=rotated,
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config.json: {source}.truncate is {shown(truncate)}; expected true or false.")
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


def _rope_type(fields: Fields, source: str, rope: Mapping[str, Any]) -> RopeType:
    """Parse the type that a rope's settings name.

    ``dynamic`` stretches positions past the context, which isn't served, so that it is the default;
    with an ``alpha`` it is a fixed stretch of theta in some architectures.

    Raises:
        ModelError: it isn't known.
    """
    found = rope.get("rope_type", rope.get("type", "default"))
    name = fields.architecture.rope_names.get(found, found) if isinstance(found, str) else found
    if name == _DYNAMIC:
        is_fixed = fields.architecture.has_rope_alpha and rope.get("alpha")
        return RopeType.NTK_ALPHA if is_fixed else RopeType.DEFAULT
    known = {one.value: one for one in RopeType if one is not RopeType.NTK_ALPHA}
    if not isinstance(name, str) or name not in known:
        names = ", ".join([*known, _DYNAMIC])
        raise ModelError(f"config.json: {source}.rope_type is {shown(found)}; expected one of {names}.")
    return known[name]


def _factors(value: object, name: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ModelError(f"config.json: {name} is {shown(value)}; expected a list of numbers.")
    return tuple(to_number(factor, name) for factor in value)


def _yarn_attention_factor(factor: float, rope: Mapping[str, Any], source: str) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return mscale(to_number(above, f"{source}.mscale")) / mscale(to_number(below, f"{source}.mscale_all_dim"))
    return mscale(1.0)


def stretched_context(rope: RopeConfig, context: int) -> int:
    """Compute the longest context that a rope covers.

    Linear's and yarn's configs state either context, the original or the stretched one; llama3's
    state the stretched one.
    """
    if rope.type is RopeType.LINEAR:
        return max(context, int(context * rope.factor))
    if rope.type is RopeType.YARN:
        return max(context, int(rope.original_max_position_embeddings * rope.factor))
    return context
