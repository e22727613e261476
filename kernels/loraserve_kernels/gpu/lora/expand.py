"""Expand: add each row's shrunk sums times its adapter's B to the output, in place.

One launch does all slices of a site. A Triton kernel.

A fixed grid of programs takes (row tile, chunk of columns) pairs until the device-side count is
reached. Only rows of the permutation are read or written; where an adapter lacks a slice's module,
the slice's columns aren't either. Where it has a δ, what the columns hold apart from the bias is
multiplied by 1 + δ before they are written; where it has a shift, that is added last.

Adapters stored in 16 bits and in int8 share a launch: a row tile marks which its adapter is, and
the program takes one of two loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.paged import layout as paged_layout

B_UNITS = tl.constexpr(paged_layout.B_UNITS)
MULTIPLIERS = tl.constexpr(paged_layout.MULTIPLIERS)
DELTA_UNIT = tl.constexpr(paged_layout.DELTA_UNIT)
HAS_DELTA = tl.constexpr(paged_layout.HAS_DELTA)
SHIFT_UNIT = tl.constexpr(paged_layout.SHIFT_UNIT)
HAS_SHIFT = tl.constexpr(paged_layout.HAS_SHIFT)
UNIT_BITS = tl.constexpr(8 * paged_layout.UNIT_BYTES)


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    scratch_ptr,  # [items, SPLIT_K, BLOCK_M, 16] float32, from shrink
    weights_ptr,  # the pool, as 16-bit numbers: their dtype is the one to multiply in
    codes_ptr,  # the pool, as int8
    deltas_ptr,  # the pool, as float32
    records_ptr,  # int32, this layer's records: the first tile's
    plan_ptr,  # int32, the plan's buffer
    y_ptr,  # [num_tokens, N0 + N1 + N2], the dtype of the weights or float32
    bias_ptr,  # [N0 + N1 + N2], or None
    stride_y,
    stride_tile,  # from one tile's record to the next
    N0,  # columns of the site's slices; 0 where it has fewer
    N1,
    N2,
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the buffer
    PERM_AT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,  # every slice is a multiple of 16 wide
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    num_row_tiles = tl.load(plan_ptr + HEADER_AT + 2)
    tiles_at = tl.multiple_of(tl.load(plan_ptr + HEADER_AT + 3), 16)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    chunks0 = (N0 + BLOCK_N - 1) // BLOCK_N
    chunks1 = (N1 + BLOCK_N - 1) // BLOCK_N
    num_chunks = chunks0 + chunks1 + (N2 + BLOCK_N - 1) // BLOCK_N
    for work in range(tl.program_id(0), num_row_tiles * num_chunks, tl.num_programs(0)):
        chunk = work % num_chunks
        in1 = (chunk >= chunks0).to(tl.int32)
        in2 = (chunk >= chunks0 + chunks1).to(tl.int32)
        slice_ = in1 + in2
        first_column = (chunk - in1 * chunks0 - in2 * chunks1) * BLOCK_N
        width = N0 + in1 * (N1 - N0) + in2 * (N2 - N1)
        column = in1 * N0 + in2 * N1 + first_column
        tile_ptr = plan_ptr + tiles_at + (work // num_chunks) * 16
        row0 = tl.load(tile_ptr)
        num_rows = tl.load(tile_ptr + 1)
        kind = tl.load(tile_ptr + 2)
        first_item = tl.load(tile_ptr + 4 + slice_ * 4)
        num_items = tl.load(tile_ptr + 5 + slice_ * 4)
        first_tile = tl.load(tile_ptr + 6 + slice_ * 4)
        has_ending = tl.load(tile_ptr + 7 + slice_ * 4)
        # an adapter without this slice's module has no row here
        is_row = offs_m < tl.where(num_items > 0, num_rows, 0)
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        # a row of the pool is padded with zeros up to a multiple of 16, so that this mask is the
        # same for 16 neighbours
        is_stored = offs_n < tl.multiple_of((width + 15) // 16 * 16 - first_column, 16)
        h_ptr = scratch_ptr + first_item.to(tl.int64) * (SPLIT_K * BLOCK_M * 16)
        record_ptr = records_ptr + first_tile.to(tl.int64) * stride_tile
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
        if kind == 0:
            acc = add_products(
                acc, h_ptr, weights_ptr, record_ptr, stride_tile, num_items, first_column, is_row, is_stored,
                weights_ptr.dtype.element_ty, SPLIT_K, BLOCK_M, BLOCK_N, NUM_STAGES, WIDEN,
            )  # fmt: skip
        else:
            acc = add_products(
                acc, h_ptr, codes_ptr, record_ptr, stride_tile, num_items, first_column, is_row, is_stored,
                weights_ptr.dtype.element_ty, SPLIT_K, BLOCK_M, BLOCK_N, NUM_STAGES, WIDEN,
            )  # fmt: skip
        if EVEN_N:
            column = tl.multiple_of(column, 16)
            is_column = is_stored
        else:
            is_column = offs_n < width - first_column
        y_ptrs = y_ptr + rows[:, None] * stride_y + (column + offs_n)[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        acc += tl.load(y_ptrs, mask=is_output, other=0.0).to(tl.float32)
        if has_ending != 0:
            # at another layer, if not at this
            if tl.load(record_ptr + HAS_DELTA) != 0:
                start = tl.load(record_ptr + DELTA_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column
                delta = tl.load(deltas_ptr + tl.multiple_of(start, 8) + offs_n, mask=is_column, other=0.0)
                if bias_ptr is None:
                    acc += delta[None, :] * acc
                else:
                    bias = tl.load(bias_ptr + column + offs_n, mask=is_column, other=0.0).to(tl.float32)
                    acc += delta[None, :] * (acc - bias[None, :])
            if tl.load(record_ptr + HAS_SHIFT) != 0:
                start = tl.load(record_ptr + SHIFT_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column
                shift = tl.load(deltas_ptr + tl.multiple_of(start, 8) + offs_n, mask=is_column, other=0.0)
                acc += shift[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def add_products(  # type: ignore[no-untyped-def]
    acc,  # [BLOCK_M, BLOCK_N] float32
    h_ptr,  # the slice's first work item in scratch
    pool_ptr,
    record_ptr,  # of the slice's first tile
    stride_tile,
    num_items,
    first_column,  # of the slice's, a multiple of 16
    is_row,
    is_stored,  # [BLOCK_N]: columns that the pool's rows have
    DTYPE: tl.constexpr,  # to multiply in
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add a row tile's shrunk sums times B, for some columns of one slice, to acc.

    δ and the shift are the caller's.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, 16)
    offs_n = tl.arange(0, BLOCK_N)
    h_ptrs = h_ptr + offs_m[:, None] * 16 + offs_r[None, :]
    for j in tl.range(0, num_items, 1, num_stages=NUM_STAGES):
        tile_ptr = record_ptr + j * stride_tile
        is_rank = tl.load(tile_ptr + MULTIPLIERS + offs_r).to(tl.float32, bitcast=True) != 0.0
        units = tl.load(tile_ptr + B_UNITS + offs_r).to(tl.int64)
        starts = units * (UNIT_BITS // pool_ptr.dtype.element_ty.primitive_bitwidth)
        b_ptrs = pool_ptr + tl.multiple_of(starts + first_column, 16)[:, None] + offs_n[None, :]
        b = tl.load(b_ptrs, mask=is_rank[:, None] & is_stored[None, :], other=0)
        item_ptrs = h_ptrs + j * (SPLIT_K * BLOCK_M * 16)
        h = tl.load(item_ptrs, mask=is_row[:, None], other=0.0)
        for plane in tl.static_range(1, SPLIT_K):
            h += tl.load(item_ptrs + plane * (BLOCK_M * 16), mask=is_row[:, None], other=0.0)
        if WIDEN:  # noqa: SIM108 (one branch is compiled)
            acc = tl.dot(h, b.to(tl.float32), acc)
        else:
            acc = tl.dot(h.to(DTYPE), b.to(DTYPE), acc)
    return acc
