"""Builders of paged pools full of adapters, for the tests of the GPU's layout, plan and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from loraserve_kernels.layout import MODULES, LoraModule, PackedAdapter, pack_adapter
from loraserve_kernels.paged_layout import RANK_BLOCK, UNIT, AdapterPages, PagedPool, make_pages, row_stride
from loraserve_kernels.plan import LoraPlan, make_plan

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
}
EVEN: Shapes = {
    "q_proj": (256, 256),
    "k_proj": (64, 256),
    "v_proj": (64, 256),
    "o_proj": (256, 256),
    "gate_proj": (1024, 256),
    "up_proj": (1024, 256),
    "down_proj": (256, 1024),
}
PAGE_NUM_ELEMENTS = 3 * RANK_BLOCK * row_stride(1058)
MIXED_RANKS: list[Ranks] = [1, 8, 12, {"q_proj": 5, "v_proj": 64, "up_proj": 20, "down_proj": 33}, 16]


def random_modules(
    ranks: Ranks, shapes: Shapes, dtype: torch.dtype, layers: Sequence[int] = range(NUM_LAYERS)
) -> list[LoraModule]:
    """Modules whose weights `dtype` holds exactly; int8 with the scale of each rank."""
    by_module = dict.fromkeys(MODULES, ranks) if isinstance(ranks, int) else ranks
    return [
        LoraModule(
            layer,
            module,
            _random(rank, shapes[module][1], dtype) / (16 if dtype == torch.int8 else 1),
            _random(rank, shapes[module][0], dtype).T,
            0.5 + 0.25 * layer + 0.125 * MODULES.index(module),
        )
        for layer in layers
        for module, rank in by_module.items()
    ]


def _random(rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.int8:
        return (torch.randn(rank, width) / width**0.5).to(dtype).float()
    codes = torch.randint(-127, 128, (rank, width)).float()
    codes[:, 0] = 127
    return codes * torch.rand(rank, 1).add(0.5).div(128)


def pages_of(modules: Sequence[LoraModule], shapes: Shapes, dtype: torch.dtype) -> AdapterPages:
    return make_pages(
        modules, num_layers=NUM_LAYERS, module_shapes=shapes, page_num_elements=PAGE_NUM_ELEMENTS, dtype=dtype
    )


def empty_pool(shapes: Shapes, dtype: torch.dtype, *, num_pages: int = 300, max_slots: int = 8) -> PagedPool:
    """A pool that no adapter has touched: NaN, or 127 where there are no NaNs."""
    pool = PagedPool(
        num_pages=num_pages,
        page_num_elements=PAGE_NUM_ELEMENTS,
        num_layers=NUM_LAYERS,
        max_tiles=300,
        max_slots=max_slots,
        module_shapes=shapes,
        dtype=dtype,
        device="cpu",
    )
    pool.data.fill_(127 if dtype == torch.int8 else float("nan"))
    return pool


class Fleet:
    """A pool with several resident adapters, and the same adapters as the reference reads them.

    Page 0 is poisoned: it is where tables point for blocks that don't exist. The adapters' pages are out of order.
    """

    def __init__(self, all_ranks: Sequence[Ranks], shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self.pool = empty_pool(shapes, dtype)
        nobodys = pages_of(random_modules({"k_proj": 1}, shapes, dtype), shapes, dtype)
        self.pool.load(nobodys)
        first, second = self.pool.load(nobodys), self.pool.load(nobodys)
        self.pool.unload(second)
        self.pool.unload(first)
        self.pool.data.fill_(127 if dtype == torch.int8 else float("nan"))
        self.packed: dict[int, PackedAdapter] = {}
        for ranks in all_ranks:
            self.add(random_modules(ranks, shapes, dtype), dtype)

    def add(self, modules: Sequence[LoraModule], dtype: torch.dtype) -> int:
        slot = self.pool.load(pages_of(modules, self.shapes, dtype))
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


def read_block(pool: PagedPool, unit: int, width: int) -> np.ndarray:
    """[8, row_stride(width)]: the block that starts at this unit."""
    start = unit * UNIT
    return pool.data[start : start + RANK_BLOCK * row_stride(width)].float().numpy().reshape(RANK_BLOCK, -1)
