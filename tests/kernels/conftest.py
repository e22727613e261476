"""Builders of adapters and of paged caches for the kernels' tests."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan
from loraserve_kernels.cpu.lora.layout import (
    LAYER_MODULES,
    MODULES,
    LoraModule,
    PackedAdapter,
    ReplacedRows,
    pack_adapter,
)

NUM_LAYERS = 2
# odd widths: neither vectors nor blocks fit them
SHAPES: dict[str, tuple[int, int]] = {
    "q_proj": (72, 40),
    "k_proj": (24, 40),
    "v_proj": (24, 40),
    "o_proj": (40, 72),
    "gate_proj": (2100, 40),
    "up_proj": (2100, 40),
    "down_proj": (40, 2100),
    "lm_head": (2105, 40),
    "embed_tokens": (40, 2105),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_modules(
    ranks: int | Mapping[str, int],
    *,
    layers: Sequence[int] = range(NUM_LAYERS),
    scaling: float = 0.5,
    has_delta: Container[str] = (),
    has_shift: Container[str] = (),
    rows: Mapping[str, int] = MappingProxyType({}),
    is_scaled_by_rank: bool = False,
) -> list[LoraModule]:
    """Random modules.

    Args:
        ranks: one rank for all, or a rank for each module that the adapter has.
        has_delta, has_shift: modules, of those.
        rows: module → how many of its rows are replaced, anywhere.
        is_scaled_by_rank: whether `scaling` differs from rank to rank.
    """
    by_module = dict.fromkeys(MODULES, ranks) if isinstance(ranks, int) else ranks
    modules = []
    for layer in layers:
        for module, rank in by_module.items():
            if layer and module not in LAYER_MODULES:
                continue
            out_features, in_features = SHAPES[module]
            number: float | Tensor = scaling + 0.25 * layer + 0.125 * MODULES.index(module)
            modules.append(
                LoraModule(
                    layer,
                    module,
                    torch.randn(rank, in_features) / in_features**0.5,
                    torch.randn(out_features, rank) / max(rank, 1) ** 0.5,
                    number + torch.rand(rank) if is_scaled_by_rank else number,
                    torch.randn(out_features) / 2 if module in has_delta else None,
                    torch.randn(out_features) if module in has_shift and module != "embed_tokens" else None,
                    make_rows(module, rows[module]) if module in rows else None,
                )
            )
    return modules


def make_rows(module: str, count: int) -> ReplacedRows:
    """Random rows, as many as asked for or as there are, anywhere."""
    num_rows, width = reversed(SHAPES[module]) if module == "embed_tokens" else SHAPES[module]
    ids = torch.randperm(num_rows)[:count].sort().values.int()
    return ReplacedRows(ids, torch.randn(len(ids), width) / (1 if module == "embed_tokens" else width**0.5))


def make_adapter(
    ranks: int | Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[int] = range(NUM_LAYERS),
    has_delta: Container[str] = (),
    has_shift: Container[str] = (),
    rows: Mapping[str, int] = MappingProxyType({}),
    is_scaled_by_rank: bool = False,
) -> PackedAdapter:
    """A random adapter; see `make_modules`."""
    modules = make_modules(
        ranks,
        layers=layers,
        has_delta=has_delta,
        has_shift=has_shift,
        rows=rows,
        is_scaled_by_rank=is_scaled_by_rank,
    )
    return pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)


@dataclass
class Paged:
    """A random cache in shuffled blocks. Every slot that no sequence uses is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor

    @property
    def plan(self) -> AttentionPlan:
        return make_attention_plan(self.query_starts, self.context_lens, self.block_tables, self.k_cache.shape[2])


def make_paged(
    num_rows: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
) -> Paged:
    counts = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks).int()
    k = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    v = k.clone()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    used = 0
    for i, (count, context) in enumerate(zip(counts, context_lens, strict=True)):
        tables[i, :count] = order[used : used + count]
        used += count
        for position in range(context):
            for cache in (k, v):
                cache[tables[i, position // block_size], :, position % block_size] = torch.randn(num_kv_heads, head_dim)
    starts = [0]
    for rows in num_rows:
        starts.append(starts[-1] + rows)
    q = torch.randn(starts[-1], num_heads, head_dim)
    return Paged(q, k, v, starts, list(context_lens), tables)
