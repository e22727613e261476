"""Sizes of adapters on either device, counted from their ranks and modules.

Imports no torch and sees no tensor: packing and plans share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from loraserve_kernels.common.sites import (
    COLUMNS,
    EXPERT_INDEX,
    EXPERT_MODULES,
    EXPERT_SITES,
    MODULE_INDEX,
    STORED_SITES,
    ModuleShapes,
    check_place,
)
from loraserve_kernels.errors import TensorMismatch

UNIT_BYTES = 32
"""Alignment in bytes of rows in a GPU's page."""

RANK_TILE = 16
MAX_RANK = 512

RECORD = 64
"""Record of a tile at a layer, in int32: see `gpu.paged.layout`."""

REPLACED_SITES: dict[str, str] = {"lm_head": "lm_head", "embed": "embed_tokens"}
"""Sites whose rows a GPU's kernels can replace → their module."""

ALIGN_ELEMENTS = 16
"""Alignment of regions in a CPU's memory, so that a kernel may load a vector at a time whatever the
dtype.
"""

RANK, A, B, SCALINGS, DELTA, SHIFT, NUM_ROWS, ROWS, ROW_IDS, ROW_SCALES, RECORD_WORDS = range(11)
"""A module's record in a CPU's memory, in int64 words: its rank; where A, B and the replaced rows
start in the weights; where the ranks' numbers, δ, the shift and the rows' scales start in the
float32 buffer, −1 where the module has no δ, shift or scales; how many rows are replaced, and where
their ids start in theirs.
"""

Runs = list[tuple[int, int]]
"""Runs of rows that lie one after the other: (first byte, number of rows)."""


class ItemSized(Protocol):
    """A dtype, torch's or numpy's. One byte means int8, whose rows have scales."""

    @property
    def itemsize(self) -> int: ...


class ModuleSize(NamedTuple):
    """Shape of an adapter's module, without its numbers."""

    layer: int
    module: str
    rank: int
    has_delta: bool = False
    has_shift: bool = False
    num_rows: int = 0
    expert: int = 0


