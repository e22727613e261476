"""Candidates: the kernels that can compute a CPU's linears, by format of the weight.

A library may have no instructions for a format and compute it a thousand times slower than float32,
or sum it in too few bits, silently; neither can be inferred from the processor's name. So each
candidate multiplies the largest codes there are, all of one sign and of both, and its sums are
compared with exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve_kernels.common.arithmetic import (
    BF16_WEIGHTS,
    FLOATS,
    GROUPS,
    LEVELS,
    MXFP4A8_G32,
    OUTLIERS,
    W4A8_G32,
    W4A8_ROW,
    W8A7_ROW,
    W8A8_G32,
    W8A8_ROW,
    WEIGHT_ONLY,
    Arithmetic,
)
from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu import instructions
from loraserve_kernels.cpu.linear import decoded, g32_dot, gemm
from loraserve_kernels.cpu.linear.packed_linear import pack_quantized, packed_linear
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import TensorMismatch

_EXACT_ROWS = (1, 3, 33)
_EXACT_CHANNELS = 72


@dataclass(frozen=True, slots=True)
class Candidate:
    """Way to compute a format's linears.

    Attributes:
        rank: lower is preferred; candidates of one rank give the same bits.
        make: packs a weight and returns its product with x.
        is_exact: whether it sums the largest codes rightly at that many inputs.
        is_there: whether this machine has what it needs.
    """

    name: str
    kernel: str
    rank: int
    instructions: Callable[[], str]
    make: Callable[[QuantizedWeight | Tensor], Callable[[Tensor], Tensor]]
    is_exact: Callable[[Candidate, str, int], bool]
    is_there: Callable[[], bool]

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self.name, self.kernel, self.instructions())

    @property
    def is_own(self) -> bool:
        """Whether a step runs it among its other kernels, without a cut."""
        return self.kernel.startswith("numba")


def weight_format(weight: QuantizedWeight, *, rounded: Collection[str]) -> str:
    """Decide which of `FORMATS` a quantized weight is.

    Args:
        rounded: formats of weights whose activations are rounded to int8, where they can be:
            ``int8`` and ``int4`` by row; ``int8-g32``, ``int4-g32`` and ``mxfp4-g32``, which come
            first, in groups of 32.

    Raises:
        TensorMismatch: the weight's inputs are permuted, and no kernel gathers them.
    """
    if weight.permutation is not None:
        raise TensorMismatch("the weight's inputs are permuted: gather x and pass weight.without_permutation")
    in_groups = f"{weight.format}-g32"
    if in_groups in rounded and HAS_NUMBA and g32_dot.can_round_groups(weight):
        return in_groups
    if weight.format == "int8" and not weight.has_groups:
        return "int8" if "int8" in rounded else "int8-weights"
    if "int4" in rounded and HAS_NUMBA and decoded.can_round_activations(weight):
        return "int4-rounded"
    grouped = f"{weight.format}-groups" if weight.format == "int8" else weight.format
    return grouped if weight.zeros is None else f"{grouped}-zeros"


def compile_candidate(candidate: Candidate, format: str) -> None:
    """Compile what the candidate needs, or read it from numba's cache.

    Otherwise compiling would be taken for slowness.
    """
    if candidate.kernel == "numba-dot" and candidate.name in GROUPS:
        # a checkpoint's own scales and zeros may need another, which the load compiles
        decoded.warm_up(g32_dot.pack(_quantized(format, 64, 64)).kernel)
    elif candidate.kernel == "numba-dot":
        for kind in ("int4-dot", "int4-dot-half") if candidate.name == W4A8_ROW else ("dot",):
            decoded.warm_up(kind)
    elif candidate.kernel == "numba":
        decoded.warm_up(_KINDS.get(format, format.partition("-")[0]))
    gemm.warm_up()


def example(format: str, out_features: int, in_features: int) -> QuantizedWeight | Tensor:
    """Build a weight of this shape whose codes are mixed; no generator's state is touched."""
    columns = torch.arange(in_features, dtype=torch.int32)
    channels = torch.arange(out_features, dtype=torch.int32)[:, None]
    codes = (channels * 37 + columns * 11) % 251 - 125
    return _of_codes(format, codes.to(torch.int8))


def _quantized(format: str, out_features: int, in_features: int) -> QuantizedWeight:
    weight = example(format, out_features, in_features)
    if isinstance(weight, Tensor):
        raise TypeError("a float weight")
    return weight


