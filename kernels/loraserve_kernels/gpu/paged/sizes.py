"""What adapters take of a GPU's pool: `sizes`, and of a `LoraModule` what it counts."""

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
