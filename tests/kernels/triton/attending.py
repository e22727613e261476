"""A step's attention on the GPU's kernels, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels import reference
from loraserve_kernels.gpu.attention import paged as gpu_attention
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan

SCALE = 0.3


@dataclass
class Attending:
    """q and out lie inside wider tensors full of NaN.

    Slots of the cache that no sequence uses are NaN, and so are the arena's bytes between blocks,
    out, the plan's scratch memory and the queries of rows without context.
    """

    plan: GpuAttentionPlan
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    wide_out: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor

    def run(self, sliding_window: int | None = None, soft_cap: float | None = None) -> Tensor:
        gpu_attention.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.plan,
            self.out,
            scale=SCALE,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return self.out

    def expected(self, sliding_window: int | None = None, soft_cap: float | None = None) -> Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for i, context in enumerate(self.context_lens):
            rows = slice(self.query_starts[i], self.query_starts[i + 1])
            if context and rows.stop > rows.start:
                out[rows] = reference.paged_attention(
                    self.q[rows].double(),
                    self.k_cache.double(),
                    self.v_cache.double(),
                    [0, rows.stop - rows.start],
                    [context],
                    self.block_tables[i : i + 1],
                    scale=SCALE,
                    sliding_window=sliding_window,
                    soft_cap=soft_cap,
                )
        return out

    def is_right(self, sliding_window: int | None = None, soft_cap: float | None = None) -> bool:
        """Every row is within a rounding of the output, and nothing beside out is written (the
        interpreter truncates to bf16).
        """
        out, expected = self.run(sliding_window, soft_cap), self.expected(sliding_window, soft_cap)
        error = (out.double() - expected).abs().max()
        is_near = bool(error <= torch.finfo(out.dtype).eps * expected.abs().max())
        return is_near and int(self.wide_out.isfinite().sum()) == out.numel()


def make_attending(
    num_rows: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    max_model_len: int = 1024,
) -> Attending:
    counts = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(counts) + 2
    # two layers' keys and values side by side in each page: this layer's are its second quarter and
    # its last
    arena = torch.full((num_blocks, 4, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    k_cache, v_cache = arena[:, 1], arena[:, 3]
    order = torch.randperm(num_blocks - 2).int() + 1
    # numbers past a context's blocks name one that is NaN throughout, and so is block 0, where
    # masked numbers would lead
    tables = torch.full((len(counts), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
    used = 0
    for i, (count, context) in enumerate(zip(counts, context_lens, strict=True)):
        tables[i, :count] = order[used : used + count]
        used += count
        for cache in (k_cache, v_cache):
            for block in range(count):
                size = min(block_size, context - block * block_size)
                cache[tables[i, block], :, :size] = torch.randn(num_kv_heads, size, head_dim).to(dtype)
    starts = [0, *np.cumsum(num_rows).tolist()]
    plan = GpuAttentionPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_num_tokens=256,
        max_num_seqs=12,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
    )
    plan.buffer.fill_(1)
    plan.partials.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    plan.fill(np.array(starts, dtype=np.int32), np.array(context_lens, dtype=np.int32), tables.numpy())
    wide_q, wide_out = (
        torch.full((starts[-1] + 2, 2 * num_heads + 3, head_dim), float("nan"), dtype=dtype) for _ in range(2)
    )
    q, out = wide_q[:-2, 2 : 2 + num_heads], wide_out[:-2, 1 : 1 + num_heads]
    q.copy_(torch.randn(q.shape))
    for i, context in enumerate(context_lens):
        if context == 0:
            q[starts[i] : starts[i + 1]] = float("nan")
    return Attending(plan, q, k_cache, v_cache, out, wide_out, starts, list(context_lens), tables)
