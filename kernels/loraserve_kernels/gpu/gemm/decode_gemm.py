"""A linear for up to 64 rows: every weight is read once, at the pace of memory.

A Triton kernel, and its parts.

Work is cut into tiles of output columns and K into `SPLIT_K` parts, both fixed by the weight's
shape. With several parts each leaves its sums in a plane of its own; the last to arrive at a tile
adds the planes in their order, whichever it is. So the sum of an output is formed in one order,
whatever the number of rows: by steps of one tensor core instruction along a part, then over parts.
Row tiles are 16 or 32 high, since instructions for 64 rows add in another order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.gemm.unpack import split_words, unpack_bytes, unpack_nibbles, zeros_of


# one compiled kernel for any number of rows, whatever it can be divided by
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def decode_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_rows, K], bf16 or fp16; for formats of 4 bits [num_rows, K / 2] int32, the same memory
    codes_ptr,  # [N, K] bf16, fp16 or uint8; [N, K / 2] uint8 for formats of 4 bits
    scales_ptr,  # float32 by output channel and group
    zeros_ptr,  # int32, by group; four neighbouring output channels' in a word; read with HAS_ZEROS
    bias_ptr,  # [N], read with HAS_BIAS
    out_ptr,  # [num_rows, N], x's dtype or float32
    planes_ptr,  # [tiles, SPLIT_K, HALVES * BLOCK_M, BLOCK_N] float32; used with SPLIT_K > 1
    counters_ptr,  # int32, a zero for each tile before and after; used with SPLIT_K > 1
    num_rows,
    N,
    K,
    stride_x,  # in elements of x_ptr
    stride_scale_n,
    stride_scale_g,
    stride_zero_g,  # in words
    stride_out,
    FORMAT: tl.constexpr,  # "plain", "int8", "fp8", "int4", "nf4"
    IS_BF16: tl.constexpr,  # x's dtype, which tensor cores multiply
    BY_GROUP: tl.constexpr,  # scales belong to groups of inputs; else, where there are any, to output channels
    GROUP: tl.constexpr,  # inputs that one pass of the inner loop takes; those that share a scale with BY_GROUP
    GROUPS: tl.constexpr,  # passes for each step of the pipeline
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,  # row tiles
    BLOCK_N: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    EVEN_K: tl.constexpr,  # GROUP * GROUPS divides K
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    tile = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    acc, acc2 = part_of_sums(
        x_ptr, codes_ptr, scales_ptr, zeros_ptr, tile, split, num_rows, N, K, stride_x, stride_scale_n, stride_scale_g,
        stride_zero_g, FORMAT, IS_BF16, BY_GROUP, GROUP, GROUPS, SPLIT_K, BLOCK_M, HALVES, BLOCK_N, HAS_ZEROS, EVEN_N,
        EVEN_K, NUM_STAGES, WIDEN,
    )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_last = True
    planes = planes_ptr + tile.to(tl.int64) * (SPLIT_K * HALVES * BLOCK_M * BLOCK_N)
    if SPLIT_K > 1:
        store_part(planes, split, acc, acc2, num_rows, BLOCK_M, HALVES, BLOCK_N)
        is_last = arrive(counters_ptr + tile, SPLIT_K)
    if is_last:
        for half in tl.static_range(HALVES):
            rows = offs_m + half * BLOCK_M
            if SPLIT_K > 1:
                y = sum_of_parts(planes, half, num_rows, SPLIT_K, BLOCK_M, HALVES, BLOCK_N)
            else:
                y = acc if half == 0 else acc2
            if FORMAT != "plain" and not BY_GROUP:
                y = scaled(y, scales_ptr, stride_scale_n, offs_n, N)
            if HAS_BIAS:
                y = y + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
            out = out_ptr + rows[:, None].to(tl.int64) * stride_out + offs_n[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (offs_n < N)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def part_of_sums(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    tile,
    split,
    num_rows,
    N,
    K,
    stride_x,
    stride_scale_n,
    stride_scale_g,
    stride_zero_g,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
    BY_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sum one part of K for a tile's columns, for each of two row tiles.

    Each is [BLOCK_M, BLOCK_N]; a channel's own scale isn't in yet.
    """
    IS_PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "nf4"
    PER_BYTE: tl.constexpr = 2 if IS_PACKED else 1
    WIDTH: tl.constexpr = GROUP // PER_BYTE
    BLOCK_K: tl.constexpr = GROUP * GROUPS
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, WIDTH)
    is_row = offs_m < num_rows
    is_column = offs_n < N
    part = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    stride_codes = K // PER_BYTE
    if BY_GROUP:
        # groups have at least 32 inputs
        stride_codes = tl.multiple_of(stride_codes, 16)
    x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_x + offs_k[None, :]
    code_ptrs = codes_ptr + offs_n[None, :].to(tl.int64) * stride_codes + offs_k[:, None]
    scale_at = offs_n.to(tl.int64) * stride_scale_n
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    acc2 = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    for k in tl.range(split * part, tl.minimum(split * part + part, K), BLOCK_K, num_stages=NUM_STAGES):
        for j in tl.static_range(GROUPS):
            at = tl.multiple_of(k // PER_BYTE + j * WIDTH, 16)
            x_mask = is_row[:, None]
            code_mask = is_column[None, :]
            if not EVEN_K:
                is_input = at + offs_k < stride_codes
                x_mask = x_mask & is_input[None, :]
                code_mask = code_mask & is_input[:, None]
            x = tl.load(x_ptrs + at, mask=x_mask, other=0)
            if EVEN_K and EVEN_N:  # noqa: SIM108 (one branch is compiled)
                codes = tl.load(code_ptrs + at)
            else:
                codes = tl.load(code_ptrs + at, mask=code_mask, other=0)
            if HALVES == 2:
                x_mask2 = x_mask & (offs_m + BLOCK_M < num_rows)[:, None]
                x2 = tl.load(x_ptrs + BLOCK_M * stride_x + at, mask=x_mask2, other=0)
            zeros = 0.0
            if BY_GROUP:
                # past the end x is zero, whatever the scale
                group = tl.minimum(k // GROUP + j, K // GROUP - 1)
                scale = tl.load(scales_ptr + scale_at + group * stride_scale_g, mask=is_column, other=0.0)
                if HAS_ZEROS:
                    # words, since nothing narrower can be copied ahead
                    words = tl.load(zeros_ptr + offs_n // 4 + group * stride_zero_g, mask=is_column, other=0)
                    zeros = zeros_of(words, offs_n, WIDTH)
            if IS_PACKED:
                lo, hi = unpack_nibbles(codes, zeros, FORMAT, HAS_ZEROS, IS_BF16, WIDEN)
                even, odd = split_words(x, IS_BF16, WIDEN)
                acc += tl.dot(odd, hi, tl.dot(even, lo)) * scale[None, :]
                if HALVES == 2:
                    even, odd = split_words(x2, IS_BF16, WIDEN)
                    acc2 += tl.dot(odd, hi, tl.dot(even, lo)) * scale[None, :]
            else:
                if FORMAT == "plain":
                    values = codes
                    if WIDEN:
                        values = values.to(tl.float32)
                else:
                    values = unpack_bytes(codes, zeros, FORMAT, HAS_ZEROS, IS_BF16, WIDEN)
                if WIDEN:
                    x = x.to(tl.float32)
                if BY_GROUP:
                    acc += tl.dot(x, values) * scale[None, :]
                else:
                    acc = tl.dot(x, values, acc)
                if HALVES == 2:
                    if WIDEN:
                        x2 = x2.to(tl.float32)
                    if BY_GROUP:
                        acc2 += tl.dot(x2, values) * scale[None, :]
                    else:
                        acc2 = tl.dot(x2, values, acc2)
    return acc, acc2


@triton.jit  # type: ignore[untyped-decorator]
def store_part(  # type: ignore[no-untyped-def]
    planes,  # the tile's
    part,
    acc,
    acc2,
    num_rows,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.arange(0, BLOCK_M)
    own = planes + part * (HALVES * BLOCK_M * BLOCK_N) + offs_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(own, acc, mask=(offs_m < num_rows)[:, None])
    if HALVES == 2:
        tl.store(own + BLOCK_M * BLOCK_N, acc2, mask=(offs_m + BLOCK_M < num_rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def arrive(counter_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count this program's arrival; return whether it is the last of `PARTS`.

    What the others stored before they arrived can then be read past the nearest cache.
    """
    # all threads' stores come before the arrival, and the last arrival comes before all threads'
    # loads
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_parts(  # type: ignore[no-untyped-def]
    planes,  # the tile's
    half,
    num_rows,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add a row tile's sums, part by part in their order."""
    offs_m = tl.arange(0, BLOCK_M)
    is_row = (offs_m + half * BLOCK_M < num_rows)[:, None]
    own = planes + half * (BLOCK_M * BLOCK_N) + offs_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # past the nearest cache, which may hold what another multiprocessor has changed since
    y = tl.load(own, mask=is_row, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        y += tl.load(own + part * (HALVES * BLOCK_M * BLOCK_N), mask=is_row, other=0.0, cache_modifier=".cg")
    return y


@triton.jit
def scaled(y, scales_ptr, stride_scale_n, offs_n, N):  # type: ignore[no-untyped-def]
    """y times the scales of its channels, where each has one."""
    return y * tl.load(scales_ptr + offs_n.to(tl.int64) * stride_scale_n, mask=offs_n < N, other=0.0)[None, :]
