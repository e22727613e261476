"""What adapters take of a GPU's pool, counted from their ranks and from which modules have what, without a tensor at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.modules import MODULE_INDEX, MODULES, LoraModule, check_place
from loraserve_kernels.paged_layout import (
    MAX_RANK,
    RANK_TILE,
    REPLACED_SITES,
    ModuleShapes,
    row_num_bytes,
    tiles_of_rows,
)
from loraserve_kernels.paged_rows import Placing, Runs


class ModuleSize(NamedTuple):
    """What an adapter has of one module, without a number of it."""

    layer: int
    module: str
    rank: int
    has_delta: bool = False
    has_shift: bool = False
    num_rows: int = 0


def size_of(m: LoraModule) -> ModuleSize:
    """Reads no number of it."""
    num_rows = 0 if m.rows is None else int(m.rows.ids.shape[0])
    return ModuleSize(m.layer, m.module, int(m.lora_a.shape[0]), m.delta is not None, m.shift is not None, num_rows)


def num_pages_of(
    sizes: Iterable[ModuleSize],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_bytes: int,
    dtype: torch.dtype,
) -> int:
    """Pages that `make_pages` will fill for an adapter with these modules, without a tensor at hand.

    Raises:
        ShapeMismatch: as `make_pages`, but for tensors that don't fit.
    """
    placing = Placing(page_num_bytes)
    for size in checked(sizes, num_layers, module_shapes):
        place_module(placing, size, module_shapes[size.module], dtype)
    return placing.num_pages


def num_tiles_of(sizes: Iterable[ModuleSize], *, num_layers: int) -> int:
    """Tiles that an adapter with these modules takes of a pool."""
    of_ranks, of_rows = tiles_by_module(sizes, num_layers)
    return int(of_ranks.sum() + of_rows.sum())


class ModuleRuns(NamedTuple):
    """Where each part of a module was placed."""

    a: Runs
    b: Runs
    delta: Runs
    shift: Runs
    rows: Runs


def place_module(placing: Placing, size: ModuleSize, shape: tuple[int, int], dtype: torch.dtype) -> ModuleRuns:
    """Find room for all parts of a module of this (out_features, in_features)."""
    out_features, in_features = shape
    ending_bytes = row_num_bytes(out_features, torch.float32)
    # an embedding's rows are as long as its output
    width_of_row = out_features if size.module == "embed_tokens" else in_features
    return ModuleRuns(
        placing.place(size.rank, row_num_bytes(in_features, dtype)),
        placing.place(size.rank, row_num_bytes(out_features, dtype)),
        placing.place(int(size.has_delta), ending_bytes),
        placing.place(int(size.has_shift), ending_bytes),
        placing.place(size.num_rows, row_num_bytes(width_of_row, dtype)),
    )


def tiles_by_module(
    sizes: Iterable[ModuleSize], num_layers: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As many tiles as the module needs at the layer where its rank is highest, at least one; and those of its replaced rows."""
    of_ranks, of_rows = np.zeros(len(MODULES), dtype=np.int64), np.zeros(len(MODULES), dtype=np.int64)
    for size in sizes:
        index = MODULE_INDEX[size.module]
        of_ranks[index] = max(of_ranks[index], 1, -(-size.rank // RANK_TILE))
        of_rows[index] = tiles_of_rows(size.num_rows, num_layers)
    return of_ranks, of_rows


def checked(sizes: Iterable[ModuleSize], num_layers: int, module_shapes: ModuleShapes) -> list[ModuleSize]:
    """Modules in the order in which they are placed.

    Raises:
        ShapeMismatch: a module that the base lacks, one given twice, a rank over `MAX_RANK`, or replaced rows of a layer's linear.
    """
    found: dict[tuple[int, int], ModuleSize] = {}
    for size in sizes:
        layer, module = size.layer, size.module
        check_place(layer, module, num_layers, module_shapes)
        place = (layer, MODULE_INDEX[module])
        if not 0 <= size.rank <= MAX_RANK or place in found:
            raise ShapeMismatch(
                f"layer {layer} {module}: rank {size.rank} (up to {MAX_RANK}), or the module is given twice"
            )
        if size.num_rows and module not in REPLACED_SITES.values():
            raise ShapeMismatch(
                f"layer {layer} {module} has {size.num_rows} rows in the place of the base's; this device's kernels replace rows of "
                f"{' and '.join(REPLACED_SITES.values())} alone: serve the adapter on a CPU"
            )
        found[place] = size
    return [found[place] for place in sorted(found)]
