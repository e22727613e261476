"""Shrink: each row's sums with sixteen ranks of its adapter's A, into scratch memory. A Triton kernel.

A fixed grid of programs takes work items until the device-side count is reached. K is cut into `SPLIT_K` parts, each with a plane of its own in
the item's scratch: no atomics, nothing to clear first, and the order of additions depends on K alone. All sixteen columns of a row are written,
zero where there is no rank, so that expand reads them without masks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_tokens, K], bf16 or fp16
    pool_ptr,  # the pool's data: bf16, fp16 or int8
    units_ptr,  # int32, this layer's row of the pool's a_units
    multipliers_ptr,  # float32, this layer's row of the pool's multipliers
    plan_ptr,  # int32, the plan's buffer
    scratch_ptr,  # [items, SPLIT_K, BLOCK_M, 16] float32
    K,
    stride_x,
    stride_pool,  # elements from one rank's row to the next
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
    items_at = tl.multiple_of(tl.load(plan_ptr + HEADER_AT + 1), 16)
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
        is_row = offs_m < num_rows
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        multiplier = tl.load(multipliers_ptr + tile * 16 + offs_r)
        is_rank = multiplier != 0.0
        block = tl.load(units_ptr + tile * 2 + offs_r // 8).to(tl.int64) * 16
        starts = tl.multiple_of(block + (offs_r % 8) * tl.multiple_of(stride_pool, 16), 16)
        x_ptrs = x_ptr + rows[:, None] * stride_x + offs_k[None, :]
        a_ptrs = pool_ptr + starts[None, :] + offs_k[:, None]
        acc = tl.full((BLOCK_M, 16), 0.0, dtype=tl.float32)
        k_end = tl.minimum(plane * part + part, K)
        for k in tl.range(plane * part, k_end, BLOCK_K, num_stages=NUM_STAGES):
            if EVEN_K:
                x = tl.load(x_ptrs + k, mask=is_row[:, None], other=0.0)
                a = tl.load(a_ptrs + k, mask=is_rank[None, :], other=0)
            else:
                # rows of the pool go on with zeros up to a multiple of 16, not of BLOCK_K
                x = tl.load(x_ptrs + k, mask=is_row[:, None] & (k + offs_k < K)[None, :], other=0.0)
                a = tl.load(a_ptrs + k, mask=is_rank[None, :] & (k + offs_k < stride_pool)[:, None], other=0)
            if WIDEN:  # noqa: SIM108 (one branch is compiled)
                acc = tl.dot(x.to(tl.float32), a.to(tl.float32), acc)
            else:
                acc = tl.dot(x, a.to(x.dtype), acc)
        acc = acc * multiplier[None, :]
        out = scratch_ptr + (item.to(tl.int64) * SPLIT_K + plane) * (BLOCK_M * 16)
        tl.store(out + offs_m[:, None] * 16 + offs_r[None, :], acc, mask=is_row[:, None])
