"""Operations between the linears, as Triton kernels.

A program works on one token's row, or on a part of it, in float32, and rounds once at the end. No
program reads another row's data and no sum's order depends on how many rows there are: a row's bits
don't depend on what shares its step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def embed_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [num_tokens] int32 or int64
    table_ptr,  # [vocab_size, size]
    out_ptr,  # [num_tokens, size] float32
    stride_table,
    stride_out,
    vocab_size,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # NaN rather than a fault or another token's row: sampling reports the row, and it alone
    readable = tl.where((token >= 0) & (token < vocab_size), size, 0)
    x = tl.load(table_ptr + token * stride_table + columns, mask=columns < readable, other=float("nan"))
    tl.store(out_ptr + row * stride_out + columns, x.to(tl.float32), mask=columns < size)


@triton.jit  # type: ignore[untyped-decorator]
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr,  # [num_tokens, size] float32, in place
    delta_ptr,  # [num_tokens, size] bf16 or fp16; not read unless HAS_DELTA
    weight_ptr,  # [size] float32; not read unless HAS_NORM
    delta_weight_ptr,  # [size] float32; not read unless HAS_DELTA_NORM
    out_ptr,  # [num_tokens, size] bf16 or fp16
    stride_hidden,
    stride_delta,
    stride_out,
    size,
    eps,
    delta_scale,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,  # a whole row
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    x = tl.load(hidden_ptr + row * stride_hidden + columns, mask=is_column, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * stride_delta + columns, mask=is_column, other=0.0).to(tl.float32)
        if HAS_DELTA_NORM:
            delta *= tl.rsqrt(eps + tl.sum(delta * delta, axis=0) / size)
            delta *= tl.load(delta_weight_ptr + columns, mask=is_column, other=0.0)
        # times one is exact, also where the sum is fused with it
        x += delta * delta_scale
        tl.store(hidden_ptr + row * stride_hidden + columns, x, mask=is_column)
    y = x
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
        y = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight
    tl.store(out_ptr + row * stride_out + columns, y.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def norm_in_place_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [num_tokens, size] bf16 or fp16
    weight_ptr,  # [size] float32
    stride_x,
    size,
    eps,
    BLOCK: tl.constexpr,  # a whole row
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * stride_x + columns
    x = tl.load(ptrs, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    x *= tl.rsqrt(eps + tl.sum(x * x, axis=0) / size)
    tl.store(ptrs, (x * weight).to(x_ptr.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] bf16 or fp16; queries in place
    positions_ptr,  # [num_tokens] int32 or int64
    cos_sin_ptr,  # [max_len, ROTATED] float32, cosines first; not read unless ROTATES
    slots_ptr,  # [num_tokens] int64
    k_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    v_ptr,
    q_norm_ptr,  # [HEAD_DIM] float32; not read unless HAS_NORM
    k_norm_ptr,
    stride_qkv,
    stride_block,  # of both caches
    stride_head,
    stride_slot,
    max_len,
    num_slots,
    num_heads,
    num_kv_heads,
    eps,
    HAS_NORM: tl.constexpr,
    IS_NORM_LAST: tl.constexpr,  # heads are turned before they're normed
    ROTATES: tl.constexpr,
    ROTATED: tl.constexpr,  # elements of a head that turn
    IS_INTERLEAVED: tl.constexpr,  # neighbours turn together
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # columns of half a head
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_PAIRS: tl.constexpr = ROTATED // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    is_column = columns < HALF
    is_rotated = heads < num_heads + num_kv_heads
    is_q = heads < num_heads
    # a pair's elements in its head; the last pairs may stay as they are
    if IS_INTERLEAVED:
        at_first = 2 * columns
        at_second = at_first + 1
    elif ROTATED == HEAD_DIM:
        at_first = columns
        at_second = HALF + columns
    else:
        at_first = tl.where(columns < NUM_PAIRS, columns, columns + NUM_PAIRS)
        at_second = at_first + tl.where(columns < NUM_PAIRS, NUM_PAIRS, HALF - NUM_PAIRS)
    is_element = (heads < num_heads + 2 * num_kv_heads)[:, None] & is_column[None, :]

    head_ptrs = qkv_ptr + row * stride_qkv + heads[:, None] * HEAD_DIM
    first = tl.load(head_ptrs + at_first[None, :], mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(head_ptrs + at_second[None, :], mask=is_element, other=0.0).to(tl.float32)
    a, b = first, second
    if HAS_NORM:
        q_first = tl.load(q_norm_ptr + at_first, mask=is_column, other=0.0)[None, :]
        q_second = tl.load(q_norm_ptr + at_second, mask=is_column, other=0.0)[None, :]
        k_first = tl.load(k_norm_ptr + at_first, mask=is_column, other=0.0)[None, :]
        k_second = tl.load(k_norm_ptr + at_second, mask=is_column, other=0.0)[None, :]
    if HAS_NORM and not IS_NORM_LAST:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = first * scale * tl.where(is_q[:, None], q_first, k_first)
        b = second * scale * tl.where(is_q[:, None], q_second, k_second)
    if ROTATES:
        position = tl.load(positions_ptr + row)
        # a position that the table doesn't have makes NaN, which sampling reports, rather than a
        # fault
        is_angle = columns < tl.where((position >= 0) & (position < max_len), NUM_PAIRS, 0)
        angles_ptrs = cos_sin_ptr + position.to(tl.int64) * ROTATED + columns
        is_turned = columns < NUM_PAIRS
        cos = tl.where(is_turned, tl.load(angles_ptrs, mask=is_angle, other=float("nan")), 1.0)[None, :]
        sin = tl.where(is_turned, tl.load(angles_ptrs + NUM_PAIRS, mask=is_angle, other=float("nan")), 0.0)[None, :]
        a, b = a * cos - b * sin, b * cos + a * sin
    if HAS_NORM and IS_NORM_LAST:
        # the table's cosines and sines may be longer than 1
        squares = tl.sum(a * a + b * b, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = a * scale * tl.where(is_q[:, None], q_first, k_first)
        b = b * scale * tl.where(is_q[:, None], q_second, k_second)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first = tl.where(is_rotated[:, None], a, first).to(dtype)
    second = tl.where(is_rotated[:, None], b, second).to(dtype)

    to_q = is_q[:, None] & is_column[None, :]
    tl.store(head_ptrs + at_first[None, :], first, mask=to_q)
    tl.store(head_ptrs + at_second[None, :], second, mask=to_q)
    slot = tl.load(slots_ptr + row)
    num_stored = tl.where((slot >= 0) & (slot < num_slots), num_kv_heads, 0)
    # slots fit 32 bits, where dividing is cheap; offsets in a pool of pages may not
    block = slot.to(tl.int32) // BLOCK_SIZE
    base = block.to(tl.int64) * stride_block + (slot.to(tl.int32) % BLOCK_SIZE) * stride_slot
    k_heads = heads - num_heads
    k_ptrs = k_ptr + base + (k_heads * stride_head)[:, None]
    to_k = ((k_heads >= 0) & (k_heads < num_stored))[:, None] & is_column[None, :]
    tl.store(k_ptrs + at_first[None, :], first, mask=to_k)
    tl.store(k_ptrs + at_second[None, :], second, mask=to_k)
    v_heads = k_heads - num_kv_heads
    v_ptrs = v_ptr + base + (v_heads * stride_head)[:, None]
    to_v = ((v_heads >= 0) & (v_heads < num_stored))[:, None] & is_column[None, :]
    tl.store(v_ptrs + at_first[None, :], first, mask=to_v)
    tl.store(v_ptrs + at_second[None, :], second, mask=to_v)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [num_tokens, 2 * size] bf16 or fp16
    out_ptr,  # [num_tokens, size]
    stride_gate_up,
    stride_out,
    size,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate_ptrs = gate_up_ptr + row * stride_gate_up + columns
    gate = tl.load(gate_ptrs, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=is_column, other=0.0).to(tl.float32)
    x = gate
    if GELU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = gate / (1.0 + tl.exp(-x)) * up
    tl.store(out_ptr + row * stride_out + columns, y.to(out_ptr.dtype.element_ty), mask=is_column)
