"""Paged attention over the KV cache's blocks.

The rows are of many sequences, decode rows and prefill chunks mixed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import InvalidPlan, TensorMismatch

_MIN_PARALLEL_BYTES = 128 << 10
_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Plan of a step's attention. Built once a step, used by every layer.

    Attributes:
        query_starts: num_seqs + 1 numbers: sequence i has rows ``query_starts[i]:query_starts[i +
            1]``.
        context_lens: num_seqs numbers: cached tokens of the sequence, its own rows included.
        block_tables: [num_seqs, max_blocks] int32, contiguous.
        block_size: tokens of a block.
        table: [num_seqs, 3] int64, what the kernel reads of a sequence: row_start, num_rows,
            context_len.
        num_scores: keys that the longest context has, in whole blocks.
        num_pairs: rows times their contexts, summed: the step's work.
        num_blocks: one more than the last block that a table names.
    """

    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    block_size: int
    table: npt.NDArray[np.int64]
    num_scores: int
    num_pairs: int
    num_blocks: int


def make_attention_plan(
    query_starts: Sequence[int], context_lens: Sequence[int], block_tables: Tensor, block_size: int
) -> AttentionPlan:
    """Check a step's metadata once, and keep it in the form that `paged_attention` reads.

    Args:
        query_starts: num_seqs + 1 numbers, the first 0.
        context_lens: num_seqs numbers.
        block_tables: [num_seqs, max_blocks] int32 on the CPU.
        block_size: tokens of a block.

    Raises:
        InvalidPlan: a sequence without rows, with more rows than context, or with fewer blocks than
            its context takes.
    """
    if len(query_starts) != len(context_lens) + 1 or block_tables.shape[0] != len(context_lens):
        raise InvalidPlan(
            f"{len(query_starts)} query_starts and {block_tables.shape[0]} block tables for {len(context_lens)} "
            "sequences"
        )
    if block_tables.dtype != torch.int32:
        raise InvalidPlan(f"block_tables are {block_tables.dtype}; they must be int32")
    table = np.empty((len(context_lens), 3), dtype=np.int64)
    capacity, longest, num_pairs = block_tables.shape[1] * block_size, 0, 0
    for i, context_len in enumerate(context_lens):
        num_rows = query_starts[i + 1] - query_starts[i]
        if not 0 < num_rows <= context_len <= capacity:
            raise InvalidPlan(
                f"sequence {i} has {num_rows} rows, a context of {context_len} and {block_tables.shape[1]} blocks of "
                f"{block_size}"
            )
        table[i] = query_starts[i], num_rows, context_len
        longest, num_pairs = max(longest, context_len), num_pairs + num_rows * context_len
    num_scores = -(-longest // block_size) * block_size
    tables = block_tables.contiguous()
    first, last = int(tables.numpy().min()), int(tables.numpy().max())
    if first < 0:
        raise InvalidPlan(f"a block table names block {first}")
    return AttentionPlan(
        tuple(query_starts), tuple(context_lens), tables, block_size, table, num_scores, num_pairs, last + 1
    )


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each row's key and value to its slot of the cache.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: one layer's, [num_blocks, num_kv_heads, block_size, head_dim].
        slot_mapping: [num_tokens] int64, ``block * block_size + offset``.

    Raises:
        TensorMismatch: rows, heads and widths don't fit each other.
        InvalidPlan: a slot that the cache doesn't have; what else was to be written may have been.
    """
    num_tokens = slot_mapping.shape[0]
    if (
        k.shape != v.shape
        or k.shape != (num_tokens, k_cache.shape[1], k_cache.shape[3])
        or k_cache.shape != v_cache.shape
    ):
        raise TensorMismatch(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, the cache {tuple(k_cache.shape)} and {tuple(v_cache.shape)}, "
            f"for {num_tokens} slots"
        )
    if HAS_NUMBA and slot_mapping.is_contiguous() and _fits_kernel(k, k_cache, v_cache, v, _lanes()):
        _store_numba(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_torch(k, v, k_cache, v_cache, slot_mapping)


def store_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`store_kv` in PyTorch."""
    num_blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    if slot_mapping.numel() and not 0 <= int(slot_mapping.min()) <= int(slot_mapping.max()) < num_blocks * block_size:
        raise InvalidPlan(f"a slot isn't within the cache's {num_blocks} blocks of {block_size}")
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Write to `out` each row's causal attention over its sequence's cached keys.

    Every element of `out` is written. The rows of a sequence are its last ones: row j of m stands
    at position ``context_len - m + j`` and sees the positions up to its own; with `sliding_window`
    w, its own and the w − 1 before it. Slots past a context aren't used, whatever they hold.

    Args:
        q, out: [num_tokens, num_heads, head_dim] float32, contiguous in the last dim; num_heads is
            a multiple of num_kv_heads.
        k_cache, v_cache: one layer's, [num_blocks, num_kv_heads, block_size, head_dim] float32,
            contiguous in the last two dims.
        scale: what the products are multiplied with, usually head_dim ** -0.5.
        soft_cap: what the scaled products are softly kept below, above 0: ``soft_cap * tanh(score /
            soft_cap)``; None: they aren't.

    Raises:
        TensorMismatch: q, out, the cache and the plan don't fit each other.
    """
    num_tokens, num_heads, head_dim = q.shape
    if (
        out.shape != q.shape
        or num_tokens != plan.query_starts[-1]
        or k_cache.shape != v_cache.shape
        or k_cache.shape[2:] != (plan.block_size, head_dim)
        or num_heads % k_cache.shape[1]
        or plan.num_blocks > k_cache.shape[0]
    ):
        raise TensorMismatch(
            f"q is {tuple(q.shape)}, out {tuple(out.shape)}, the cache {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}; "
            f"this plan takes {plan.query_starts[-1]} rows and {plan.num_blocks} blocks of {plan.block_size} or more"
        )
    if HAS_NUMBA and _fits_kernel(q, k_cache, v_cache, out, plan.block_size):
        _attend_numba(q, k_cache, v_cache, plan, out, scale, sliding_window, soft_cap)
    else:
        attend_torch(q, k_cache, v_cache, plan, out, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)


def attend_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Compute `paged_attention` in PyTorch, gathered sequence by sequence.

    This serves dtypes and widths that the kernel doesn't take, and machines without numba.
    """
    for i, context_len in enumerate(plan.context_lens):
        start, end = plan.query_starts[i], plan.query_starts[i + 1]
        table = plan.block_tables[i, : -(-context_len // plan.block_size)].long()
        k = k_cache[table].transpose(0, 1).flatten(1, 2)[:, :context_len]
        v = v_cache[table].transpose(0, 1).flatten(1, 2)[:, :context_len]
        position = torch.arange(context_len - (end - start), context_len)[:, None]
        key = torch.arange(context_len)[None, :]
        visible = key <= position
        if sliding_window is not None:
            visible &= key > position - sliding_window
        if soft_cap is not None:
            group, head_dim = q.shape[1] // k.shape[0], q.shape[2]
            # [num_kv_heads, group * rows, head_dim]: the query heads of a key head side by side
            grouped = q[start:end].view(end - start, -1, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
            scores = (grouped @ k.transpose(1, 2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
            scores.masked_fill_(~visible.repeat(group, 1), float("-inf"))
            heads = (scores.softmax(-1) @ v).view(-1, group, end - start, head_dim)
            out[start:end] = heads.permute(2, 0, 1, 3).flatten(1, 2)
            continue
        result = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        out[start:end] = result[0].transpose(0, 1)


def warm_up() -> None:
    """Compile the kernels, or read them from numba's cache."""
    if HAS_NUMBA:
        _kernel()
        _store_kernel()


@functools.cache
def _kernel() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels.cpu.attention import kernel as attention_kernel

    handle = attention_kernel.compiled()
    return handle.ctypes, handle.address, handle


@functools.cache
def _store_kernel() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels.cpu.attention import store_kernel

    handle = store_kernel.compiled()
    return handle.ctypes, handle.address, handle


@functools.cache
def _lanes() -> int:
    from loraserve_kernels.cpu import simd

    return simd.LANES


def _fits_kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, block_size: int) -> bool:
    """Check whether everything is float32 in whole vectors, laid out as the kernel reads it."""
    head_dim = q.shape[2]
    return (
        all(
            t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(-1) == 1
            for t in (q, k_cache, v_cache, out)
        )
        and k_cache.stride(2) == v_cache.stride(2) == head_dim
        and head_dim % _lanes() == 0
        and block_size % _lanes() == 0
    )


def _attend_numba(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    from loraserve_kernels.cpu.attention import kernel as attention_kernel

    num_kv_heads, group = k_cache.shape[1], q.shape[1] // k_cache.shape[1]
    call, address, _ = _kernel()
    num_bytes = plan.num_pairs * num_kv_heads * q.shape[2] * 2 * 4
    num_threads = threads.num_threads() if num_bytes >= _MIN_PARALLEL_BYTES else 1
    # one slot behind a row's weights for their sum
    scratch_row = plan.num_scores + 1
    scratch = torch.empty(num_threads * attention_kernel.ROW_TILE * group * scratch_row)
    args = np.zeros(attention_kernel.NUM_WORDS, dtype=np.int64)
    args[attention_kernel.Q : attention_kernel.NUM_WORDS] = (
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        k_cache.data_ptr(),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.data_ptr(),
        v_cache.stride(0),
        v_cache.stride(1),
        plan.block_tables.data_ptr(),
        plan.block_tables.shape[1],
        plan.table.ctypes.data,
        len(plan.context_lens),
        num_kv_heads,
        group,
        q.shape[2],
        plan.block_size,
        _NO_WINDOW if sliding_window is None else sliding_window,
        scratch.data_ptr(),
        scratch_row,
        0,
        0,
    )
    args.view(np.float32)[2 * attention_kernel.SCALE] = scale
    args.view(np.float32)[2 * attention_kernel.SOFT_CAP] = 0.0 if soft_cap is None else soft_cap
    threads.run(call, address, args.ctypes.data, num_threads)


def _store_numba(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    from loraserve_kernels.cpu.attention import store_kernel

    call, address, _ = _store_kernel()
    num_tokens, num_heads, head_dim = k.shape
    args = np.zeros(store_kernel.NUM_WORDS, dtype=np.int64)
    args[store_kernel.K : store_kernel.NUM_WORDS] = (
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        slot_mapping.data_ptr(),
        num_tokens,
        k_cache.data_ptr(),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.data_ptr(),
        v_cache.stride(0),
        v_cache.stride(1),
        k_cache.shape[0],
        num_heads,
        k_cache.shape[2],
        head_dim,
    )
    num_bytes = 8 * num_tokens * num_heads * head_dim
    threads.run(call, address, args.ctypes.data, threads.num_threads() if num_bytes >= _MIN_PARALLEL_BYTES else 1)
    if args[store_kernel.OUTSIDE]:
        raise InvalidPlan(
            f"{args[store_kernel.OUTSIDE]} slots aren't within the cache's {k_cache.shape[0]} blocks of "
            f"{k_cache.shape[2]}"
        )