def _of_codes(format: str, codes: Tensor) -> QuantizedWeight | Tensor:
    """Build a weight of these values, as nearly as the format holds them.

    int8 holds them exactly, with scales of 1.
    """
    if format in DTYPES:
        return codes.to(DTYPES[format])
    kind, _, rest = format.partition("-")
    out_features, in_features = codes.shape
    if kind == "int8":
        size = _GROUP_SIZES.get(rest.partition("-")[0], in_features)
        group = size if in_features % size == 0 else in_features
        scales = torch.ones(out_features, in_features // group)
        zeros = None
        if rest == "groups-zeros" and group < in_features:
            zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
        return QuantizedWeight("int8", codes.contiguous(), scales, zeros, group, in_features, out_features)
    group_size = _GROUP_SIZES.get(rest, 64) if kind == "int4" else None
    weight = quantize(codes.float(), kind, group_size, has_zeros=rest == "zeros")
    # as checkpoints mostly have them
    return replace(weight, scales=weight.scales.bfloat16().float()) if rest == "g32" else weight


_GROUP_SIZES = {"groups": 64, "g32": 32}
"""Inputs that share a scale in an example, by what follows its kind."""


def _largest(num_rows: int, in_features: int, top: int, bottom: int) -> Tensor:
    """Build rows of the largest codes.

    They are all positive, all negative, both in turn, both by pairs, and a mixture.
    """
    signs = torch.ones(in_features, dtype=torch.int32)
    turn, pairs = signs.clone(), signs.clone()
    turn[1::2] = -1
    pairs[1::4] = pairs[2::4] = -1
    mixture = (torch.arange(in_features, dtype=torch.int32) * 97) % (top - bottom + 1) + bottom
    mixture[0] = top
    rows = torch.stack((top * signs, bottom * signs, top * turn, top * pairs, mixture))
    return rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows]


def _rounds_exactly(candidate: Candidate, format: str, in_features: int) -> bool:
    """Check whether int8 by int8 is summed without an error, for few rows and many."""
    levels = LEVELS[candidate.name]
    weight = _of_codes(format, _largest(_EXACT_CHANNELS, in_features, 127, -128).to(torch.int8))
    if isinstance(weight, Tensor):
        return False
    product, codes = candidate.make(weight), weight.codes.double()
    for num_rows in _EXACT_ROWS:
        x = _largest(num_rows, in_features, levels, -levels)
        # each row's largest magnitude is `levels`, so that its codes are itself
        y, exact = product(x.float()).double(), x.double() @ codes.T
        if ((y - exact).abs() > 4e-7 * exact.abs()).any():
            return False
        # one more or less shows where the sum is small enough for float32 to hold it
        is_small = exact.abs() < 1 << 22
        if ((y - exact).abs() > 0.5)[is_small].any():
            return False
    return True


def _multiplies_exactly(candidate: Candidate, format: str, in_features: int) -> bool:
    """Check whether products of the largest codes are those of the dequantized weight.

    They are multiplied with activations of one sign, and of both.
    """
    weight = _of_codes(format, _largest(_EXACT_CHANNELS, in_features, 127, -128).to(torch.int8))
    wide = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)
    product, tolerance = candidate.make(weight), _TOLERANCES.get(candidate.name, 2e-5)
    for num_rows in _EXACT_ROWS:
        x = _largest(num_rows, in_features, 127, -127).float()
        if candidate.name in GROUPS:
            # each group's largest magnitude is 127, so that its codes are itself
            x[:, :: GROUPS[candidate.name]] = 127
            # the outliers, which no code rounds
            x[:, 5], x[:, in_features - 2] = 1000.5, -999.25
        bound = tolerance * (x.double().abs() @ wide.abs().T)
        if ((product(x).double() - x.double() @ wide.T).abs() > bound).any():
            return False
    return True


_TOLERANCES = {FLOATS["bfloat16"]: 1e-2, FLOATS["float16"]: 2e-3}
"""Tolerances of products whose activations or results are rounded to 16 bits, relative to the sum
of magnitudes.
"""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_KINDS = {
    "int8-weights": "int8",
    "int8-groups": "int8",
    "int8-groups-zeros": "int8z",
    "int4": "int4",
    "int4-zeros": "int4z",
    "nf4": "nf4",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "bfloat16": "bf16",
    "float16": "f16",
}
"""Kind of weight that numba's kernel decodes, by format."""


