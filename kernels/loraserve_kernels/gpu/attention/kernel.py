"""Paged attention: rows over the cached keys of their sequence.

A second kernel sums over the splits of a row's keys. Triton kernels.

A fixed grid of programs takes (item, group of query heads) pairs until the device-side count is
reached. The query heads that share a KV head are rows of one tile, so that a key is read once for
all of them. Tiles of keys start at multiples of `BLOCK_N`, and a tile that a row sees nothing of
leaves its sums as they are: a row's bits depend on its position and on the number of splits alone.
The interpreter shows no races; nor is this measured on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], bf16 or fp16
    k_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], the same
    v_ptr,
    plan_ptr,  # int32, the plan's buffer
    partials_ptr,  # [items, num_heads, HEAD_DIM] float32
    lse_ptr,  # [items, num_heads] float32
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], q's dtype
    scale,  # times log2(e); where HAS_CAP, divided by the cap, times 2 log2(e)
    cap,  # times log2(e)
    window,  # keys that a row sees at most, its own included
    stride_q,  # elements from one token to the next; heads of q and out lie side by side
    stride_out,
    stride_k_block,
    stride_v_block,
    num_kv_heads,
    CHUNKS: tl.constexpr,  # items are tiles of chunks' rows; or each a split of the keys of one row
    # where the plan's header counts the items of the second kind, which come first
    NUM_DECODE_ITEMS: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    ITEMS_AT: tl.constexpr,
    TABLES_AT: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # of them in one tile
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the next power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,  # scores are cap * tanh(score / cap)
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    first = 0
    num_items = tl.load(plan_ptr + NUM_DECODE_ITEMS)
    if CHUNKS:
        first = num_items
        num_items = tl.load(plan_ptr + NUM_ITEMS) - first
    items_at = tl.multiple_of(tl.load(plan_ptr + ITEMS_AT), 16)
    tables_at = tl.load(plan_ptr + TABLES_AT)
    table_width = tl.load(plan_ptr + TABLE_WIDTH)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    num_head_tiles = num_kv_heads * HEAD_TILES
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < HEAD_DIM
    for work in range(tl.program_id(0), num_items * num_head_tiles, tl.num_programs(0)):
        item = first + work // num_head_tiles
        kv_head = work % num_head_tiles // HEAD_TILES
        item_ptr = plan_ptr + items_at + item * 8
        row0 = tl.load(item_ptr)
        num_rows = tl.load(item_ptr + 1)
        position0 = tl.load(item_ptr + 2)
        table_ptr = plan_ptr + tables_at + tl.load(item_ptr + 3) * table_width

        # a tile's rows are the group's heads of its first token, then of the next
        head = work % HEAD_TILES * HEADS + offs_m % HEADS
        is_row = (offs_m // HEADS < num_rows) & (head < GROUP)
        head += kv_head * GROUP
        position = position0
        if CHUNKS:
            position += offs_m // HEADS
        q_tile = q_ptr + row0.to(tl.int64) * stride_q
        q_at = offs_m // HEADS * stride_q + head * HEAD_DIM
        q = tl.load(q_tile + (q_at[:, None] + offs_d[None, :]), mask=is_row[:, None] & is_d[None, :], other=0.0)

        # the keys that any of the rows sees, from a multiple of BLOCK_N on
        key_begin = tl.maximum(position0 - window + 1, 0) // BLOCK_N * BLOCK_N
        key_end = position0 + num_rows
        num_splits = 1
        if not CHUNKS:
            split = tl.load(item_ptr + 4)
            num_splits = tl.load(item_ptr + 5)
            part = (key_end - key_begin + num_splits * BLOCK_N - 1) // (num_splits * BLOCK_N) * BLOCK_N
            key_begin += split * part
            key_end = tl.minimum(key_begin + part, key_end)
        highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
        acc = tl.full((BLOCK_M, BLOCK_D), 0.0, dtype=tl.float32)
        # a tile's blocks are looked up one tile ahead, so that its keys and values can be fetched
        # several tiles ahead
        key = key_begin + offs_n
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < key_end, other=0)
        for key0 in tl.range(key_begin, key_end, BLOCK_N, num_stages=NUM_STAGES):
            key = key0 + offs_n
            is_key = key < key_end
            in_block = (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            # nothing past the context is read: a value may be NaN there, and NaN times a weight of
            # zero isn't zero
            k_at = block.to(tl.int64) * stride_k_block + in_block
            k = tl.load(k_ptr + (k_at[None, :] + offs_d[:, None]), mask=is_d[:, None] & is_key[None, :], other=0.0)
            v_at = block.to(tl.int64) * stride_v_block + in_block
            v = tl.load(v_ptr + (v_at[:, None] + offs_d[None, :]), mask=is_key[:, None] & is_d[None, :], other=0.0)
            block = tl.load(table_ptr + (key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < key_end, other=0)
            if WIDEN:  # noqa: SIM108 (one branch is compiled)
                scores = tl.dot(q.to(tl.float32), k.to(tl.float32)) * scale
            else:
                scores = tl.dot(q, k) * scale
            if HAS_CAP:
                # tanh(x) = 1 - 2 / (e^2x + 1)
                scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
            if CHUNKS:
                is_seen = (key[None, :] <= position[:, None]) & (key[None, :] > (position - window)[:, None])
            else:
                is_seen = (is_key & (key > position - window))[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # a row that has seen nothing yet has no highest score to take away
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - base[:, None])
            shrunk = tl.exp2(highest - base)
            total = total * shrunk + tl.sum(weights, 1)
            acc = acc * shrunk[:, None]
            if WIDEN:  # noqa: SIM108
                acc = tl.dot(weights, v.to(tl.float32), acc)
            else:
                acc = tl.dot(weights.to(v.dtype), v, acc)
            highest = new_highest

        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_tile = out_ptr + row0.to(tl.int64) * stride_out
        out_at = offs_m // HEADS * stride_out + head * HEAD_DIM
        is_output = is_row[:, None] & is_d[None, :]
        if num_splits == 1:
            tl.store(out_tile + (out_at[:, None] + offs_d[None, :]), acc.to(out_ptr.dtype.element_ty), mask=is_output)
        else:
            first_head = item.to(tl.int64) * (num_kv_heads * GROUP)
            partial_tile = partials_ptr + first_head * HEAD_DIM
            tl.store(partial_tile + (head[:, None] * HEAD_DIM + offs_d[None, :]), acc, mask=is_output)
            # a split without keys counts for nothing
            lse = tl.where(total > 0.0, highest + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
            tl.store(lse_ptr + first_head + head, lse, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    plan_ptr,  # int32, the plan's buffer
    partials_ptr,  # [items, num_heads, HEAD_DIM] float32
    lse_ptr,  # [items, num_heads] float32
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    stride_out,
    num_heads,
    ROWS_AT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits at a time
):
    row_ptr = plan_ptr + tl.multiple_of(tl.load(plan_ptr + ROWS_AT), 4) + tl.program_id(0) * 4
    head = tl.program_id(1)
    row0 = tl.load(row_ptr)
    first_item = tl.load(row_ptr + 1)
    num_splits = tl.load(row_ptr + 2)
    # a row with one split has its answer already, one without context gets zeros
    if num_splits != 1:
        offs_d = tl.arange(0, BLOCK_D)
        offs_s = tl.arange(0, MAX_SPLITS)
        is_d = offs_d < HEAD_DIM
        at = first_item.to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + at + offs_s * num_heads, mask=offs_s < num_splits, other=float("-inf"))
        highest = tl.max(lse, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp2(lse - highest), 0)
        acc = tl.full((BLOCK_D,), 0.0, dtype=tl.float32)
        for split0 in range(0, num_splits, BLOCK_S):
            split = split0 + tl.arange(0, BLOCK_S)
            is_split = split < num_splits
            some = at + split * num_heads
            weights = tl.exp2(tl.load(lse_ptr + some, mask=is_split, other=float("-inf")) - highest)
            parts = tl.load(
                partials_ptr + some[:, None] * HEAD_DIM + offs_d[None, :],
                mask=is_split[:, None] & is_d[None, :],
                other=0.0,
            )
            acc += tl.sum(weights[:, None] * parts, 0)
        acc = acc / tl.where(total > 0.0, total, 1.0)
        out_at = row0.to(tl.int64) * stride_out + head * HEAD_DIM
        tl.store(out_ptr + out_at + offs_d, acc.to(out_ptr.dtype.element_ty), mask=is_d)
