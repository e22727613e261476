"""Rows that an adapter has in the place of the base's, of the head and of the embedding.

Two Triton kernels, launched before LoRA's.

Each takes its work from the step's row tiles: sixteen replaced rows at a time for the head, a run
of columns for the embedding. The plan says how many pieces of work there are (see `gpu_plan`);
where no adapter of the step replaces a row that is none, and the launch ends at once. A row of the
step meets its own adapter's rows alone, in one order, and nothing is added atomically: its bits
don't depend on what shares the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.lora import plan as gpu_plan
from loraserve_kernels.gpu.lora.shrink import products
from loraserve_kernels.gpu.paged import layout as paged_layout

RECORD = tl.constexpr(paged_layout.RECORD)
A_UNITS = tl.constexpr(paged_layout.A_UNITS)
IDS = tl.constexpr(paged_layout.B_UNITS)
MULTIPLIERS = tl.constexpr(paged_layout.MULTIPLIERS)
UNIT_BITS = tl.constexpr(8 * paged_layout.UNIT_BYTES)
NUM_REPLACED = tl.constexpr(paged_layout.NUM_REPLACED)
FIRST_TILE = tl.constexpr(paged_layout.REPLACED_TILE)
FIRST_WORK = tl.constexpr(paged_layout.REPLACED_WORK)
GROUP = tl.constexpr(paged_layout.REPLACED_GROUP)
NO_WORK = tl.constexpr(gpu_plan.NO_WORK)
TILES_AT_ONCE = tl.constexpr(64)


@triton.jit  # type: ignore[untyped-decorator]
def replace_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_tokens, K], bf16 or fp16
    weights_ptr,  # the pool, as numbers of x's dtype
    codes_ptr,  # the pool, as int8
    records_ptr,  # int32, the first layer's records: the first tile's
    plan_ptr,  # int32, the plan's buffer
    y_ptr,  # [num_tokens, N], the dtype of the weights or float32
    bias_ptr,  # [N], or None
    K,
    stride_x,
    stride_y,
    stride_tile,  # from one tile's first record to the next's
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the buffer
    WORKS_AT: tl.constexpr,  # where its pieces of work are counted
    PERM_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    num_works = tl.load(plan_ptr + WORKS_AT)
    num_row_tiles = tl.load(plan_ptr + HEADER_AT + 2)
    tiles_at = tl.multiple_of(tl.load(plan_ptr + HEADER_AT + 3), 16)
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, 16)
    offs_k = tl.arange(0, BLOCK_K)
    offs_t = tl.arange(0, TILES_AT_ONCE)
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        # its group is the last whose work starts here or before: one without work starts where the
        # next does
        group = 0
        for first in range(0, num_row_tiles, TILES_AT_ONCE):
            first_work_ptrs = plan_ptr + tiles_at + (first + offs_t) * 16 + FIRST_WORK
            first_works = tl.load(first_work_ptrs, mask=first + offs_t < num_row_tiles, other=NO_WORK)
            group = tl.maximum(group, tl.max(tl.where(first_works <= work, first + offs_t, 0), axis=0))
        group_ptr = plan_ptr + tiles_at + group * 16
        piece = work - tl.load(group_ptr + FIRST_WORK)
        group_size = tl.load(group_ptr + GROUP)
        tile_ptr = group_ptr + piece % group_size * 16
        row0 = tl.load(tile_ptr)
        num_rows = tl.load(tile_ptr + 1)
        kind = tl.load(tile_ptr + 2)
        first_tile = tl.load(tile_ptr + FIRST_TILE)
        is_row = offs_m < num_rows
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        record_ptr = records_ptr + first_tile.to(tl.int64) * stride_tile + piece // group_size * RECORD
        multiplier = tl.load(record_ptr + MULTIPLIERS + offs_r).to(tl.float32, bitcast=True)
        is_replaced = multiplier != 0.0
        units = tl.load(record_ptr + A_UNITS + offs_r).to(tl.int64)
        ids = tl.load(record_ptr + IDS + offs_r)
        x_ptrs = x_ptr + rows[:, None] * stride_x + offs_k[None, :]
        acc = tl.full((BLOCK_M, 16), 0.0, dtype=tl.float32)
        if kind == 0:
            acc = products(
                acc, x_ptrs, weights_ptr, units, is_row, is_replaced, 0, K, K, BLOCK_K, EVEN_K, NUM_STAGES, WIDEN
            )
        else:
            acc = products(
                acc, x_ptrs, codes_ptr, units, is_row, is_replaced, 0, K, K, BLOCK_K, EVEN_K, NUM_STAGES, WIDEN
            )
        acc = acc * multiplier[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + ids, mask=is_replaced, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + rows[:, None] * stride_y + ids[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_replaced[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def replace_embedding_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,  # [num_tokens] int64 or int32
    weights_ptr,  # the pool, as 16-bit numbers
    codes_ptr,  # the pool, as int8
    records_ptr,  # int32, the first layer's records: the first tile's
    plan_ptr,  # int32, the plan's buffer
    y_ptr,  # [num_tokens, N], the dtype of the weights or float32
    N,
    stride_y,
    stride_tile,  # from one tile's first record to the next's
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the buffer
    WORKS_AT: tl.constexpr,  # where its pieces of work are counted
    PERM_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,  # columns of a piece of work here, a multiple of BLOCK_N
):
    num_row_tiles = tl.load(plan_ptr + HEADER_AT + 2)
    if tl.load(plan_ptr + WORKS_AT) == 0:
        num_row_tiles = 0
    tiles_at = tl.multiple_of(tl.load(plan_ptr + HEADER_AT + 3), 16)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    num_chunks = (N + CHUNK_N - 1) // CHUNK_N
    for work in range(tl.program_id(0), num_row_tiles * num_chunks, tl.num_programs(0)):
        tile_ptr = plan_ptr + tiles_at + (work // num_chunks) * 16
        row0 = tl.load(tile_ptr)
        kind = tl.load(tile_ptr + 2)
        num_replaced = tl.load(tile_ptr + NUM_REPLACED)
        first_tile = tl.load(tile_ptr + FIRST_TILE)
        is_row = offs_m < tl.where(num_replaced > 0, tl.load(tile_ptr + 1), 0)
        rows = tl.load(plan_ptr + PERM_AT + row0 + offs_m, mask=is_row, other=0).to(tl.int64)
        tokens = tl.load(token_ids_ptr + rows, mask=is_row, other=0).to(tl.int32)
        first_record = records_ptr + first_tile.to(tl.int64) * stride_tile
        # ids ascend, so a token's isn't behind its own number, and stands there if all before are
        # replaced too
        high = tl.where(is_row, tl.minimum(tokens + 1, num_replaced), 0)
        last = tl.maximum(high - 1, 0)
        is_last = tl.load(first_record + last // 16 * RECORD + IDS + last % 16, mask=is_row, other=-1) == tokens
        low = tl.where(is_last, last, 0)
        while tl.max(high - low, axis=0) > 1:
            middle = (low + high) // 2
            ids = tl.load(first_record + middle // 16 * RECORD + IDS + middle % 16, mask=is_row, other=0)
            low = tl.where(ids <= tokens, middle, low)
            high = tl.where(ids <= tokens, high, middle)
        record_ptrs = first_record + low // 16 * RECORD + low % 16
        is_there = tl.load(record_ptrs + IDS, mask=is_row, other=-1) == tokens
        units = tl.load(record_ptrs + A_UNITS, mask=is_there, other=0).to(tl.int64)
        multiplier = tl.load(record_ptrs + MULTIPLIERS, mask=is_there, other=0).to(tl.float32, bitcast=True)
        start_n = work % num_chunks * CHUNK_N
        for n in range(start_n, tl.minimum(start_n + CHUNK_N, N), BLOCK_N):
            # a row of the pool is padded with zeros up to a multiple of 16, so that this mask is
            # the same for 16 neighbours
            is_stored = is_there[:, None] & (n + offs_n < tl.multiple_of((N + 15) // 16 * 16, 16))[None, :]
            if kind == 0:
                starts = tl.multiple_of(units * (UNIT_BITS // weights_ptr.dtype.element_ty.primitive_bitwidth), 16)
                numbers = tl.load(weights_ptr + starts[:, None] + (n + offs_n)[None, :], mask=is_stored, other=0.0)
                values = numbers.to(tl.float32)
            else:
                starts = tl.multiple_of(units * (UNIT_BITS // codes_ptr.dtype.element_ty.primitive_bitwidth), 16)
                codes = tl.load(codes_ptr + starts[:, None] + (n + offs_n)[None, :], mask=is_stored, other=0)
                values = codes.to(tl.float32)
            values = values * multiplier[:, None]
            y_ptrs = y_ptr + rows[:, None] * stride_y + (n + offs_n)[None, :]
            tl.store(y_ptrs, values.to(y_ptr.dtype.element_ty), mask=is_there[:, None] & (n + offs_n < N)[None, :])