def _make_int8(kernel: str) -> Callable[[QuantizedWeight | Tensor], Callable[[Tensor], Tensor]]:
    def make(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
        if isinstance(weight, Tensor):
            raise TypeError("a float weight")
        packed = gemm.pack_int8(weight.codes, weight.scales.flatten().clone(), kernel, weight.rotation)
        return lambda x: gemm.int8_linear(x, packed)

    return make


def _make_int4_dot(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Tensor):
        raise TypeError("a float weight")
    packed = decoded.pack_group_dot(weight)
    return lambda x: gemm.int4_linear(x, packed)


def _make_g32(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Tensor):
        raise TypeError("a float weight")
    packed = g32_dot.pack(weight)
    return lambda x: g32_dot.linear(x, packed, None, OUTLIERS)


def _make_packed(kernel: str) -> Callable[[QuantizedWeight | Tensor], Callable[[Tensor], Tensor]]:
    def make(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
        if isinstance(weight, Tensor):
            raise TypeError("a float weight")
        packed = pack_quantized(weight, kernel)
        return lambda x: packed_linear(x, packed)

    return make


def _make_half(kernel: str) -> Callable[[QuantizedWeight | Tensor], Callable[[Tensor], Tensor]]:
    def make(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
        if not isinstance(weight, Tensor):
            raise TypeError("a quantized weight")
        packed = gemm.pack_half(weight, weight.dtype, kernel)
        return lambda x: gemm.half_linear(x, packed)

    return make


def _has_numba() -> bool:
    return HAS_NUMBA


def _has_byte_pairs() -> bool:
    if not HAS_NUMBA:
        return False
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_BYTE_PAIRS

    return HAS_BYTE_PAIRS


def _weight_only(format: str) -> tuple[Candidate, ...]:
    name = WEIGHT_ONLY[format.partition("-")[0]]
    return (
        Candidate(name, "numba", 0, instructions.numba, _make_packed("numba"), _multiplies_exactly, _has_numba),
        Candidate(name, "widened", 1, instructions.onednn, _make_packed("widened"), _multiplies_exactly, lambda: True),
    )


def _in_groups(kind: str, name: str) -> tuple[Candidate, ...]:
    """List the candidates of weights whose activations are rounded in groups of 32."""
    own = Candidate(name, "numba-dot", 0, instructions.numba, _make_g32, _multiplies_exactly, _has_byte_pairs)
    return (own, *(replace(candidate, rank=candidate.rank + 1) for candidate in _weight_only(kind)))


def _int8(name: str, kernel: str, rank: int, isa: Callable[[], str], is_there: Callable[[], bool]) -> Candidate:
    return Candidate(name, kernel, rank, isa, _make_int8(kernel), _rounds_exactly, is_there)


_IN_GROUPS = {"int8": W8A8_G32, "int4": W4A8_G32, "mxfp4": MXFP4A8_G32}
"""Kind of weight → the arithmetic in which activations are rounded in groups of 32."""

FORMATS: dict[str, tuple[Candidate, ...]] = {
    "int8": (
        _int8(W8A8_ROW, "onednn-s8", 0, instructions.onednn, gemm.has_onednn),
        _int8(W8A8_ROW, "onednn-u8", 0, instructions.onednn, gemm.has_onednn),
        _int8(W8A8_ROW, "numba-dot", 0, instructions.numba, _has_numba),
        _int8(W8A7_ROW, "fbgemm", 1, instructions.fbgemm, gemm.has_fbgemm),
        Candidate(
            WEIGHT_ONLY["int8"],
            "widened",
            2,
            instructions.onednn,
            _make_packed("widened"),
            _multiplies_exactly,
            lambda: True,
        ),
    ),
    "int4-rounded": (
        Candidate(W4A8_ROW, "numba-dot", 0, instructions.numba, _make_int4_dot, _multiplies_exactly, _has_byte_pairs),
        *(replace(candidate, rank=candidate.rank + 1) for candidate in _weight_only("int4")),
    ),
    **{f"{kind}-g32": _in_groups(kind, name) for kind, name in _IN_GROUPS.items()},
    **{format: _weight_only(format) for format in _KINDS if format not in DTYPES},
    "bfloat16": (
        Candidate(
            FLOATS["bfloat16"],
            "onednn",
            0,
            instructions.onednn,
            _make_half("onednn"),
            _multiplies_exactly,
            gemm.has_native_bfloat16,
        ),
        Candidate(BF16_WEIGHTS, "numba", 1, instructions.numba, _make_half("numba"), _multiplies_exactly, _has_numba),
        Candidate(
            FLOATS["bfloat16"], "torch", 2, instructions.aten, _make_half("torch"), _multiplies_exactly, lambda: True
        ),
    ),
    "float16": (
        Candidate(
            FLOATS["float16"], "numba", 0, instructions.numba, _make_half("numba"), _multiplies_exactly, _has_numba
        ),
        # with AVX2 alone its last rows are summed in another order
        Candidate(
            FLOATS["float16"],
            "fbgemm",
            1,
            instructions.fbgemm,
            _make_half("fbgemm"),
            _multiplies_exactly,
            gemm.has_fbgemm,
        ),
    ),
}
"""Format → its candidates, by rank.

``int8``, ``int4-rounded``: activations are rounded by row too; ``int8-g32``, ``int4-g32``,
``mxfp4-g32``: in groups of 32; ``int8-weights``, ``int4``: they aren't.
"""
