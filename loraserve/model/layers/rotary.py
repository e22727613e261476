"""Rotary positions and the ways to stretch them: linear, llama3, yarn, longrope, a fixed NTK alpha.

Row by row: a row's result is the same bits in any batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from loraserve.model.config.ropes import RopeConfig, RopeType


class RotaryEmbedding:
    """Cosines and sines of every position below `max_model_len`, computed once.

    Their float32 angles are those that transformers takes. Half of the head's angles are kept: the
    other half are the same. Element i of a head turns with element i + half, or with its neighbour
    where the rope is interleaved. Where only a part of the head turns, they are that part's.

    They are numpy's of float64, rounded: torch's come from MKL, which may serve a process's first
    calls at its lowest accuracy, and this table is as long-lived as the process (pytorch issue
    188792).

    Attributes:
        cos, sin: [max_model_len, rotated dim / 2] float32.
        is_interleaved: whether neighbours turn together.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_model_len: int, *, is_interleaved: bool = False) -> None:
        self.is_interleaved = is_interleaved
        angles = torch.arange(max_model_len).float()[:, None] * rope_frequencies(config, head_dim)
        exact = angles.numpy().astype(np.float64)
        self.cos = torch.from_numpy(np.cos(exact).astype(np.float32)).mul_(config.attention_factor)
        self.sin = torch.from_numpy(np.sin(exact).astype(np.float32)).mul_(config.attention_factor)
        self.num_bytes = self.cos.nbytes + self.sin.nbytes

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up what `rotate` needs for these positions, each [num_tokens, 1, rotated dim].

        These are the cosines, and the sines with the first half, or the first of each pair,
        negated.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        if self.is_interleaved:
            pairs = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
            return pairs[0].flatten(1)[:, None], pairs[1].flatten(1)[:, None]
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def table(self) -> Tensor:
        """Join every position's cosines and then sines, [max_model_len, rotated dim] float32.

        It is for kernels that look them up themselves.
        """
        return torch.cat((self.cos, self.sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> None:
    """Rotate x [num_tokens, num_heads, head_dim] in place by its positions.

    `cos` and `sin` are `RotaryEmbedding.at`'s. Elements of a head past theirs stay.
    """
    x = x[..., : cos.shape[-1]]
    if is_interleaved:
        swapped = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
    x.mul_(cos).addcmul_(swapped, sin)


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Compute the angle by which each pair of elements turns per position, float32.

    It is [head_dim / 2], or half of the part that turns.
    """
    head_dim = config.rotated_dim(head_dim)
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if config.type is RopeType.NTK_ALPHA:
        stretched: float = config.theta * config.factor ** (head_dim / (head_dim - 2))
        return 1.0 / stretched**exponents
    frequencies = 1.0 / config.theta**exponents
    if config.type is RopeType.DEFAULT:
        return frequencies
    if config.type is RopeType.LINEAR:
        return frequencies / config.factor
    if config.type is RopeType.LONGROPE:
        return 1.0 / (torch.tensor(config.short_factors) * config.theta**exponents)
    if config.type is RopeType.LLAMA3:
        return _llama3(config, frequencies)
    return _yarn(config, head_dim)


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    context = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > context / config.low_freq_factor
    is_short = wavelengths < context / config.high_freq_factor
    blend = (context / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    return torch.where(is_long, frequencies / config.factor, torch.where(is_short, frequencies, blended))


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """Source: YaRN (arXiv:2309.00071).

    Fast turning pairs are kept, slow ones stretched, with a ramp between.
    """

    def dim_of(num_rotations: float) -> float:
        context = config.original_max_position_embeddings
        return head_dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        # the ramp needs a width
        high += 0.001
    periods = config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept
