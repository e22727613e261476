"""Builders of paged pools full of adapters, for the tests of the GPU's layout, plan and kernels."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from loraserve_kernels.common.modules import LAYER_MODULES, MODULES, LoraModule, ReplacedRows
from loraserve_kernels.common.plan import LoraPlan, make_plan
from loraserve_kernels.cpu.lora.layout import PackedAdapter, pack_adapter
from loraserve_kernels.gpu.paged.layout import (
    HAS_DELTA,
    HAS_SHIFT,
    MULTIPLIERS,
    UNIT_BYTES,
    AdapterPages,
    row_num_bytes,
)
from loraserve_kernels.gpu.paged.packing import make_pages
from loraserve_kernels.gpu.paged.pool import PagedPool

Ranks = int | Mapping[str, int]
Shapes = dict[str, tuple[int, int]]

NUM_LAYERS = 2
# neither multiples of 16 nor of a kernel's blocks; down_proj is long enough to be cut in two
ODD: Shapes = {
    "q_proj": (72, 200),
    "k_proj": (23, 200),
    "v_proj": (23, 200),
    "o_proj": (200, 72),
    "gate_proj": (300, 200),
    "up_proj": (300, 200),
    "down_proj": (200, 1058),
    "lm_head": (603, 200),
    "embed_tokens": (200, 603),
}
EVEN: Shapes = {
    "q_proj": (256, 256),
    "k_proj": (64, 256),
    "v_proj": (64, 256),
    "o_proj": (256, 256),
    "gate_proj": (384, 256),
    "up_proj": (384, 256),
    "down_proj": (256, 1024),
    "lm_head": (384, 256),
    "embed_tokens": (256, 384),
}
PAGE_NUM_BYTES = 8 * row_num_bytes(1058, torch.float16)
MIXED_RANKS: list[Ranks] = [
    1,
    8,
    12,
    {"q_proj": 5, "v_proj": 33, "up_proj": 20, "down_proj": 33, "lm_head": 17, "embed_tokens": 18},
    16,
]


def random_modules(
    ranks: Ranks,
    shapes: Shapes,
    dtype: torch.dtype,
    layers: Sequence[int] = range(NUM_LAYERS),
    *,
    has_delta: Container[str] = (),
    has_shift: Container[str] = (),
    num_rows: Mapping[str, int] = {},
) -> list[LoraModule]:
    """Modules whose weights `dtype` holds exactly; int8 with the scale of each rank.

    `num_rows`: how many rows of a module's are replaced.
    """
    by_module = dict.fromkeys(MODULES, ranks) if isinstance(ranks, int) else ranks
    return [
        LoraModule(
            layer,
            module,
            _random(rank, shapes[module][1], dtype) / (16 if dtype == torch.int8 else 1),
            _random(rank, shapes[module][0], dtype).T,
            0.5 + 0.25 * layer + 0.125 * MODULES.index(module),
            torch.randn(shapes[module][0]) / 2 if module in has_delta else None,
            torch.randn(shapes[module][0]) if module in has_shift else None,
            random_rows(num_rows[module], shapes[module], dtype, module) if num_rows.get(module) else None,
        )
        for layer in layers
        for module, rank in by_module.items()
        if layer == 0 or module in LAYER_MODULES
    ]


def random_rows(count: int, shape: tuple[int, int], dtype: torch.dtype, module: str) -> ReplacedRows:
    """Some rows of a linear, or of the embedding's table, the first of them zero."""
    out_features, in_features = shape
    most, width = (in_features, out_features) if module == "embed_tokens" else (out_features, in_features)
    weight = _random(count, width, dtype)
    weight[0] = 0
    return ReplacedRows(torch.randperm(most)[:count].sort().values.int(), weight)


def _random(rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.int8:
        floats: torch.Tensor = torch.randn(rank, width) / width**0.5
        return floats.to(dtype).float()
    codes = torch.randint(-127, 128, (rank, width)).float()
    codes[:, 0] = 127
    return codes * torch.rand(rank, 1).add(0.5).div(128)


def pages_of(modules: Sequence[LoraModule], shapes: Shapes, dtype: torch.dtype) -> AdapterPages:
    return make_pages(modules, num_layers=NUM_LAYERS, module_shapes=shapes, page_num_bytes=PAGE_NUM_BYTES, dtype=dtype)


def empty_pool(shapes: Shapes, dtype: torch.dtype, *, num_pages: int = 300, max_slots: int = 8) -> PagedPool:
    """A pool that no adapter has touched: NaN in any float dtype, -1 and 127 in int8;
    records of tiles that look used.
    """
    pool = PagedPool(
        num_pages=num_pages,
        page_num_bytes=PAGE_NUM_BYTES,
        num_layers=NUM_LAYERS,
        max_tiles=300,
        max_slots=max_slots,
        module_shapes=shapes,
        dtype=dtype,
        device="cpu",
    )
    poison(pool)
    pool.records[..., HAS_DELTA] = pool.records[..., HAS_SHIFT] = 1
    pool.records.view(torch.float32)[..., MULTIPLIERS:] = float("nan")
    return pool


def poison(pool: PagedPool) -> None:
    pool.data.view(torch.int16).fill_(0x7FFF)


class Fleet:
    """A pool with several resident adapters, and the same adapters as the reference reads them.

    Page 0 is poisoned: it is where records point for ranks that don't exist. The adapters' pages
    are out of order.
    """

    def __init__(
        self,
        all_ranks: Sequence[Ranks],
        shapes: Shapes,
        dtype: torch.dtype,
        *,
        stored: Sequence[torch.dtype] = (),
        has_delta: Container[str] = (),
        has_shift: Container[str] = (),
        num_rows: Mapping[str, int] = {},
    ) -> None:
        """`stored`: what each adapter is stored in; `dtype` where it says nothing.

        What follows: of every second adapter.
        """
        self.shapes, self.dtype = shapes, dtype
        self.pool = empty_pool(shapes, dtype)
        nobodys = pages_of(random_modules({"k_proj": 1}, shapes, dtype), shapes, dtype)
        self.pool.load(nobodys)
        first, second = self.pool.load(nobodys), self.pool.load(nobodys)
        self.pool.unload(second)
        self.pool.unload(first)
        poison(self.pool)
        self.packed: dict[int, PackedAdapter] = {}
        for i, ranks in enumerate(all_ranks):
            kept = stored[i] if i < len(stored) else dtype
            more: dict[str, Any] = {"has_delta": has_delta, "has_shift": has_shift, "num_rows": num_rows}
            self.add(random_modules(ranks, shapes, kept, **(more if i % 2 else {})), kept)

    def add(self, modules: Sequence[LoraModule], stored: torch.dtype) -> int:
        slot = self.pool.load(pages_of(modules, self.shapes, stored))
        self.packed[slot] = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=self.shapes, dtype=torch.float32)
        return slot

    @property
    def slots(self) -> list[int]:
        return list(self.packed)

    def reference_plan(self, row_slots: Sequence[int]) -> LoraPlan:
        segments = [(self.packed[slot], row, row + 1) for row, slot in enumerate(row_slots) if slot]
        plan = make_plan(segments, len(row_slots))
        assert plan is not None
        return plan


def read_row(pool: PagedPool, unit: int, width: int, dtype: torch.dtype) -> np.ndarray:
    """The row that starts at this unit, with what follows it up to the next unit."""
    start = unit * UNIT_BYTES
    return pool.data[start : start + row_num_bytes(width, dtype)].view(dtype).float().numpy()
