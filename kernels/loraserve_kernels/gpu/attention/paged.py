"""Paged attention on a GPU: decode rows and prefill chunks in one call.

Needs Triton; nothing that runs on a CPU imports this module.

With ``TRITON_INTERPRET=1`` in the environment before Triton's first import, `paged_attention` runs
the kernels on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.attention.kernel import attend_kernel, combine_kernel
from loraserve_kernels.gpu.attention.plan import (
    CHUNK_BLOCK_M,
    ITEMS_AT,
    NUM_DECODE_ITEMS,
    NUM_ITEMS,
    ROWS_AT,
    TABLE_WIDTH,
    TABLES_AT,
    GpuAttentionPlan,
)
from loraserve_kernels.gpu.device import INTERPRETED, num_programs
from loraserve_kernels.gpu.tuning import tuned

NO_WINDOW = 1 << 30
MAX_CHUNK_REGISTERS = 255
"""Registers of a thread, at their maximum: two programs of four warps then fill an SM."""
COMBINE_WARPS = 2
COMBINE_SPLITS = 16
"""Number of a row's splits that are loaded at a time."""


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """Tile sizes of the kernel for a head_dim.

    Chosen by reasoning about bytes in flight and by reading compiled code; not measured.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers of a thread; None: as many as the compiler takes. Left alone, ptxas 12.8 takes 168
    for a chunk's rows on sm_80, and keeps two numbers in memory.
    """