# in a CPU's memory


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of an adapter in a CPU's memory.

    Attributes:
        records: [num_layers, num_modules, RECORD_WORDS] int64, columns as in `COLUMNS`.
        num_elements: of the weights.
        num_floats: of what is float32 always, norms not among it.
        num_row_ids: int32 each.
        expert_records: [n, 5, RECORD_WORDS] int64, columns as in `EXPERT_MODULES`: of those layers'
            experts alone that the adapter changes.
        experts: (layer, expert) → their row of `expert_records`.
    """

    records: npt.NDArray[np.int64]
    num_elements: int
    num_floats: int
    num_row_ids: int
    expert_records: npt.NDArray[np.int64]
    experts: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def num_bytes(self, dtype: ItemSized, num_norm_weights: int = 0) -> int:
        """Bytes of the buffers, with weights in `dtype`.

        `num_norm_weights` float32 weights of norms are added. Experts' records are counted, since
        there may be thousands; the others' aren't.
        """
        floats = 4 * (self.num_floats + num_norm_weights + self.num_row_ids)
        return self.num_elements * dtype.itemsize + floats + self.expert_records.nbytes


def lay_out(
    sizes: Iterable[ModuleSize], *, num_layers: int, module_shapes: ModuleShapes, dtype: ItemSized
) -> PackedLayout:
    """Find a CPU's places for an adapter with these modules.

    Raises:
        TensorMismatch: a module that the base lacks, or one given twice.
    """
    sizes = list(sizes)
    changed = sorted({(size.layer, size.expert) for size in sizes if size.module in EXPERT_INDEX})
    experts = {place: row for row, place in enumerate(changed)}
    records = _empty_records(num_layers, len(COLUMNS))
    expert_records = _empty_records(len(experts), len(EXPERT_MODULES))
    given: set[tuple[int, str, int]] = set()
    num_floats = num_row_ids = 0
    for size in sizes:
        check_place(size.layer, size.module, num_layers, module_shapes, size.expert)
        if (size.layer, size.module, size.expert) in given:
            raise TensorMismatch(f"layer {size.layer} {size.module} is given twice")
        given.add((size.layer, size.module, size.expert))
        out_features = module_shapes[size.module][0]
        if size.module in EXPERT_INDEX:
            record = expert_records[experts[size.layer, size.expert], EXPERT_INDEX[size.module]]
        else:
            record = records[size.layer, MODULE_INDEX[size.module]]
        record[RANK], record[NUM_ROWS], record[ROW_IDS] = size.rank, size.num_rows, num_row_ids
        num_row_ids += size.num_rows
        for word, count in (
            (SCALINGS, size.rank),
            (DELTA, out_features if size.has_delta else 0),
            (SHIFT, out_features if size.has_shift else 0),
            (ROW_SCALES, size.num_rows if dtype.itemsize == 1 else 0),
        ):
            if count:
                record[word], num_floats = num_floats, num_floats + _aligned(count)
    num_elements = _place_weights(records, STORED_SITES, MODULE_INDEX, module_shapes, 0)
    num_elements = _place_weights(expert_records, EXPERT_SITES, EXPERT_INDEX, module_shapes, num_elements)
    return PackedLayout(records, num_elements, num_floats, num_row_ids, expert_records, experts)


def _empty_records(num_rows: int, num_modules: int) -> npt.NDArray[np.int64]:
    records = np.zeros((num_rows, num_modules, RECORD_WORDS), dtype=np.int64)
    records[..., (DELTA, SHIFT, ROW_SCALES)] = -1
    return records


def _place_weights(
    records: npt.NDArray[np.int64],
    sites: Mapping[str, tuple[str, ...]],
    index: Mapping[str, int],
    module_shapes: ModuleShapes,
    position: int,
) -> int:
    """Place the matrices of records, row by row, from a position on; return where they end."""
    for row in records:
        for site, modules in sites.items():
            width_of_row = 0 if site == "embed" else 1
            for word, count, side in ((A, RANK, 1), (B, RANK, 0), (ROWS, NUM_ROWS, width_of_row)):
                position = _aligned(position)
                for module in modules:
                    record = row[index[module]]
                    record[word] = position
                    position += int(record[count]) * module_shapes.get(module, (0, 0))[side]
    return position


def _aligned(position: int) -> int:
    return -(-position // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


# in a GPU's pages


def row_num_bytes(width: int, dtype: ItemSized) -> int:
    """Bytes of one row in a page, with the zeros that follow it."""
    return -(-width * dtype.itemsize // UNIT_BYTES) * UNIT_BYTES


class Placing:
    """First fit of rows into pages.

    Raises:
        TensorMismatch: a page of no whole number of units.
    """

    def __init__(self, page_num_bytes: int) -> None:
        if page_num_bytes % UNIT_BYTES or page_num_bytes < UNIT_BYTES:
            raise TensorMismatch(f"a page has {page_num_bytes} bytes; expected a multiple of {UNIT_BYTES}")
        self._page_num_bytes = page_num_bytes
        self._used: list[int] = []
        self._first_open = 0

    @property
    def num_pages(self) -> int:
        return len(self._used)

    def place(self, num_rows: int, num_bytes: int) -> Runs:
        """Find room for rows of `num_bytes` each.

        Raises:
            TensorMismatch: a page is too small for one of them.
        """
        size = self._page_num_bytes
        if num_bytes > size:
            raise TensorMismatch(f"a row of a module takes {num_bytes} bytes; a page has {size}: use larger pages")
        runs, page = [], self._first_open
        while num_rows:
            if page == len(self._used):
                self._used.append(0)
                # pages far behind are nearly full: looking at the last eight alone keeps the search
                # short
                self._first_open = max(0, page - 8)
            count = min(num_rows, (size - self._used[page]) // num_bytes)
            if count:
                runs.append((page * size + self._used[page], count))
                self._used[page] += count * num_bytes
                num_rows -= count
            page += 1
        return runs


class ModuleRuns(NamedTuple):
    """Placement of each part of a module."""

    a: Runs
    b: Runs
    delta: Runs
    shift: Runs
    rows: Runs


def num_pages_of(
    sizes: Iterable[ModuleSize],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_bytes: int,
    dtype: ItemSized,
) -> int:
    """Count the pages that `make_pages` will fill for an adapter with these modules.

    No tensor is needed.

    Raises:
        TensorMismatch: as `make_pages`, but for tensors that don't fit.
    """
    placing = Placing(page_num_bytes)
    for size in checked(sizes, num_layers, module_shapes):
        place_module(placing, size, module_shapes[size.module], dtype)
    return placing.num_pages


def num_tiles_of(sizes: Iterable[ModuleSize], *, num_layers: int) -> int:
    """Tiles that an adapter with these modules takes of a pool."""
    of_ranks, of_rows = tiles_by_module(sizes, num_layers)
    return int(of_ranks.sum() + of_rows.sum())


def tiles_of_rows(num_rows: int, num_layers: int) -> int:
    """Count the tiles whose records, over all layers, hold that many replaced rows."""
    return -(-num_rows // (RANK_TILE * num_layers))


def place_module(placing: Placing, size: ModuleSize, shape: tuple[int, int], dtype: ItemSized) -> ModuleRuns:
    """Find room for all parts of a module of this (out_features, in_features)."""
    out_features, in_features = shape
    ending_bytes = row_num_bytes(out_features, np.dtype(np.float32))
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
    """Count the tiles that each module needs, and those that its replaced rows need.

    The former at the layer of its highest rank, and at least one.
    """
    of_ranks, of_rows = np.zeros(len(COLUMNS), dtype=np.int64), np.zeros(len(COLUMNS), dtype=np.int64)
    for size in sizes:
        index = MODULE_INDEX[size.module]
        of_ranks[index] = max(of_ranks[index], 1, -(-size.rank // RANK_TILE))
        of_rows[index] = tiles_of_rows(size.num_rows, num_layers)
    return of_ranks, of_rows


def checked(sizes: Iterable[ModuleSize], num_layers: int, module_shapes: ModuleShapes) -> list[ModuleSize]:
    """Modules in the order in which they are placed.

    Raises:
        TensorMismatch: a module that the base lacks, one given twice, a rank over `MAX_RANK`, or
            replaced rows of a layer's linear.
    """
    found: dict[tuple[int, int], ModuleSize] = {}
    for size in sizes:
        layer, module = size.layer, size.module
        check_place(layer, module, num_layers, module_shapes, size.expert)
        if module in EXPERT_INDEX:
            raise TensorMismatch(f"layer {layer} has LoRA on {module}; on this device, kernels have no experts")
        place = (layer, MODULE_INDEX[module])
        if not 0 <= size.rank <= MAX_RANK or place in found:
            raise TensorMismatch(
                f"layer {layer} {module} has rank {size.rank} or appears twice; expected a rank up to {MAX_RANK}, once"
            )
        if size.num_rows and module not in REPLACED_SITES.values():
            raise TensorMismatch(
                f"layer {layer} {module} replaces {size.num_rows} rows of the base's weight; "
                "on this device, kernels replace rows of "
                f"{' and '.join(REPLACED_SITES.values())} only: serve the adapter on a CPU"
            )
        found[place] = size
    return [found[place] for place in sorted(found)]
