"""How adapters lie in a GPU's memory: rows of ranks in fixed-size pages, found through a record for each sixteen ranks and layer.

A rank's row of A ([in]) and of B transposed ([out]) lies anywhere in a page, at a multiple of `UNIT_BYTES`, followed by zeros up to the next. It never crosses a
page's end. So any free pages will do for an adapter: nothing fragments, no rank is padded to another adapter's or to a block, and a page need only be as large as
one row, the head's over its vocabulary included. δ rows (see `layout.LoraModule`) are float32 and lie there too. An adapter's weights are in the pool's
16-bit dtype or in int8.

Kernels take ranks by tiles of `RANK_TILE`. A tile has one number for all layers; what differs by layer stands in the tile's record for the layer, `RECORD` int32:

    A_UNITS      16 units: where each rank's row of A starts        HAS_DELTA    1 where the module has a δ (in the module's first tile)
    B_UNITS      16 units: of B                                     MULTIPLIERS  16 float32, by their bits
    DELTA_UNIT   where δ starts

A rank's multiplier is alpha / r (or alpha / sqrt(r)), times the scales of its two rows when they are int8. A multiplier of zero means that there is no such rank:
kernels read neither of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.layout import MODULE_INDEX, MODULES, SITES, LoraModule, check_place, check_shapes
from loraserve_kernels.reference import quantize_rows

RANK_TILE = 16
UNIT_BYTES = 32
MAX_RANK = 512
COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
STORED_DTYPES: tuple[torch.dtype, ...] = (*COMPUTE_DTYPES, torch.int8)

RECORD = 64
A_UNITS, B_UNITS, DELTA_UNIT, HAS_DELTA, MULTIPLIERS = 0, 16, 32, 33, 48
NUM_UNITS = 33
"""The first words of a record are units."""

SITE_WORDS = 16
KIND, FIRST_SLICE, SLICE_WORDS = 2, 4, 4
FIRST_ITEM, NUM_TILES, FIRST_TILE, SLICE_HAS_DELTA = 0, 1, 2, 3
"""An adapter at a site, in int32 words as a plan's row tiles have them (see `gpu_plan`): at `KIND` 1 for int8 and 0 otherwise; then, for up to three slices, four
words each."""

ModuleShapes = Mapping[str, tuple[int, int]]


def row_num_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of one row in a page, with the zeros that follow it."""
    return -(-width * dtype.itemsize // UNIT_BYTES) * UNIT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPages:
    """One adapter as the pages that a pool will hold, in the host's memory, and its part of the pool's tables.

    Attributes:
        pages: [num_pages, page_num_bytes] uint8; whatever isn't a weight is zero.
        dtype: what the weights are stored in.
        records: [num_tiles, num_layers, RECORD] int32. Their units are those of the pool that the adapter was loaded into last.
        unit_pages: [num_tiles, num_layers, NUM_UNITS] int32: in which of the adapter's pages the row lies; num_pages where there is none.
        units_in_page: the same shape: where in the page; 0 where there is none.
        sites: [num_sites, SITE_WORDS] int32: the adapter at each site; tiles are counted from the adapter's first.
        module_shapes: of the base.
    """

    pages: Tensor
    dtype: torch.dtype
    records: Tensor
    unit_pages: npt.NDArray[np.int32]
    units_in_page: npt.NDArray[np.int32]
    sites: npt.NDArray[np.int32]
    module_shapes: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages; records (a few per mille of that) aren't counted."""
        return self.pages.nbytes

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.records.shape[0]


def num_pages_of(
    ranks: Iterable[tuple[int, str, int]],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_bytes: int,
    dtype: torch.dtype,
    deltas: Iterable[tuple[int, str]] = (),
) -> int:
    """Pages that `make_pages` will fill for an adapter with these (layer, module, rank), without a tensor at hand.

    Args:
        deltas: the (layer, module) that have a δ row.

    Raises:
        ShapeMismatch: as `make_pages`.
    """
    placing, with_delta = _Placing(page_num_bytes), frozenset(deltas)
    for layer, module, rank in _checked(ranks, num_layers, module_shapes):
        _place_module(placing, rank, module_shapes[module], dtype, has_delta=(layer, module) in with_delta)
    return placing.num_pages


def num_tiles_of(ranks: Iterable[tuple[int, str, int]]) -> int:
    """Tiles that an adapter with these (layer, module, rank) takes of a pool."""
    return int(_tiles_by_module(ranks).sum())


def make_pages(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_bytes: int,
    dtype: torch.dtype,
    pin_memory: bool = False,
) -> AdapterPages:
    """Copy an adapter's matrices into new pages, layer by layer; int8 gives each rank's row of A and of B a scale of its own.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks from 1 to `MAX_RANK`.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base; it may lack modules that the adapter lacks too.
        page_num_bytes: the pool's, a multiple of `UNIT_BYTES`.
        dtype: the pool's, or int8.
        pin_memory: allocate what a pool copies so that the copy needn't be waited for. Needs a GPU.

    Raises:
        ShapeMismatch: a module that doesn't fit the base, one given twice, a rank over `MAX_RANK`, a dtype that pools don't hold, or a page too
            small for a row of the base.
    """
    if dtype not in STORED_DTYPES:
        raise ShapeMismatch(f"pools hold bfloat16, float16 or int8, not {dtype}")
    by_place = {(m.layer, m.module): m for m in modules}
    wanted = _checked(((m.layer, m.module, m.lora_a.shape[0]) for m in modules), num_layers, module_shapes)
    placing = _Placing(page_num_bytes)
    placed = []
    for layer, module, rank in wanted:
        m = by_place[layer, module]
        check_shapes(m, module_shapes[module])
        runs = _place_module(placing, rank, module_shapes[module], dtype, has_delta=m.delta is not None)
        placed.append((m, runs))

    num_tiles = _tiles_by_module(wanted)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    shape = (int(num_tiles.sum()), num_layers)
    # torch.zeros pins what it has cleared
    pages = torch.zeros((placing.num_pages, page_num_bytes), dtype=torch.uint8, pin_memory=pin_memory)
    records = torch.zeros((*shape, RECORD), dtype=torch.int32, pin_memory=pin_memory)
    words, multipliers = records.numpy(), records.view(torch.float32).numpy()[..., MULTIPLIERS:]
    starts = np.full((*shape, NUM_UNITS), -1, dtype=np.int64)
    has_delta = np.zeros(len(MODULES), dtype=np.int32)
    for m, (a_runs, b_runs, delta_runs) in placed:
        index = MODULE_INDEX[m.module]
        tiles = slice(first_tiles[index], first_tiles[index] + num_tiles[index])
        a, b = m.lora_a, m.lora_b.T
        scales = np.full(a.shape[0], m.scaling, dtype=np.float32)
        if dtype == torch.int8:
            (a, a_scale), (b, b_scale) = quantize_rows(a.float(), 127), quantize_rows(b.float(), 127)
            scales *= (a_scale * b_scale).numpy()
        _spread(multipliers[tiles, m.layer], scales)
        _spread(starts[tiles, m.layer, A_UNITS:B_UNITS], _write(pages, a_runs, a, dtype))
        _spread(starts[tiles, m.layer, B_UNITS:DELTA_UNIT], _write(pages, b_runs, b, dtype))
        if m.delta is not None:
            starts[tiles.start, m.layer, DELTA_UNIT] = _write(pages, delta_runs, m.delta[None], torch.float32)[0]
            words[tiles.start, m.layer, HAS_DELTA] = has_delta[index] = 1
    unit_pages = np.where(starts < 0, placing.num_pages, starts // page_num_bytes).astype(np.int32)
    units_in_page = np.where(starts < 0, 0, starts % page_num_bytes // UNIT_BYTES).astype(np.int32)
    sites = np.zeros((len(SITES), SITE_WORDS), dtype=np.int32)
    sites[:, KIND] = dtype == torch.int8
    for site, names in zip(sites, SITES.values(), strict=True):
        for words_of_slice, module in zip(site[FIRST_SLICE:].reshape(-1, SLICE_WORDS), names, strict=False):
            index = MODULE_INDEX[module]
            words_of_slice[[NUM_TILES, FIRST_TILE, SLICE_HAS_DELTA]] = (
                num_tiles[index],
                first_tiles[index],
                has_delta[index],
            )
    return AdapterPages(pages, dtype, records, unit_pages, units_in_page, sites, shapes_of(module_shapes))


def shapes_of(module_shapes: ModuleShapes) -> tuple[tuple[int, int], ...]:
    """The base's (out_features, in_features) in the order of `MODULES`; zeros for what it lacks."""
    return tuple(module_shapes.get(module, (0, 0)) for module in MODULES)


Runs = list[tuple[int, int]]
"""Where rows lie, one after the other: (first byte, number of rows)."""


class _Placing:
    """First fit of rows into pages."""

    def __init__(self, page_num_bytes: int) -> None:
        if page_num_bytes % UNIT_BYTES or page_num_bytes < UNIT_BYTES:
            raise ShapeMismatch(f"a page of {page_num_bytes} bytes; it must be a multiple of {UNIT_BYTES}")
        self._page_num_bytes = page_num_bytes
        self._used: list[int] = []
        self._first_open = 0

    @property
    def num_pages(self) -> int:
        return len(self._used)

    def place(self, num_rows: int, num_bytes: int) -> Runs:
        """Find room for rows of `num_bytes` each."""
        size = self._page_num_bytes
        if num_bytes > size:
            raise ShapeMismatch(f"a row of a module takes {num_bytes} bytes; a page has {size}: make pages larger")
        runs, page = [], self._first_open
        while num_rows:
            if page == len(self._used):
                self._used.append(0)
                # pages far behind are nearly full: looking at the last eight alone keeps the search short
                self._first_open = max(0, page - 8)
            count = min(num_rows, (size - self._used[page]) // num_bytes)
            if count:
                runs.append((page * size + self._used[page], count))
                self._used[page] += count * num_bytes
                num_rows -= count
            page += 1
        return runs


def _place_module(
    placing: _Placing, rank: int, shape: tuple[int, int], dtype: torch.dtype, *, has_delta: bool
) -> tuple[Runs, Runs, Runs]:
    out_features, in_features = shape
    return (
        placing.place(rank, row_num_bytes(in_features, dtype)),
        placing.place(rank, row_num_bytes(out_features, dtype)),
        placing.place(int(has_delta), row_num_bytes(out_features, torch.float32)),
    )


def _write(pages: Tensor, runs: Runs, rows: Tensor, dtype: torch.dtype) -> npt.NDArray[np.int64]:
    """Copy rows to where they were placed; where each starts, in bytes."""
    flat, num_bytes, done = pages.view(-1), row_num_bytes(rows.shape[1], dtype), 0
    starts = []
    for start, count in runs:
        there = flat[start : start + count * num_bytes].view(dtype).view(count, -1)
        there[:, : rows.shape[1]] = rows[done : done + count]
        starts.append(start + num_bytes * np.arange(count, dtype=np.int64))
        done += count
    return np.concatenate(starts)


def _spread(tiles: npt.NDArray[np.generic], by_rank: npt.NDArray[np.generic]) -> None:
    """Write one number for each rank to tiles [num_tiles, RANK_TILE], which lie anyhow in memory."""
    whole = len(by_rank) // RANK_TILE
    tiles[:whole] = by_rank[: whole * RANK_TILE].reshape(whole, RANK_TILE)
    if rest := by_rank[whole * RANK_TILE :].size:
        tiles[whole, :rest] = by_rank[whole * RANK_TILE :]


def _tiles_by_module(ranks: Iterable[tuple[int, str, int]]) -> npt.NDArray[np.int32]:
    """As many tiles as the module needs at the layer where its rank is highest."""
    num_tiles = np.zeros(len(MODULES), dtype=np.int32)
    for _, module, rank in ranks:
        index = MODULE_INDEX[module]
        num_tiles[index] = max(num_tiles[index], -(-rank // RANK_TILE))
    return num_tiles


def _checked(
    ranks: Iterable[tuple[int, str, int]], num_layers: int, module_shapes: ModuleShapes
) -> list[tuple[int, str, int]]:
    """(layer, module, rank) in the order in which they are placed."""
    found: dict[tuple[int, int], tuple[int, str, int]] = {}
    for layer, module, rank in ranks:
        check_place(layer, module, num_layers, module_shapes)
        place = (layer, MODULE_INDEX[module])
        if not 1 <= rank <= MAX_RANK or place in found:
            raise ShapeMismatch(
                f"layer {layer} {module}: rank {rank} (from 1 to {MAX_RANK}), or the module is given twice"
            )
        found[place] = (layer, module, rank)
    return [found[place] for place in sorted(found)]
