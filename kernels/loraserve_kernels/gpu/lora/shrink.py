"""Shrink: each row's sums with sixteen ranks of its adapter's A, into scratch memory.

Triton kernels: for linears, and for the embedding, which only looks numbers up.

A fixed grid of programs takes work items until the device-side count is reached. K is cut into
`SPLIT_K` parts, each with a plane of its own in the item's scratch: no atomics, nothing to clear
first, and the order of additions depends on K alone. All sixteen columns of a row are written, zero
where there is no rank, so that expand reads them without masks.

Adapters stored in 16 bits and in int8 share a launch. A work item marks which its adapter is, and
the program takes one of two loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.paged import layout as paged_layout

RECORD = tl.constexpr(paged_layout.RECORD)
A_UNITS = tl.constexpr(paged_layout.A_UNITS)
MULTIPLIERS = tl.constexpr(paged_layout.MULTIPLIERS)
UNIT_BITS = tl.constexpr(8 * paged_layout.UNIT_BYTES)


@triton.jit  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_tokens, K], bf16 or fp16
    weights_ptr,  # the pool, as numbers of x's dtype
    codes_ptr,  # the pool, as int8
    records_ptr,  # int32, this layer's records: the first tile's
    plan_ptr,  # int32, the plan's buffer
    scratch_ptr,  # [items, SPLIT_K, BLOCK_M, 16] float32
    K,
    stride_x,
    stride_tile,  # from one tile's record to the next
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the buffer
    PERM_AT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    num_items = tl.load(plan_ptr + HEADER_AT)
    items_at = tl.load(plan_ptr + HEADER_AT + 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, 16)
    offs_k = tl.arange(0, BLOCK_K)
    part = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    for work in range(tl.program_id(0), num_items * SPLIT_K, tl.num_programs(0)):
        item = work // SPLIT_K
        plane = work % SPLIT_K
        item_ptr = plan_ptr + items_at + item * 4
        row0 = tl.load(item_ptr)
        num_rows = tl.load(item_ptr + 1)
        tile = tl.load(item_ptr + 2)
        kind = tl.load(item_ptr + 3)
        is_row = offs_m < num_rows
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        record_ptr = records_ptr + tile.to(tl.int64) * stride_tile
        multiplier = tl.load(record_ptr + MULTIPLIERS + offs_r).to(tl.float32, bitcast=True)
        is_rank = multiplier != 0.0
        units = tl.load(record_ptr + A_UNITS + offs_r).to(tl.int64)
        x_ptrs = x_ptr + rows[:, None] * stride_x + offs_k[None, :]
        k_start = plane * part
        k_end = tl.minimum(k_start + part, K)
        acc = tl.full((BLOCK_M, 16), 0.0, dtype=tl.float32)
        if kind == 0:
            acc = products(
                acc, x_ptrs, weights_ptr, units, is_row, is_rank, k_start, k_end, K, BLOCK_K, EVEN_K, NUM_STAGES, WIDEN
            )
        else:
            acc = products(
                acc, x_ptrs, codes_ptr, units, is_row, is_rank, k_start, k_end, K, BLOCK_K, EVEN_K, NUM_STAGES, WIDEN
            )
        acc = acc * multiplier[None, :]
        out = scratch_ptr + (item.to(tl.int64) * SPLIT_K + plane) * (BLOCK_M * 16)
        tl.store(out + offs_m[:, None] * 16 + offs_r[None, :], acc, mask=is_row[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    acc,
    x_ptrs,
    pool_ptr,
    units,  # [16] int64: where the ranks' rows of A start
    is_row,
    is_rank,
    k_start,
    k_end,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add some rows of x times sixteen rows of the pool, between two columns, to acc."""
    offs_k = tl.arange(0, BLOCK_K)
    starts = tl.multiple_of(units * (UNIT_BITS // pool_ptr.dtype.element_ty.primitive_bitwidth), 16)
    a_ptrs = pool_ptr + starts[None, :] + offs_k[:, None]
    for k in tl.range(k_start, k_end, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=is_row[:, None], other=0.0)
            a = tl.load(a_ptrs + k, mask=is_rank[None, :], other=0)
        else:
            # a row of the pool is padded with zeros up to a multiple of 16, not of BLOCK_K
            is_stored = k + offs_k < tl.multiple_of((K + 15) // 16 * 16, 16)
            x = tl.load(x_ptrs + k, mask=is_row[:, None] & (k + offs_k < K)[None, :], other=0.0)
            a = tl.load(a_ptrs + k, mask=is_rank[None, :] & is_stored[:, None], other=0)
        if WIDEN:  # noqa: SIM108 (one branch is compiled)
            acc = tl.dot(x.to(tl.float32), a.to(tl.float32), acc)
        else:
            acc = tl.dot(x, a.to(x.dtype), acc)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def look_up_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,  # [num_tokens] int64 or int32
    weights_ptr,  # the pool, as 16-bit numbers
    codes_ptr,  # the pool, as int8
    records_ptr,  # int32, the first layer's records: the first tile's
    plan_ptr,  # int32, the plan's buffer
    scratch_ptr,  # [items, 1, BLOCK_M, 16] float32
    stride_tile,  # from one tile's record to the next
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the buffer
    PERM_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    num_items = tl.load(plan_ptr + HEADER_AT)
    items_at = tl.load(plan_ptr + HEADER_AT + 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, 16)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item_ptr = plan_ptr + items_at + item * 4
        row0 = tl.load(item_ptr)
        num_rows = tl.load(item_ptr + 1)
        tile = tl.load(item_ptr + 2)
        kind = tl.load(item_ptr + 3)
        is_row = offs_m < num_rows
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        token_ids = tl.load(token_ids_ptr + rows, mask=is_row, other=0).to(tl.int64)
        record_ptr = records_ptr + tile.to(tl.int64) * stride_tile
        multiplier = tl.load(record_ptr + MULTIPLIERS + offs_r).to(tl.float32, bitcast=True)
        is_there = is_row[:, None] & (multiplier != 0.0)[None, :]
        units = tl.load(record_ptr + A_UNITS + offs_r).to(tl.int64)
        # a rank's numbers lie by token, so each of these is a read of its own: 32 bytes of traffic
        # for each rank of a row
        if kind == 0:
            starts = units * (UNIT_BITS // weights_ptr.dtype.element_ty.primitive_bitwidth)
            h = tl.load(weights_ptr + starts[None, :] + token_ids[:, None], mask=is_there, other=0.0).to(tl.float32)
        else:
            starts = units * (UNIT_BITS // codes_ptr.dtype.element_ty.primitive_bitwidth)
            h = tl.load(codes_ptr + starts[None, :] + token_ids[:, None], mask=is_there, other=0).to(tl.float32)
        out = scratch_ptr + item * (BLOCK_M * 16)
        tl.store(out + offs_m[:, None] * 16 + offs_r[None, :], h * multiplier[None, :], mask=is_row[:, None])
