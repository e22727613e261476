"""An adapter's matrices copied into pages as a GPU's pool holds them, with their records.

`layout` defines both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.modules import (
    MODULE_INDEX,
    SITES,
    LoraModule,
    ReplacedRows,
    check_row_ids,
    check_shapes,
    size_of,
)
from loraserve_kernels.common.sizes import (
    ModuleRuns,
    Placing,
    Runs,
    checked,
    place_module,
    row_num_bytes,
    tiles_by_module,
)
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.paged.layout import (
    A_UNITS,
    B_UNITS,
    DELTA_UNIT,
    FIRST_SLICE,
    FIRST_TILE,
    HAS_DELTA,
    HAS_ENDING,
    HAS_SHIFT,
    KIND,
    MULTIPLIERS,
    NUM_REPLACED,
    NUM_TILES,
    NUM_UNITS,
    RANK_TILE,
    RECORD,
    REPLACED_SITES,
    REPLACED_TILE,
    SHIFT_UNIT,
    SITE_WORDS,
    SLICE_WORDS,
    STORED_DTYPES,
    UNIT_BYTES,
    AdapterPages,
    ModuleShapes,
    shapes_of,
)
from loraserve_kernels.reference import quantize_rows

_ROWS_AT_ONCE = 4096
"""Quantized at a time: a whole vocabulary's rows in float32 would take gigabytes."""

_SITE_OF = {module: list(SITES).index(site) for site, module in REPLACED_SITES.items()}


