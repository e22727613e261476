"""A linear on a GPU with its weight as it is stored, quantized or not.

There is one entry for any number of rows. Needs Triton.

Up to `MAX_DECODE_ROWS` rows, one kernel reads each weight once and a row's bits depend on that row
alone. Above, tiles of the weight are unpacked on their way to the tensor cores, and a row's bits
depend on the row alone again, but aren't those of the first kernel; a weight that isn't quantized
goes to the vendor's library there.

With ``TRITON_INTERPRET=1`` in the environment before Triton's first import, the kernels run on CPU
tensors, slowly: for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve_kernels.common.quantized import GROUP_SIZES, QuantizedWeight, zero_words
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.device import INTERPRETED, MAX_REGISTERS, registers, roomy
from loraserve_kernels.gpu.gemm.decode_gemm import decode_gemm_kernel
from loraserve_kernels.gpu.gemm.prefill_gemm import prefill_gemm_kernel
from loraserve_kernels.gpu.tuning import tuned

MAX_DECODE_ROWS = 64

_DTYPES = (torch.bfloat16, torch.float16)
# column tiles of the narrowest configuration
_COLUMNS = 64
# two for each of an H200's multiprocessors; a constant, so that a row's bits don't depend on the
# device either
_ENOUGH_PROGRAMS = 256
_SHORTEST_PART = 256
_MAX_PARTS = 16
_MAX_TILES = 1 << 16
# outputs of a program whose sums leave registers for four programs of four warps
_SMALL_TILE = 32 * 64
# of one of eight warps
_WIDE_TILE = 64 * 128


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile sizes of the kernel for few rows.

    Chosen by reasoning about bytes in flight and by reading compiled code; not measured.
    """

    block_m: int
    halves: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes of the kernel for many rows. Chosen in the same way; not measured."""

    block_m: int
    block_n: int
    block_k: int
    rows_first: int
    num_warps: int
    num_stages: int


DECODE_CONFIGS: dict[int, DecodeConfig] = {
    16: DecodeConfig(16, 1, 64, 4, 5),
    32: DecodeConfig(32, 1, 64, 4, 4),
    # instructions for 64 rows would add a row's products in another order than those for 16
    64: DecodeConfig(32, 2, 128, 8, 4),
}
"""Tile sizes by the largest number of rows."""

ZEROS_CONFIG = DecodeConfig(32, 2, 64, 8, 4)
"""Tile sizes for the most rows of codes of 4 bits with zeros: wider tiles keep registers in memory
with some versions of the compiler.
"""

PREFILL_CONFIG = PrefillConfig(128, 128, 64, 8, 8, 3)

BLOCK_K: dict[str, int] = {"plain": 64, "int8": 128, "fp8": 128, "int4": 128, "nf4": 128}
"""Inputs for each step of the decode kernel's pipeline.

