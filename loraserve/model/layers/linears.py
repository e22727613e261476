"""The CPU's linears by how their weights are kept.

They are float32, bfloat16 or float16, int8, or packed (int4, nf4, fp8, int8 with groups). One
object per site, made once, called every step.

Activations and sums are float32. Except with bfloat16 weights, where it is so only nearly, a row's
result is the same bits whatever shares its batch, so that a greedy answer doesn't depend on the
batch either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraserve.errors import ConfigError, ModelError
from loraserve.model.config.formats import group_size
from loraserve.model.layers.quantized_linears import G32Linear, Int4Linear, Int8Linear, PackedLinear, bias_bytes
from loraserve_kernels.common.arithmetic import (
    FLOATS,
    GROUPS,
    LEVELS,
    OUTLIERS,
    W4A8_ROW,
    ActivationRounding,
    Arithmetic,
    activation_rounding,
)
from loraserve_kernels.common.formats import ROUNDED_IN_GROUPS, STORED_FORMATS
from loraserve_kernels.common.quantized import FORMATS, QuantizedWeight, quantize, unpermute
from loraserve_kernels.common.row_blocks import row_blocks
from loraserve_kernels.cpu import instructions
from loraserve_kernels.cpu.linear.candidates import weight_format
from loraserve_kernels.cpu.linear.chooser import chooser
from loraserve_kernels.cpu.linear.decoded import (
    DecodedWeight,
    DotWeight,
    GroupDotWeight,
)
from loraserve_kernels.cpu.linear.g32_dot import G32Weight
from loraserve_kernels.cpu.linear.gemm import (
    HalfWeight,
    blocks_in_place,
    float_linear,
    half_linear,
    half_rows,
    pack_float,
    pack_half,
)
from loraserve_kernels.errors import InvalidWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(Protocol):
    """``x W^T + bias`` for x [num_tokens, in_features] float32.

    The result [num_tokens, out_features] is float32, contiguous, and the caller's to change.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def bias(self) -> Tensor | None:
        """Bias that a result holds, [out_features].

        It is in a float dtype that LoRA's kernels take with it.
        """
        ...

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        """Arithmetic that it is computed with.

        One value, or one of each part where linears are joined, in the order of the outputs.
        """
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows of the weight as it is multiplied, a block at a time, in order.

        A block is [n, in_features] float32. Any thread may.
        """
        ...


def make_linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    *,
    quantize: str,
    dtype: torch.dtype,
    rounded: Collection[str] = ("int8",),
) -> Linear:
    """Build the linear of these weights, in a form of its own.

    Args:
        weight: [out_features, in_features]: any float dtype, which isn't kept; or quantized
            already, whose codes and scales are used as they are.
        bias: [out_features] float32.
        quantize: ``none`` or one of `FORMATS`: what a float weight is rounded to.
        dtype: what a float weight is kept in, when not quantized.
        rounded: formats of weights for which x is rounded to int8, as `weight_format` has them;
            otherwise it stays float32.

    Raises:
        ModelError: the weight can't be rounded so.
    """
    if isinstance(weight, Tensor) and quantize != "none":
        weight = quantize_weight(weight, quantize)
    if isinstance(weight, QuantizedWeight):
        if weight.permutation is not None:
            # a group of the weight's inputs isn't one of x, whose groups references round
            by_row = frozenset(rounded) - ROUNDED_IN_GROUPS
            ordered = make_linear(weight.without_permutation, bias, quantize=quantize, dtype=dtype, rounded=by_row)
            return PermutedLinear(ordered, weight.permutation)
        format = weight_format(weight, rounded=rounded)
        arithmetic = chooser().choose(format, weight.out_features, weight.in_features).arithmetic
        if arithmetic.name in GROUPS:
            return G32Linear(weight, bias, arithmetic)
        if arithmetic.name == W4A8_ROW:
            return Int4Linear(weight, bias, arithmetic)
        if arithmetic.name in LEVELS:
            return Int8Linear(weight, bias, arithmetic)
        return PackedLinear(weight, bias, arithmetic.kernel)
    return Float32Linear(weight, bias) if dtype == torch.float32 else HalfLinear(weight, bias, dtype)


def quantize_weight(weight: Tensor, format: str, rotation: int = 0) -> QuantizedWeight:
    """Round a float weight [out_features, in_features] to one of `FORMATS`.

    int4 has groups of 32 with zeros, whose ranges are searched for the least squared error.

    Args:
        rotation: inputs of a Hadamard block by which the weight is rotated first; 0: it isn't.

    Raises:
        ModelError: no groups fill in_features, or the weight holds numbers that aren't finite.
    """
    try:
        size, is_int4 = group_size(format, weight.shape[1]), format == "int4"
        return quantize(weight, format, size, has_zeros=is_int4, is_searched=is_int4, rotation=rotation)
    except InvalidWeight as error:
        raise ModelError(f"A weight can't be quantized to {format}: {error}.") from error


def check_format(quantize: str, dtype: torch.dtype) -> None:
    """Check that weights can be kept so on this machine.

    Raises:
        ConfigError: they can't, or nowhere.
    """
    if quantize not in ("none", *STORED_FORMATS):
        raise ConfigError(f"Quantization {quantize!r} isn't available; expected none, {', '.join(FORMATS)}.")
    if dtype not in DTYPES:
        raise ConfigError(f"The dtype {dtype} isn't available; expected float32, bfloat16 or float16.")
    if dtype == torch.float16 and quantize == "none" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError(
            "float16 weights need fbgemm, which this build of torch doesn't have for this CPU.",
            hint="Use --dtype float32 or bfloat16.",
        )


_VIEW_WEIGHTS = 1 << 22
"""Weights per block of rows that are float32 already and take no memory: fewer blocks take the
interpreter's lock less often.
"""


def float_rows(weight: Tensor, start: int, end: int) -> Iterator[Tensor]:
    """Yield these rows of a weight in float32, a block at a time, in order."""
    block_weights = _VIEW_WEIGHTS if weight.dtype == torch.float32 else None
    for first, last in row_blocks(start, end, weight.shape[1], block_weights):
        yield weight[first:last].float()


class Float32Linear:
    """float32 weights in oneDNN's blocked order.

    Measured on one core of a Sapphire Rapids at 4096 × 768: twice a row-major `F.linear` at 8 rows,
    1.3 times at 32, equal at 1 and 512.
    """

    __slots__ = ("_blocks", "_weight", "bias", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.float().contiguous()
        self._weight = pack_float(weight)
        self._blocks = blocks_in_place(self._weight, weight)
        self.bias, self.out_features = bias, weight.shape[0]
        self.num_bytes = self._weight.num_bytes + bias_bytes(bias)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        kernel, isa = ("onednn", instructions.onednn()) if self._weight.is_blocked else ("torch", instructions.aten())
        return (Arithmetic(FLOATS["float32"], kernel, isa),)

    def __call__(self, x: Tensor) -> Tensor:
        return float_linear(x, self._weight, self.bias)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        if self._blocks is None:
            packed = self._weight.packed
            return float_rows(packed.to_dense() if self._weight.is_blocked else packed, start, end)
        return self._rows_in_place(self._blocks, start, end)

    def _rows_in_place(self, blocks: Tensor, start: int, end: int) -> Iterator[Tensor]:
        # multiplied one by one they take no longer than many at once, nor than a row-major weight
        size = blocks.shape[2]
        for number in range(start // size, -(-end // size)):
            first = number * size
            yield blocks[number].T[max(start - first, 0) : end - first]


def half_bias(bias: Tensor | None, arithmetic: Arithmetic) -> Tensor | None:
    """Choose the bias that a linear in half precision adds: with bfloat16's arithmetic, rounded."""
    return bias.bfloat16().float() if bias is not None and arithmetic.name == FLOATS["bfloat16"] else bias


