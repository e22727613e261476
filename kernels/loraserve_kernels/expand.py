"""Expand: add each row's shrunk sums times its adapter's B to the output, in place, for all slices of a site at once. A Triton kernel.

A fixed grid of programs takes (row tile, chunk of columns) pairs until the device-side count is reached. Only rows of the permutation are read or
written; where an adapter lacks a slice's module, the slice's columns aren't either.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    scratch_ptr,  # [items, SPLIT_K, BLOCK_M, 16] float32, from shrink
    pool_ptr,  # the pool's data: bf16, fp16 or int8
    units_ptr,  # int32, this layer's row of the pool's b_units
    multipliers_ptr,  # float32, this layer's row of the pool's multipliers
    plan_ptr,  # int32, the plan's buffer
    y_ptr,  # [num_tokens, N0 + N1 + N2], bf16 or fp16
    stride_y,
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
    offs_r = tl.arange(0, 16)
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
        first_item = tl.load(tile_ptr + 4 + slice_ * 4)
        num_items = tl.load(tile_ptr + 5 + slice_ * 4)
        first_tile = tl.load(tile_ptr + 6 + slice_ * 4)
        # an adapter without this slice's module has no row here
        is_row = offs_m < tl.where(num_items > 0, num_rows, 0)
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        # rows of the pool go on with zeros up to a multiple of 16, so that this mask is the same for 16 neighbours
        stride_pool = tl.multiple_of((width + 15) // 16 * 16, 16)
        is_stored = offs_n < tl.multiple_of(stride_pool - first_column, 16)
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
        for j in tl.range(0, num_items, 1, num_stages=NUM_STAGES):
            tile = first_tile + j
            is_rank = tl.load(multipliers_ptr + tile * 16 + offs_r) != 0.0
            block = tl.load(units_ptr + tile * 2 + offs_r // 8).to(tl.int64) * 16
            starts = tl.multiple_of(block + (offs_r % 8) * stride_pool + first_column, 16)
            b_ptrs = pool_ptr + starts[:, None] + offs_n[None, :]
            b = tl.load(b_ptrs, mask=is_rank[:, None] & is_stored[None, :], other=0)
            h_ptrs = scratch_ptr + (first_item + j).to(tl.int64) * (SPLIT_K * BLOCK_M * 16)
            h_ptrs += offs_m[:, None] * 16 + offs_r[None, :]
            h = tl.load(h_ptrs, mask=is_row[:, None], other=0.0)
            for plane in tl.static_range(1, SPLIT_K):
                h += tl.load(h_ptrs + plane * (BLOCK_M * 16), mask=is_row[:, None], other=0.0)
            if WIDEN:
                acc = tl.dot(h, b.to(tl.float32), acc)
            else:
                acc = tl.dot(h.to(y_ptr.dtype.element_ty), b.to(y_ptr.dtype.element_ty), acc)
        if EVEN_N:
            column = tl.multiple_of(column, 16)
            is_column = is_stored
        else:
            is_column = offs_n < width - first_column
        y_ptrs = y_ptr + rows[:, None] * stride_y + (column + offs_n)[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        acc += tl.load(y_ptrs, mask=is_output, other=0.0).to(tl.float32)
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_output)
