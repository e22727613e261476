"""LoRA on the CPU."""

from __future__ import annotations

from torch import Tensor

from loraserve_kernels.layout import MODULE_INDEX, SITES
from loraserve_kernels.plan import LoraPlan


def apply_lora_torch(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int) -> None:
    """`launch.apply_lora` in PyTorch, segment by segment: what serves where numba isn't installed."""
    for segment in plan.segments:
        adapter, rows = segment.adapter, slice(segment.row_start, segment.row_end)
        first = MODULE_INDEX[SITES[site][0]]
        site_a = adapter.site_a(layer, site)
        if not site_a.shape[0]:
            continue
        shrunk = x[rows] @ site_a.to(x.dtype).T
        rank_start = column = 0
        for index in range(first, first + len(SITES[site])):
            rank, width = int(adapter.ranks[layer, index]), adapter.out_features[index]
            if rank:
                b = adapter.lora_b(layer, SITES[site][index - first]).to(x.dtype)
                y[rows, column : column + width].addmm_(
                    shrunk[:, rank_start : rank_start + rank], b, alpha=float(adapter.scalings[layer, index])
                )
            rank_start, column = rank_start + rank, column + width


def warm_up() -> None:
    """Compile what would otherwise be compiled in the first step."""