def decode_config(head_dim: int, group: int) -> AttendConfig:
    """Choose the tiles for sequences of a single row.

    They have 16 query heads, 32 where a group is larger, and 8 KiB of keys at a time, two times
    ahead: with 16 heads of up to 128 four programs fit on a multiprocessor of either generation.
    """
    keys = max(16, min(64, 4096 // triton.next_power_of_2(head_dim)))
    config = AttendConfig(16 if group <= 16 else 32, keys, 4, 3)
    return tuned("attend_decode", f"{head_dim}/{group}", config)


def chunk_config(head_dim: int, group: int) -> AttendConfig:
    """Choose the tiles for a chunk's rows.

    They have twice the keys at a time, so that the four warps meet half as often, and two programs
    on a multiprocessor.
    """
    keys = max(16, min(64, 8192 // triton.next_power_of_2(head_dim)))
    return tuned("attend_chunk", f"{head_dim}/{group}", AttendConfig(CHUNK_BLOCK_M, keys, 4, 3, MAX_CHUNK_REGISTERS))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: GpuAttentionPlan,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Write to `out` each row's causal attention over its sequence's cached keys.

    Rows of sequences without context become zeros. The rows of a sequence are its last ones: row j
    of m stands at position ``context_len - m + j`` and sees the positions up to its own; with
    `sliding_window` w, its own and the w − 1 before it. Slots past a context aren't read, nor are
    rows past the plan's read or written. A row's bits don't depend on what shares its step, nor on
    which rows of its own sequence do; they may on whether any does, since a sequence's only row has
    its keys split.

    Up to three launches, no synchronisation, no allocation. A step that `is_decode_only` may be
    captured in a CUDA graph and replayed after any later fill with as many rows, each a sequence's
    only one.

    Args:
        q, out: [at least num_tokens, num_heads, head_dim] bfloat16 or float16; the heads of a row
            side by side, any stride between rows.
        k_cache, v_cache: one layer's, [num_blocks, num_kv_heads, block_size, head_dim], q's dtype,
            each block contiguous, any stride between blocks.
        plan: the step's.
        scale: what the products are multiplied with, usually head_dim ** -0.5.
        soft_cap: what the scaled products are softly kept below, above 0: ``soft_cap * tanh(score /
            soft_cap)``; None: they aren't.

    Raises:
        TensorMismatch: q, out, the cache and the plan disagree on shapes, dtypes, strides or
            devices.

    Source: FlashAttention-2's online softmax (arXiv:2307.08691) over the paged cache of
    PagedAttention (arXiv:2309.06180), split as in Flash-Decoding.
    """
    _check(q, k_cache, v_cache, plan, out, sliding_window)
    group, head_dim = plan.num_heads // plan.num_kv_heads, plan.head_dim
    block_d = triton.next_power_of_2(head_dim)
    log2e = math.log2(math.e)
    decode, chunk = decode_config(head_dim, group), chunk_config(head_dim, group)
    for config, count in ((decode, plan.num_decode_rows), (chunk, plan.num_tiles)):
        if not count:
            continue
        attend_kernel[(num_programs(q.device),)](
            q,
            k_cache,
            v_cache,
            plan.buffer,
            plan.partials,
            plan.lse,
            out,
            scale * log2e if soft_cap is None else scale / soft_cap * 2 * log2e,
            0.0 if soft_cap is None else soft_cap * log2e,
            NO_WINDOW if sliding_window is None else min(sliding_window, NO_WINDOW),
            q.stride(0),
            out.stride(0),
            k_cache.stride(0),
            v_cache.stride(0),
            plan.num_kv_heads,
            CHUNKS=config is chunk,
            NUM_DECODE_ITEMS=NUM_DECODE_ITEMS,
            NUM_ITEMS=NUM_ITEMS,
            ITEMS_AT=ITEMS_AT,
            TABLES_AT=TABLES_AT,
            TABLE_WIDTH=TABLE_WIDTH,
            GROUP=group,
            HEADS=min(group, config.block_m),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_SIZE=plan.block_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            NUM_STAGES=config.num_stages,
            HAS_CAP=soft_cap is not None,
            WIDEN=INTERPRETED,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
            enable_fp_fusion=True,
        )
    if plan.num_decode_rows:
        combine_kernel[(plan.num_decode_rows, plan.num_heads)](
            plan.buffer,
            plan.partials,
            plan.lse,
            out,
            out.stride(0),
            plan.num_heads,
            ROWS_AT=ROWS_AT,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            MAX_SPLITS=plan.max_splits,
            BLOCK_S=COMBINE_SPLITS,
            num_warps=COMBINE_WARPS,
        )


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: GpuAttentionPlan, out: Tensor, sliding_window: int | None
) -> None:
    row, block = (plan.num_heads, plan.head_dim), (plan.num_kv_heads, plan.block_size, plan.head_dim)
    if (
        q.shape[1:] != row
        or out.shape != q.shape
        or q.shape[0] < plan.num_tokens
        or k_cache.shape[1:] != block
        or v_cache.shape != k_cache.shape
    ):
        raise TensorMismatch(
            f"q is {tuple(q.shape)}, out {tuple(out.shape)}, the cache {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}; this plan takes at least "
            f"{plan.num_tokens} rows of {row} and blocks of {block}"
        )
    if q.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != q.dtype for t in (k_cache, v_cache, out)):
        raise TensorMismatch(
            f"q is {q.dtype}, out {out.dtype}, the cache {k_cache.dtype} and {v_cache.dtype}; "
            "all must be bfloat16, or all float16"
        )
    whole_row, whole_block = (plan.head_dim, 1), (plan.block_size * plan.head_dim, plan.head_dim, 1)
    if any(t.stride()[1:] != whole_row for t in (q, out)) or any(
        t.stride()[1:] != whole_block for t in (k_cache, v_cache)
    ):
        raise TensorMismatch(
            f"strides of q are {q.stride()}, of out {out.stride()}, of the cache {k_cache.stride()} and "
            f"{v_cache.stride()}; rows and blocks must be "
            "contiguous, with any stride between them"
        )
    if any(t.device != plan.buffer.device for t in (q, k_cache, v_cache, out)):
        raise TensorMismatch(
            f"q is on {q.device}, out on {out.device}, the cache on {k_cache.device} and {v_cache.device}, "
            f"the plan on {plan.buffer.device}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise TensorMismatch(f"a sliding window of {sliding_window}; a row sees itself at least, so 1 or more")
