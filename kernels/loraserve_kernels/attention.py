"""Paged attention on the CPU: rows of many sequences, decode rows and prefill chunks mixed, straight from the KV cache's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve_kernels.errors import InvalidPlan


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who attends to what in one step. Built once a step, used by every layer.

    Attributes:
        query_starts: num_seqs + 1 numbers: sequence i has rows ``query_starts[i]:query_starts[i + 1]``.
        context_lens: num_seqs numbers: cached tokens of the sequence, its own rows included.
        block_tables: [num_seqs, max_blocks] int32.
        block_size: tokens of a block.
    """

    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    block_size: int


def make_attention_plan(
    query_starts: Sequence[int], context_lens: Sequence[int], block_tables: Tensor, block_size: int
) -> AttentionPlan:
    """Check a step's metadata once, and keep it in the form that `paged_attention` reads.

    Raises:
        InvalidPlan: a sequence without rows, with more rows than context, or with fewer blocks than its context takes.
    """
    if len(query_starts) != len(context_lens) + 1 or block_tables.shape[0] != len(context_lens):
        raise InvalidPlan(
            f"{len(query_starts)} query_starts and {block_tables.shape[0]} block tables for {len(context_lens)} sequences"
        )
    for i, context_len in enumerate(context_lens):
        num_rows = query_starts[i + 1] - query_starts[i]
        if not 0 < num_rows <= context_len <= block_tables.shape[1] * block_size:
            raise InvalidPlan(
                f"sequence {i} has {num_rows} rows, a context of {context_len} and {block_tables.shape[1]} blocks of {block_size}"
            )
    return AttentionPlan(tuple(query_starts), tuple(context_lens), block_tables, block_size)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each row's key and value to its slot of the cache.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: one layer's, [num_blocks, num_kv_heads, block_size, head_dim].
        slot_mapping: [num_tokens] int64, ``block * block_size + offset``.
    """
    block_size = k_cache.shape[2]
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
) -> None:
    """Write to `out` each row's causal attention over its sequence's cached keys; every element of `out` is written.

    The rows of a sequence are its last ones: row j of m stands at position ``context_len - m + j`` and sees the positions up to its own; with
    `sliding_window` w, its own and the w − 1 before it. Slots past a context aren't used, whatever they hold.

    Args:
        q, out: [num_tokens, num_heads, head_dim] float32; num_heads is a multiple of num_kv_heads.
        k_cache, v_cache: one layer's, [num_blocks, num_kv_heads, block_size, head_dim].
        scale: what the products are multiplied with, usually head_dim ** -0.5.
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
        result = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        out[start:end] = result[0].transpose(0, 1)