def make_pages(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_bytes: int,
    dtype: torch.dtype,
    pin_memory: bool = False,
) -> AdapterPages:
    """Copy an adapter's matrices into new pages, layer by layer.

    int8 gives each row a scale of its own.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks up to `MAX_RANK`.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base; it may lack modules that
            the adapter lacks too.
        page_num_bytes: the pool's, a multiple of `UNIT_BYTES`.
        dtype: the pool's, or int8.
        pin_memory: allocate what a pool copies so that the copy needn't be waited for. Needs a GPU.

    Raises:
        TensorMismatch: a module that doesn't fit the base, one given twice, a rank over `MAX_RANK`,
            replaced rows of a layer's linear, a dtype that pools don't hold, or a page too small
            for a row of the base.
    """
    if dtype not in STORED_DTYPES:
        raise TensorMismatch(f"pools hold bfloat16, float16 or int8, not {dtype}")
    sizes = checked(map(size_of, modules), num_layers, module_shapes)
    by_place = {(m.layer, m.module): m for m in modules}
    placing = Placing(page_num_bytes)
    placed = []
    for size in sizes:
        m = by_place[size.layer, size.module]
        check_shapes(m, module_shapes[m.module])
        check_row_ids(m, module_shapes[m.module])
        placed.append((m, place_module(placing, size, module_shapes[m.module], dtype)))

    num_tiles, num_row_tiles = tiles_by_module(sizes, num_layers)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    first_row_tiles = num_tiles.sum() + np.cumsum(num_row_tiles) - num_row_tiles
    shape = (int(num_tiles.sum() + num_row_tiles.sum()), num_layers)
    # torch.zeros pins what it has cleared
    pages = torch.zeros((placing.num_pages, page_num_bytes), dtype=torch.uint8, pin_memory=pin_memory)
    records = torch.zeros((*shape, RECORD), dtype=torch.int32, pin_memory=pin_memory)
    starts = np.full((*shape, NUM_UNITS), -1, dtype=np.int64)
    ids = np.zeros((*shape, NUM_UNITS), dtype=np.int32)
    sites = np.zeros((len(SITES), SITE_WORDS), dtype=np.int32)
    sites[:, KIND] = dtype == torch.int8
    for site, names in zip(sites, SITES.values(), strict=True):
        for of_slice, module in zip(site[FIRST_SLICE:].reshape(-1, SLICE_WORDS), names, strict=False):
            index = MODULE_INDEX[module]
            has_ending = any(s.has_delta or s.has_shift for s in sizes if s.module == module)
            of_slice[[NUM_TILES, FIRST_TILE, HAS_ENDING]] = num_tiles[index], first_tiles[index], has_ending
    for m, runs in placed:
        index = MODULE_INDEX[m.module]
        tiles = slice(first_tiles[index], first_tiles[index] + num_tiles[index])
        _write_module(m, runs, pages, records[tiles, m.layer], starts[tiles, m.layer], dtype)
        if m.row_overrides is not None:
            site = sites[_SITE_OF[m.module]]
            site[NUM_REPLACED], site[REPLACED_TILE] = m.row_overrides.ids.shape[0], first_row_tiles[index]
            tiles = slice(first_row_tiles[index], first_row_tiles[index] + num_row_tiles[index])
            _write_replaced(m.row_overrides, runs.rows, pages, records[tiles], starts[tiles], ids[tiles], dtype)
    unit_pages = np.where(starts < 0, placing.num_pages, starts // page_num_bytes).astype(np.int32)
    units_in_page = np.where(starts < 0, ids, starts % page_num_bytes // UNIT_BYTES).astype(np.int32)
    return AdapterPages(pages, dtype, records, unit_pages, units_in_page, sites, shapes_of(module_shapes))


def _write_module(
    m: LoraModule,
    runs: ModuleRuns,
    pages: Tensor,
    records: Tensor,
    starts: npt.NDArray[np.int64],
    dtype: torch.dtype,
) -> None:
    """Write what the module has at its layer but for replaced rows.

    Also write its records [num_tiles, RECORD] and starts [num_tiles, NUM_UNITS].
    """
    a, b = m.lora_a, m.lora_b.T
    scaling = m.scaling.float().numpy() if isinstance(m.scaling, Tensor) else np.float32(m.scaling)
    scales = _write_rows(pages, runs.a, a, dtype), _write_rows(pages, runs.b, b, dtype)
    # who serves the adapter refuses what isn't finite, by name
    with np.errstate(over="ignore"):
        multipliers = scaling * (scales[0] * scales[1])
    _spread(records.view(torch.float32).numpy()[:, MULTIPLIERS:], multipliers)
    _spread(starts[:, A_UNITS:B_UNITS], _starts_of(runs.a, a.shape[1], dtype))
    _spread(starts[:, B_UNITS:DELTA_UNIT], _starts_of(runs.b, b.shape[1], dtype))
    for row, where, unit, has in (
        (m.dora_delta, runs.delta, DELTA_UNIT, HAS_DELTA),
        (m.bias_delta, runs.shift, SHIFT_UNIT, HAS_SHIFT),
    ):
        if row is not None:
            _write_rows(pages, where, row[None], torch.float32)
            starts[0, unit] = where[0][0]
            records[0, has] = 1


def _write_replaced(
    rows: ReplacedRows,
    runs: Runs,
    pages: Tensor,
    records: Tensor,
    starts: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    dtype: torch.dtype,
) -> None:
    """Write replaced rows, and their records, starts and ids.

    Records are [num_tiles, num_layers, RECORD], starts and ids [num_tiles, num_layers, NUM_UNITS].
    """
    scales = _write_rows(pages, runs, rows.weight, dtype)
    # a row of zeros is a row nevertheless
    scales[scales == 0] = 1
    _spread(records.view(-1, RECORD).view(torch.float32).numpy()[:, MULTIPLIERS:], scales)
    _spread(starts.reshape(-1, NUM_UNITS)[:, A_UNITS:B_UNITS], _starts_of(runs, rows.weight.shape[1], dtype))
    _spread(ids.reshape(-1, NUM_UNITS)[:, B_UNITS:DELTA_UNIT], rows.ids.numpy())


def _spread(tiles: npt.NDArray[np.generic], by_rank: npt.NDArray[np.generic]) -> None:
    """Write one number for each rank to tiles [num_tiles, RANK_TILE], anyhow in memory."""
    whole = len(by_rank) // RANK_TILE
    tiles[:whole] = by_rank[: whole * RANK_TILE].reshape(whole, RANK_TILE)
    if rest := by_rank[whole * RANK_TILE :].size:
        tiles[whole, :rest] = by_rank[whole * RANK_TILE :]


def _write_rows(pages: Tensor, runs: Runs, rows: Tensor, dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Copy rows [n, width] to where they were placed, and return each one's multiplier.

    It makes the row what it was: 1, or its scale in int8.
    """
    scales, num_rows = np.ones(rows.shape[0], dtype=np.float32), rows.shape[0]
    if dtype != torch.int8:
        _copy_rows(pages, runs, rows, 0, dtype)
        return scales
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        codes, scale = quantize_rows(rows[first : first + _ROWS_AT_ONCE].float(), 127)
        _copy_rows(pages, runs, codes, first, dtype)
        scales[first : first + _ROWS_AT_ONCE] = scale.numpy()
    return scales


def _starts_of(runs: Runs, width: int, dtype: torch.dtype) -> npt.NDArray[np.int64]:
    """Compute the start of each row, in bytes."""
    num_bytes = row_num_bytes(width, dtype)
    return np.concatenate(
        [np.zeros(0, dtype=np.int64), *(start + num_bytes * np.arange(count) for start, count in runs)]
    )


def _copy_rows(pages: Tensor, runs: Runs, rows: Tensor, first: int, dtype: torch.dtype) -> None:
    """Copy rows; the first of them is number `first` of the placed ones."""
    flat, num_bytes, end = pages.view(-1), row_num_bytes(rows.shape[1], dtype), first + rows.shape[0]
    before = 0
    for start, count in runs:
        low, high = max(first, before), min(end, before + count)
        if low < high:
            there = flat[start + (low - before) * num_bytes : start + (high - before) * num_bytes]
            there.view(dtype).view(high - low, -1)[:, : rows.shape[1]] = rows[low - first : high - first]
        before += count