Part of the order of additions, so the same for any number of rows.
"""


def split_k(out_features: int, in_features: int) -> int:
    """Choose the number of parts that the kernel for few rows cuts a row's sum into.

    It is fixed by the weight's shape.
    """
    tiles, parts = -(-out_features // _COLUMNS), 1
    while tiles * parts < _ENOUGH_PROGRAMS and in_features >= 2 * parts * _SHORTEST_PART and parts < _MAX_PARTS:
        parts *= 2
    return parts


def weight_only_linear(
    x: Tensor, weight: QuantizedWeight | Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``x W^T + bias``, summed in float32 and rounded once.

    One launch, no synchronisation; may be captured in a CUDA graph once it has run on the device
    before. Calls on several streams at a time aren't possible: those of one device share the
    counters of `_counters`.

    Args:
        x: [num_tokens, in_features] bfloat16 or float16, contiguous in the last dim.
        weight: a plain one has x's dtype and is contiguous.
        bias: [out_features], x's dtype.
        out_dtype: x's (None), or float32.

    Raises:
        TensorMismatch: x, the weight and the bias disagree on shapes, dtypes or devices.
    """
    out_features, in_features = _check(x, weight, bias, out_dtype)
    out = torch.empty((x.shape[0], out_features), dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    if x.shape[0] <= MAX_DECODE_ROWS:
        _decode(x, weight, bias, out, in_features)
    elif isinstance(weight, QuantizedWeight):
        _prefill(x, weight, bias, out)
    elif out.dtype == x.dtype:
        return F.linear(x, weight, bias)
    else:
        _float32_linear(x, weight, bias, out)
    return out


def _decode(x: Tensor, weight: QuantizedWeight | Tensor, bias: Tensor | None, out: Tensor, in_features: int) -> None:
    config = decode_config(x.shape[0], weight)
    tiles, parts = -(-out.shape[1] // config.block_n), split_k(out.shape[1], in_features)
    planes = counters = out
    if parts > 1:
        planes, counters = _planes(x, tiles, parts, config), _counters(x.device)
    tensors, numbers, constants = _decode_launch(x, weight, bias, out, in_features, config)
    is_even = out.shape[1] % config.block_n == 0
    decode_gemm_kernel[(tiles * parts,)](
        *tensors,
        planes,
        counters,
        *numbers,
        EVEN_N=is_even,
        maxnreg=_max_registers(weight, config, is_even),
        **constants,
    )


def _max_registers(weight: QuantizedWeight | Tensor, config: DecodeConfig, is_even: bool) -> int | None:
    """Bound the registers that a thread may take; None: as the compiler thinks best.

    Left alone, some versions of the compiler aim at five programs of the small tiles with bytes,
    and keep registers in memory for it. Widths that no known base has need masks (not is_even), and
    more registers.
    """
    if not isinstance(weight, QuantizedWeight) or weight.has_groups:
        return None
    num_outputs = config.block_m * config.halves * config.block_n
    if config.num_warps == 4 and num_outputs <= _SMALL_TILE:
        return roomy(MAX_REGISTERS, registers(4, 2)) if is_even else registers(4, 2)
    if config.num_warps == 8 and num_outputs <= _WIDE_TILE:
        return roomy(None, registers(8, 1))
    return None


def decode_config(num_rows: int, weight: QuantizedWeight | Tensor) -> DecodeConfig:
    """Choose the tile sizes of the kernel for this many rows of this weight."""
    most = next(most for most in DECODE_CONFIGS if num_rows <= most)
    has_zeros, shape = False, tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if isinstance(weight, QuantizedWeight):
        has_zeros, shape = weight.is_packed and weight.zeros is not None, (weight.out_features, weight.in_features)
    config = ZEROS_CONFIG if has_zeros and most == max(DECODE_CONFIGS) else DECODE_CONFIGS[most]
    return tuned("decode_gemm", f"{kind_of(weight)}/{shape[0]}x{shape[1]}/{most}", config)


def kind_of(weight: QuantizedWeight | Tensor) -> str:
    """Format what a file of tile sizes calls the weight: ``int4-128-zeros``, ``plain``."""
    if not isinstance(weight, QuantizedWeight):
        return "plain"
    group = f"-{weight.group_size}" if weight.has_groups else ""
    return f"{weight.format}{group}{'-zeros' if weight.zeros is not None else ''}"


def prefill_config(weight: QuantizedWeight) -> PrefillConfig:
    """Choose the tile sizes of the kernel for many rows of this weight.

    They are the same for any number of rows, and so are a row's bits.
    """
    key = f"{kind_of(weight)}/{weight.out_features}x{weight.in_features}"
    return tuned("prefill_gemm", key, PREFILL_CONFIG)


def _planes(x: Tensor, tiles: int, planes: int, config: DecodeConfig) -> Tensor:
    shape = (tiles, planes, config.halves * config.block_m, config.block_n)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _decode_launch(
    x: Tensor,
    weight: QuantizedWeight | Tensor,
    bias: Tensor | None,
    out: Tensor,
    in_features: int,
    config: DecodeConfig,
) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """Collect the arguments of a kernel for few rows.

    They are tensors down to `out`, numbers down to `stride_out`, constants and options.
    """
    format, scales, zeros, dtype = "plain", None, None, x.dtype
    if isinstance(weight, QuantizedWeight):
        format, scales = weight.format, weight.scales
        zeros = None if weight.zeros is None else zero_words(weight.zeros)
    group, by_group = BLOCK_K[format], isinstance(weight, QuantizedWeight) and weight.has_groups
    if isinstance(weight, QuantizedWeight) and by_group:
        group, x = weight.group_size, _as_words(x) if weight.is_packed else x
    # what isn't read is any tensor
    tensors = [x, _codes(weight), *(out if part is None else part for part in (scales, zeros, bias)), out]
    scale_strides = (1, 1) if scales is None else scales.stride()
    numbers = [out.shape[0], out.shape[1], in_features, x.stride(0), *scale_strides]
    numbers += [1 if zeros is None else zeros.stride(0), out.stride(0)]
    constants: dict[str, Any] = {
        "FORMAT": format,
        "IS_BF16": dtype == torch.bfloat16,
        "BY_GROUP": by_group,
        "GROUP": group,
        "GROUPS": BLOCK_K[format] // group,
        "SPLIT_K": split_k(out.shape[1], in_features),
        "BLOCK_M": config.block_m,
        "HALVES": config.halves,
        "BLOCK_N": config.block_n,
        "HAS_ZEROS": zeros is not None,
        "HAS_BIAS": bias is not None,
        "EVEN_K": in_features % BLOCK_K[format] == 0,
        "NUM_STAGES": config.num_stages,
        "WIDEN": INTERPRETED,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    return tensors, numbers, constants


def _prefill(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    num_rows, out_features = out.shape
    config, zeros = prefill_config(weight), None if weight.zeros is None else zero_words(weight.zeros)
    # a step of the pipeline stays within a group
    block_k = min(config.block_k, weight.group_size) if weight.has_groups else config.block_k
    tiles = -(-num_rows // config.block_m) * -(-out_features // config.block_n)
    prefill_gemm_kernel[(tiles,)](
        x,
        _codes(weight),
        weight.scales,
        out if zeros is None else zeros,
        out if bias is None else bias,
        out,
        num_rows,
        out_features,
        weight.in_features,
        x.stride(0),
        *weight.scales.stride(),
        1 if zeros is None else zeros.stride(0),
        out.stride(0),
        FORMAT=weight.format,
        IS_BF16=x.dtype == torch.bfloat16,
        BY_GROUP=weight.has_groups,
        GROUP=weight.group_size if weight.has_groups else block_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        ROWS_FIRST=config.rows_first,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        EVEN_N=out_features % config.block_n == 0,
        EVEN_K=weight.in_features % block_k == 0,
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=roomy(None, registers(8, 1)) if config.num_warps == 8 and weight.group_size == 32 else None,
        enable_fp_fusion=True,
    )


def _float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if x.device.type == "cuda":
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weight.float().t(), out=out)
    if bias is not None:
        out += bias


def _codes(weight: QuantizedWeight | Tensor) -> Tensor:
    """View what the kernels read: bytes, or the plain weight."""
    return weight.codes.view(torch.uint8) if isinstance(weight, QuantizedWeight) else weight


def _as_words(x: Tensor) -> Tensor:
    """View the same memory in pairs of inputs, which the two codes of a byte meet."""
    if x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    return x.view(torch.int32)


@cache
def _counters(device: torch.device) -> Tensor:
    """Zeros, one for each column tile of a weight: how many of its parts have arrived.

    Kernels leave zeros behind.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def _check(
    x: Tensor, weight: QuantizedWeight | Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[int, int]:
    """Check that everything agrees with the weight's shape, and return it."""
    if isinstance(weight, QuantizedWeight):
        shape = (weight.out_features, weight.in_features)
        if weight.rotation:
            raise TensorMismatch(
                f"the weight is rotated by blocks of {weight.rotation} inputs, which a GPU's rows aren't: "
                "round it without a rotation"
            )
        if weight.permutation is not None:
            raise TensorMismatch("the weight's inputs are permuted: gather x and pass weight.without_permutation")
        if weight.format in ("int4", "int8") and weight.has_groups and weight.group_size not in GROUP_SIZES:
            raise TensorMismatch(
                f"the weight has groups of {weight.group_size} inputs; a GPU's kernels have "
                f"{', '.join(map(str, GROUP_SIZES))}: use a CPU"
            )
        if weight.has_float_zeros:
            raise TensorMismatch(
                "the weight's zeros are float32; a GPU's kernels take whole ones, uint8: round it again, or use a CPU"
            )
    elif weight.dim() != 2 or weight.dtype != x.dtype or not weight.is_contiguous():
        raise TensorMismatch(
            f"the weight is {tuple(weight.shape)} {weight.dtype} of strides {weight.stride()}; "
            f"it must be a contiguous matrix of {x.dtype}, as x"
        )
    else:
        shape = (weight.shape[0], weight.shape[1])
    if x.dim() != 2 or x.shape[1] != shape[1] or x.dtype not in _DTYPES or (shape[1] > 1 and x.stride(1) != 1):
        raise TensorMismatch(
            f"x is {tuple(x.shape)} {x.dtype} of strides {x.stride()}; this linear takes "
            f"(num_tokens, {shape[1]}) in bfloat16 or float16, "
            "contiguous in the last dim"
        )
    if bias is not None and (bias.shape != shape[:1] or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise TensorMismatch(f"the bias is {tuple(bias.shape)} {bias.dtype}; it must be ({shape[0]},) {x.dtype}")
    if x.device != weight.device or (bias is not None and bias.device != x.device):
        raise TensorMismatch(f"x is on {x.device}, the weight on {weight.device}; they and the bias must be together")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise TensorMismatch(f"out_dtype {out_dtype}; x's, {x.dtype}, or float32 can be had")
    return shape
