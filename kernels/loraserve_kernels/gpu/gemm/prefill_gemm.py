"""A linear with a quantized weight for many rows.

Codes become numbers on their way to the tensor cores. A Triton kernel.

A tile of x goes through shared memory as it is; a tile of the weight is unpacked in registers and
is the second operand. Scales of groups of 4 bits are multiplied in before the weight is rounded to
x's dtype, as it was when the model was trained. int8's codes are exact in x's dtype, and a rounded
weight would be half as exact as they are: their groups' scales are multiplied into the float32 sums
of the group, and a scale of the whole channel into all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.gemm.unpack import unpack_bytes, unpack_nibbles, zeros_of


# one compiled kernel for any number of rows, whatever it can be divided by
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def prefill_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_rows, K], bf16 or fp16
    codes_ptr,  # [N, K] uint8, or [N, K / 2] uint8 for formats of 4 bits
    scales_ptr,  # float32 by output channel and group
    zeros_ptr,  # int32, by group; four neighbouring output channels' in a word; read with HAS_ZEROS
    bias_ptr,  # [N], read with HAS_BIAS
    out_ptr,  # [num_rows, N], x's dtype or float32
    num_rows,
    N,
    K,
    stride_x,
    stride_scale_n,
    stride_scale_g,
    stride_zero_g,  # in words
    stride_out,
    FORMAT: tl.constexpr,  # "int8", "fp8", "int4", "nf4"
    IS_BF16: tl.constexpr,  # x's dtype, which tensor cores multiply
    BY_GROUP: tl.constexpr,  # scales belong to groups of inputs; else to output channels
    GROUP: tl.constexpr,  # inputs that share a scale, with BY_GROUP
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # no more than GROUP, with BY_GROUP
    ROWS_FIRST: tl.constexpr,  # row tiles that programs take before the next column tile
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    IS_PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "nf4"
    PER_BYTE: tl.constexpr = 2 if IS_PACKED else 1
    WIDTH: tl.constexpr = BLOCK_K // PER_BYTE
    # programs that run at the same time share tiles of x and of the weight in the device's cache
    row_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    column_tiles = (N + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) // (ROWS_FIRST * column_tiles)
    band_rows = tl.minimum(row_tiles - band * ROWS_FIRST, ROWS_FIRST)
    in_band = tl.program_id(0) % (ROWS_FIRST * column_tiles)
    offs_m = (band * ROWS_FIRST + in_band % band_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (in_band // band_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_c = tl.arange(0, WIDTH)
    is_row = offs_m < num_rows
    is_column = offs_n < N
    stride_codes = K // PER_BYTE
    if BY_GROUP:
        stride_codes = tl.multiple_of(stride_codes, 16)
    x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_x + offs_k[None, :]
    code_ptrs = codes_ptr + offs_n[None, :].to(tl.int64) * stride_codes + offs_c[:, None]
    scale_at = offs_n.to(tl.int64) * stride_scale_n
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        at = tl.multiple_of(k // PER_BYTE, 16)
        x_mask = is_row[:, None]
        code_mask = is_column[None, :]
        if not EVEN_K:
            x_mask = x_mask & (k + offs_k < K)[None, :]
            code_mask = code_mask & (at + offs_c < stride_codes)[:, None]
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:  # noqa: SIM108 (one branch is compiled)
            codes = tl.load(code_ptrs + at)
        else:
            codes = tl.load(code_ptrs + at, mask=code_mask, other=0)
        zeros = 0.0
        if BY_GROUP:
            scale = tl.load(scales_ptr + scale_at + (k // GROUP) * stride_scale_g, mask=is_column, other=0.0)
            if HAS_ZEROS:
                words = tl.load(zeros_ptr + offs_n // 4 + (k // GROUP) * stride_zero_g, mask=is_column, other=0)
                zeros = zeros_of(words, offs_n, WIDTH)
        if IS_PACKED:
            lo, hi = unpack_nibbles(codes, zeros, FORMAT, HAS_ZEROS, IS_BF16, WIDEN)
            lo = lo.to(tl.float32) * scale[None, :]
            hi = hi.to(tl.float32) * scale[None, :]
            # [WIDTH, BLOCK_N, 2] to the order of inputs
            values = tl.join(lo.to(x.dtype), hi.to(x.dtype)).permute(0, 2, 1).reshape(BLOCK_K, BLOCK_N)
        else:
            values = unpack_bytes(codes, zeros, FORMAT, HAS_ZEROS, IS_BF16, WIDEN)
        if WIDEN:
            x = x.to(tl.float32)
            values = values.to(tl.float32)
        if BY_GROUP and not IS_PACKED:
            acc += tl.dot(x, values) * scale[None, :]
        else:
            acc = tl.dot(x, values, acc)
    if not BY_GROUP:
        acc = acc * tl.load(scales_ptr + scale_at, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + offs_n, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + offs_m[:, None].to(tl.int64) * stride_out + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
