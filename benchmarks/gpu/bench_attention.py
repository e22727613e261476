"""One layer's attention: decode steps by rows and contexts, chunks, mixed steps; beside torch's
varlen where that can answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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
    caches = [(step.k_cache, step.v_cache)]
    while len(caches) < machine.num_copies(2 * step.k_cache.nbytes, 64):
        caches.append((step.k_cache.clone(), step.v_cache.clone()))
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


def _calls(
    attend: Any, step: Attending, plan: Any, caches: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor
) -> list[Any]:
    return [lambda k=k, v=v: attend(step.q, k, v, plan, out, scale=step.heads.scale) for k, v in caches]