class HalfLinear:
    """Weights in bfloat16 or float16.

    One beyond float16's range, which no model is known to have, is the largest there is. bfloat16
    by oneDNN rounds x and the result to bfloat16, where the processor has instructions for it;
    elsewhere only the weights are rounded.
    """

    __slots__ = ("_arithmetic", "_weight", "bias", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        format = str(dtype).removeprefix("torch.")
        self._arithmetic = chooser().choose(format, *weight.shape).arithmetic
        self._weight: HalfWeight = pack_half(weight, dtype, self._arithmetic.kernel)
        self.bias, self.out_features = half_bias(bias, self._arithmetic), weight.shape[0]
        self.num_bytes = self._weight.num_bytes + bias_bytes(bias)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return (self._arithmetic,)

    @property
    def own_weight(self) -> DecodedWeight | None:
        """Weight as our own kernels multiply it; None where a library does."""
        return self._weight.packed if self._weight.kernel == "numba" else None

    def __call__(self, x: Tensor) -> Tensor:
        return half_linear(x, self._weight, self.bias)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        if self._arithmetic.kernel != "numba":
            yield from float_rows(half_rows(self._weight, 0, self.out_features), start, end)
            return
        for first, last in row_blocks(start, end, self._weight.in_features):
            yield half_rows(self._weight, first, last)


class PermutedLinear:
    """A linear whose weight has its inputs in another order, by which x is gathered before.

    GPTQ's ``desc_act`` makes such weights. Adapters read x as it is.
    """

    __slots__ = ("bias", "num_bytes", "ordered", "out_features", "permutation")

    def __init__(self, ordered: Linear, permutation: Tensor) -> None:
        self.ordered, self.permutation = ordered, permutation
        self.bias, self.out_features = ordered.bias, ordered.out_features
        self.num_bytes = ordered.num_bytes + permutation.nbytes

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return self.ordered.arithmetics

    def __call__(self, x: Tensor) -> Tensor:
        return self.ordered(x.index_select(1, self.permutation))

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        for block in self.ordered.rows(start, end):
            yield unpermute(block, self.permutation)


class JoinedLinear:
    """Linears that share their input but not their format, as one.

    The outputs are side by side, in order. On any device.
    """

    __slots__ = ("bias", "num_bytes", "out_features", "parts")

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.out_features = sum(part.out_features for part in parts)
        biases = [part.bias for part in parts]
        some = next((bias for bias in biases if bias is not None), None)
        self.bias = (
            None
            if some is None
            else torch.cat(
                [
                    some.new_zeros(part.out_features) if bias is None else bias
                    for part, bias in zip(parts, biases, strict=True)
                ]
            )
        )

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return tuple(arithmetic for part in self.parts for arithmetic in part.arithmetics)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        first = 0
        for part in self.parts:
            last = first + part.out_features
            if first < end and last > start:
                yield from part.rows(max(start - first, 0), min(end, last) - first)
            first = last


RoundingLinear = Int8Linear | Int4Linear
"""Linear that rounds each row of x by the row's largest magnitude.

A `G32Linear` isn't one: a rank that has whole groups of a row needs no other rank to round them.
"""


def keep_outliers(linear: Linear) -> Linear:
    """Have a linear leave the outliers of its rows as they are, and return it.

    For linears that have all of each row: a rank that had a part would choose others. Linears whose
    rows aren't rounded in groups are unchanged.
    """
    if isinstance(linear, G32Linear):
        linear.num_outliers = OUTLIERS
    return linear


def rounding_of_row(linear: Linear, row: int) -> ActivationRounding | None:
    """Look up how the products of an output round their input.

    None: x isn't rounded to integers.

    Args:
        row: the output's number; linears that were joined may differ.
    """
    if isinstance(linear, JoinedLinear):
        for part in linear.parts:
            if row < part.out_features:
                return rounding_of_row(part, row)
            row -= part.out_features
    return next((activation_rounding(arithmetic.name) for arithmetic in linear.arithmetics), None)


OwnWeight = DotWeight | GroupDotWeight | G32Weight | DecodedWeight
"""Weight as our own kernels multiply it."""


def own_weight(linear: Linear) -> OwnWeight | None:
    """Look up a CPU linear's weight as our own kernels multiply it; None where a library does."""
    if isinstance(linear, Int8Linear | Int4Linear | G32Linear | PackedLinear | HalfLinear):
        return linear.own_weight
    return None
