"""Rotary position embeddings and the ways to stretch them: none, linear, llama3, yarn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loraserve.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles. `parameters` are the scaling's own numbers, under Hugging Face's names."""

    kind: str
    theta: float
    head_dim: int
    parameters: Mapping[str, float] = field(default_factory=dict)

    def tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [num_positions, head_dim / 2] float32, times the scaling's attention factor."""
        inverse, attention_factor = _KINDS[self.kind](self)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse[None, :]
        return angles.cos() * attention_factor, angles.sin() * attention_factor

    @property
    def inverse_frequencies(self) -> Tensor:
        """[head_dim / 2] float32, unscaled."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return 1.0 / (self.theta**exponents)


def read_rope(config: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> Rope:
    """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises:
        ModelError: a kind that isn't implemented, or a parameter that is missing or no number.
    """
    raw: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = raw.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = raw.pop("rope_type", None) or raw.pop("type", None) or "default"
    raw.pop("type", None)
    partial = raw.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"config.json says partial_rotary_factor = {partial}; only 1.0 is implemented.")
    if kind not in _KINDS:
        raise ModelError(f'config.json says rope_type "{kind}"; implemented are {", ".join(_KINDS)}.')
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }[kind]
    if kind == "yarn":
        raw.setdefault("original_max_position_embeddings", max_position_embeddings)
        if raw.get("factor") is None:
            raw["factor"] = max_position_embeddings / raw["original_max_position_embeddings"]
    for name in needed:
        if isinstance(raw.get(name), bool) or not isinstance(raw.get(name), int | float):
            raise ModelError(f'config.json\'s rope_type "{kind}" needs {name}; found {raw.get(name)!r}.')
    numbers = {name: float(value) for name, value in raw.items() if isinstance(value, int | float)}
    return Rope(kind, float(theta), head_dim, numbers)


def _default(rope: Rope) -> tuple[Tensor, float]:
    return rope.inverse_frequencies, 1.0


def _linear(rope: Rope) -> tuple[Tensor, float]:
    return rope.inverse_frequencies / rope.parameters["factor"], 1.0


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those between blended. Source: Llama 3.1's reference code."""
    p, inverse = rope.parameters, rope.inverse_frequencies
    old_length, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_length / low, inverse / p["factor"], inverse)
    blend = (old_length / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / p["factor"] + blend * stretched
    is_medium = ~(wavelength < old_length / high) & ~(wavelength > old_length / low)
    return torch.where(is_medium, blended, stretched), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched. Source: YaRN (arXiv:2309.00071)."""
    p, dim = rope.parameters, rope.head_dim
    factor, old_length = p["factor"], p["original_max_position_embeddings"]

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = magnitude(factor, p["mscale"]) / magnitude(factor, p["mscale_all_dim"])
        else:
            attention_factor = magnitude(factor)

    def dimension_of(num_turns: float) -> float:
        return dim * math.log(old_length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = rope.inverse_frequencies
    return (inverse / factor) * ramp + inverse * (1 - ramp), attention_factor


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each head turned by its row's angles (the halves of a head are the pairs' two parts).

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, 1, head_dim / 2].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
