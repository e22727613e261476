"""Attention on the device: decode rows, chunks, both in one call, sliding windows; alone and
cobatched; by torch's varlen where it can answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.close import against_float64, dtype_name, holds, same_bits
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.varlen import plan_varlen, varlen_attention, varlen_obstacle
from loraserve_kernels.gpu.attention.paged import paged_attention
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


LLAMA = Heads(32, 8, 128)


@dataclass(slots=True)
class Attending:
    """A step of sequences whose keys lie in shuffled blocks; what no context has written is NaN."""

    heads: Heads
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    plan: GpuAttentionPlan
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor

    def run(self, window: int | None = None) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        paged_attention(
            self.q, self.k_cache, self.v_cache, self.plan, out, scale=self.heads.scale, sliding_window=window
        )
        return out

    def alone(self, sequence: int, machine: Machine, window: int | None = None) -> Tensor:
        """The rows of one sequence in a step of its own."""
        start, size = sum(self.query_lens[:sequence]), self.query_lens[sequence]
        lens, contexts = [size], [self.context_lens[sequence]]
        plan = make_plan(machine, self.heads, lens, contexts, self.k_cache.shape[2])
        fill(plan, lens, contexts, self.tables[sequence : sequence + 1])
        one = Attending(
            self.heads,
            lens,
            contexts,
            plan,
            self.q[start : start + size].clone(),
            self.k_cache,
            self.v_cache,
            self.tables,
        )
        return one.run(window)

    def expected(self, window: int | None = None) -> Tensor:
        """In float64, a sequence at a time."""
        out, start = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device), 0
        group = self.heads.num_heads // self.heads.num_kv_heads
        for i, (size, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            rows, start = slice(start, start + size), start + size
            if not context or not size:
                continue
            blocks = self.tables[i, : -(-context // self.k_cache.shape[2])].long().to(self.q.device)
            k, v = (
                cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
                for cache in (self.k_cache, self.v_cache)
            )
            scores = torch.einsum("qhd,hkd->hqk", self.q[rows].double(), k) * self.heads.scale
            position = torch.arange(context - size, context, device=self.q.device)[:, None]
            key = torch.arange(context, device=self.q.device)[None]
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            out[rows] = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        return out


def make_plan(
    machine: Machine, heads: Heads, query_lens: Sequence[int], context_lens: Sequence[int], block_size: int
) -> GpuAttentionPlan:
    return GpuAttentionPlan(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=block_size,
        max_num_tokens=max(1, sum(query_lens)),
        max_num_seqs=len(query_lens),
        max_model_len=max(16, *context_lens),
        device=machine.device,
    )


def fill(plan: GpuAttentionPlan, query_lens: Sequence[int], context_lens: Sequence[int], tables: Tensor) -> None:
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    plan.fill(starts, np.array(context_lens, dtype=np.int32), tables.numpy())


def make_attending(
    machine: Machine,
    heads: Heads,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    dtype: torch.dtype,
    block_size: int = 16,
) -> Attending:
    counts = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(counts) + 1
    k_cache, v_cache = (
        machine.randn(num_blocks, heads.num_kv_heads, block_size, heads.head_dim, dtype=dtype) for _ in range(2)
    )
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(len(counts))).int()
    # numbers past a context's blocks name the last one, which is NaN throughout
    tables = torch.full((len(counts), max(1, *counts)), num_blocks - 1, dtype=torch.int32)
    used = 0
    for i, (count, context) in enumerate(zip(counts, context_lens, strict=True)):
        tables[i, :count] = order[used : used + count]
        used += count
        if context % block_size:
            for cache in (k_cache, v_cache):
                cache[int(tables[i, count - 1]), :, context % block_size :] = float("nan")
    for cache in (k_cache, v_cache):
        cache[-1] = float("nan")
    plan = make_plan(machine, heads, query_lens, context_lens, block_size)
    fill(plan, query_lens, context_lens, tables)
    plan.partials.fill_(float("nan"))
    q = machine.randn(sum(query_lens), heads.num_heads, heads.head_dim, dtype=dtype)
    return Attending(heads, query_lens, context_lens, plan, q, k_cache, v_cache, tables)


def cases(machine: Machine) -> Iterator[Case]:
    steps: dict[str, tuple[Heads, list[int], list[int]]]
    if machine.is_tiny:
        steps = {
            "decode": (Heads(4, 2, 32), [1, 1, 1], [300, 17, 0]),
            "mixed": (Heads(4, 2, 32), [1, 20, 1], [33, 40, 5]),
        }
    else:
        contexts = [1, 15, 16, 17, 255, 256, 257, 1000, 4095, 8000, 0, 512] * 5
        steps = {
            "decode": (LLAMA, [1] * len(contexts), contexts),
            "decode, one long": (LLAMA, [1], [8192]),
            "decode, heads of 64": (Heads(16, 2, 64), [1] * 12, contexts[:12]),
            "decode, heads of 256": (Heads(8, 4, 256), [1] * 12, contexts[:12]),
            "chunk": (LLAMA, [700], [2000]),
            "mixed": (LLAMA, [1, 300, 1, 1, 77, 1, 512], [900, 300, 0, 5000, 1077, 64, 600]),
        }
    for dtype in machine.dtypes:
        for name, (heads, query_lens, context_lens) in steps.items():
            for window in (None, 7 if machine.is_tiny else 500):
                label = f"{name}{', window' if window else ''}, {dtype_name(dtype)}"
                arguments = (machine, heads, query_lens, context_lens, dtype)
                yield Case(label, lambda n=name, a=arguments, w=window: _check(n, machine, make_attending(*a), w))
        yield Case(f"replay, {dtype_name(dtype)}", lambda d=dtype: [_check_replay(machine, d)])
        if not machine.is_tiny:
            yield Case(f"varlen, {dtype_name(dtype)}", lambda d=dtype: [_check_varlen(machine, d)])


def _check(name: str, machine: Machine, step: Attending, window: int | None) -> list[Row]:
    out = step.run(window)
    heads = f"{step.heads.num_heads} heads of {step.heads.head_dim}"
    note = f"{dtype_name(out.dtype)}, {len(step.query_lens)} sequences, {heads}"
    label = f"attention, {name}" + (f", window {window}" if window else "")
    rows = [against_float64(label, out, step.expected(window), note=note)]
    if len(step.query_lens) > 1:
        chosen = range(min(8, len(step.query_lens)))
        starts = np.cumsum([0, *step.query_lens]).tolist()
        together = torch.cat([out[starts[i] : starts[i + 1]] for i in chosen])
        alone = torch.cat([step.alone(i, machine, window) for i in chosen])
        rows.append(
            same_bits(f"{label}: a sequence alone and cobatched", together, alone, note=note, products_in=out.dtype)
        )
    return rows


def _check_replay(machine: Machine, dtype: torch.dtype) -> Row:
    """A graph that was captured with other contexts computes this step's."""
    heads, contexts = (Heads(4, 2, 32), [40, 3]) if machine.is_tiny else (LLAMA, [4000, 3, 700, 128])
    step = make_attending(machine, heads, [1] * len(contexts), contexts, dtype)
    out = torch.empty_like(step.q)
    fill(step.plan, step.query_lens, [1] * len(contexts), step.tables)
    replay = machine.capture(
        lambda: paged_attention(step.q, step.k_cache, step.v_cache, step.plan, out, scale=heads.scale)
    )
    fill(step.plan, step.query_lens, contexts, step.tables)
    out.fill_(float("nan"))
    replay()
    return same_bits("attention: a graph's replay and eager launches", out, step.run(), note=dtype_name(dtype))


def _check_varlen(machine: Machine, dtype: torch.dtype) -> Row:
    step = make_attending(machine, LLAMA, [1, 300, 1], [900, 300, 5000], dtype, block_size=256)
    obstacle = varlen_obstacle(256, machine.device)
    if obstacle is not None:
        return holds("attention by torch's varlen", True, f"not here: {obstacle}")
    # it reads whole blocks
    step.k_cache.nan_to_num_()
    step.v_cache.nan_to_num_()
    out = torch.full_like(step.q, float("nan"))
    plan = plan_varlen(step.query_lens, step.context_lens, step.tables, 256, machine.device)
    varlen_attention(step.q, step.k_cache, step.v_cache, plan, out, scale=LLAMA.scale)
    return against_float64("attention by torch's varlen", out, step.expected(), factor=2, note=dtype_name(dtype))
