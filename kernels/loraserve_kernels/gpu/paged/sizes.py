"""Sizes of adapters in a GPU's pool, counted from `LoraModule`s by `common.sizes`."""

from __future__ import annotations

from loraserve_kernels.common.modules import size_of
from loraserve_kernels.common.sizes import (
    ModuleRuns,
    ModuleSize,
    checked,
    num_pages_of,
    num_tiles_of,
    place_module,
    tiles_by_module,
)

__all__ = [
    "ModuleRuns",
    "ModuleSize",
    "checked",
    "num_pages_of",
    "num_tiles_of",
    "place_module",
    "size_of",
    "tiles_by_module",
]
