"""One layer's attention: decode steps by rows and contexts, chunks, mixed steps; beside torch's
varlen where that can answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.check_attention import LLAMA, Attending, Heads, make_attending
from benchmarks.gpu.limits import attention_work, share
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.varlen import plan_varlen, varlen_attention, varlen_obstacle
from loraserve_kernels.gpu.attention.paged import paged_attention


def cases(machine: Machine) -> Iterator[Case]:
    steps: list[tuple[str, list[int], list[int]]]
    if machine.is_tiny:
        steps = [("decode", [1, 1], [20, 9])]
    else:
        steps = [
            ("decode", [1] * n, [c] * n)
            for n, c in ((64, 512), (64, 4096), (32, 1024), (256, 512), (1, 512), (1, 8192))
        ]
        steps += [("chunk", [n], [c]) for n, c in ((512, 512), (2048, 2048), (512, 8192))]
        steps += [("mixed", [*[1] * 63, 449], [*[1024] * 63, 449])]
    for name, query_lens, context_lens in steps:
        for block_size in (16,) if machine.is_tiny else (16, 256):
            label = f"{name}, {len(query_lens)} sequences of {max(context_lens)}, blocks of {block_size}"
            arguments = (name, query_lens, context_lens, block_size)
            yield Case(label, lambda a=arguments: [_measure(machine, *a)])


def _measure(machine: Machine, name: str, query_lens: list[int], context_lens: list[int], block_size: int) -> Row:
    heads = Heads(4, 2, 32) if machine.is_tiny else LLAMA
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    step = make_attending(machine, heads, query_lens, context_lens, dtype, block_size)
    step.k_cache.nan_to_num_()
    step.v_cache.nan_to_num_()
    caches = _as_layers(step, machine.num_copies(2 * step.k_cache.nbytes, 64))
    out = torch.empty_like(step.q)
    work = attention_work(query_lens, context_lens, heads.num_heads, heads.num_kv_heads, heads.head_dim)
    timing = machine.time(_calls(paged_attention, step, step.plan, caches, out))
    limit_s, us = machine.rates.seconds(work), timing.us if timing else None
    row: Row = {
        "step": name,
        "rows": sum(query_lens),
        "context": max(context_lens),
        "block_size": block_size,
        "us": us,
        "limit_us": None if us is None else limit_s * 1e6,
        "share": share(limit_s, us / 1e6 if us else None),
        "host_us": timing.host_us if timing else None,
    }
    try:
        row["sdpa"] = _sdpa(machine, query_lens, context_lens, heads, dtype, us)
    except RuntimeError as error:
        # no kernel of this torch's for the shape, or no memory; raises where the device is lost
        machine.synchronize()
        row["note"] = f"SDPA: {error}"[:120]
    obstacle = varlen_obstacle(block_size, machine.device)
    if obstacle is not None:
        row["varlen_note"] = obstacle
        return row
    try:
        plan = plan_varlen(query_lens, context_lens, step.tables, block_size, machine.device)
        other = machine.time(_calls(varlen_attention, step, plan, caches, out))
    except RuntimeError as error:
        return {**row, "varlen_note": str(error)[:200]}
    row["varlen"] = other.us / us if other and us else None
    return row


def _as_layers(step: Attending, num_layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The step's cache once for each layer, as the engine lays it out: a block has all layers."""
    num_blocks, *block = step.k_cache.shape
    data = torch.empty(num_blocks, num_layers, 2, *block, dtype=step.k_cache.dtype, device=step.k_cache.device)
    for layer in range(num_layers):
        data[:, layer, 0].copy_(step.k_cache)
        data[:, layer, 1].copy_(step.v_cache)
    return [(data[:, layer, 0], data[:, layer, 1]) for layer in range(num_layers)]


def _sdpa(
    machine: Machine, query_lens: list[int], context_lens: list[int], heads: Heads, dtype: torch.dtype, us: float | None
) -> float | None:
    """torch's scaled_dot_product_attention on keys that lie side by side, over ours, which looks up
    their blocks: every torch has it. Only where all sequences have as many rows and keys.
    """
    if len(set(query_lens)) > 1 or len(set(context_lens)) > 1 or query_lens[0] not in (1, context_lens[0]):
        return None
    batch, rows, context = len(query_lens), query_lens[0], context_lens[0]
    q = machine.randn(batch, heads.num_heads, rows, heads.head_dim, dtype=dtype)
    size = 2 * batch * heads.num_kv_heads * context * heads.head_dim * dtype.itemsize
    kv = [
        [machine.randn(batch, heads.num_kv_heads, context, heads.head_dim, dtype=dtype) for _ in range(2)]
        for _ in range(machine.num_copies(size, 64))
    ]

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, scale=heads.scale, enable_gqa=True)

    timing = machine.time([lambda k=k, v=v: attend(k, v) for k, v in kv])
    return timing.us / us if timing and us else None


def _calls(
    attend: Any, step: Attending, plan: Any, caches: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor
) -> list[Any]:
    return [lambda k=k, v=v: attend(step.q, k, v, plan, out, scale=step.heads.scale) for k, v in caches]
