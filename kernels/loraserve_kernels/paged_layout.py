"""How adapters lie in a GPU's memory: blocks of eight ranks in fixed-size pages of one pool, found through tables of offsets.

For each layer and module, A ([r, in]) and B transposed ([r, out]) are cut into rank blocks of `RANK_BLOCK` rows. A row is followed by zeros
up to a multiple of `UNIT` elements, and a block's missing rows are zero. A block never crosses a page's end, so any free pages will do for an
adapter: nothing fragments, no rank is padded to another adapter's, and at most seven ranks per module are padding.

Kernels take ranks by tiles of `RANK_TILE`, two blocks each. A tile has one number for all layers; what differs by layer stands in three tables of
the pool: where the tile's blocks of A and of B start, in units of `UNIT` elements, and one float32 multiplier per rank, which is
alpha / r (or alpha / sqrt(r)) times the rank's scales when the weights are int8. A multiplier of zero means that there is no such rank: kernels read
neither of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.errors import PoolFull, ShapeMismatch
from loraserve_kernels.layout import MODULE_INDEX, MODULES, LoraModule
from loraserve_kernels.reference import quantize_rows

RANK_BLOCK = 8
RANK_TILE = 16
UNIT = 16
MAX_RANK = 512
POOL_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.int8)

ModuleShapes = Mapping[str, tuple[int, int]]


def row_stride(width: int) -> int:
    """Elements from one rank's row to the next."""
    return -(-width // UNIT) * UNIT


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPages:
    """One adapter as the pages that a pool will hold, in the host's memory, and its part of the pool's tables.

    Attributes:
        pages: [num_pages, page_num_elements]; whatever isn't a weight is zero.
        a_units, b_units: [num_layers, 2 * tiles] int32: where each block starts, in units counted through the adapter's own pages; 0 where there is none.
        multipliers: [num_layers, 16 * tiles] float32.
        first_tiles: [7] int32, columns as in `MODULES`: a module's first tile, counted from the adapter's first.
        num_tiles: [7] int32: how many the module has at the layer where its rank is highest; 0 where the adapter has no such module.
        module_shapes: of the base.
    """

    pages: Tensor
    a_units: npt.NDArray[np.int32]
    b_units: npt.NDArray[np.int32]
    multipliers: npt.NDArray[np.float32]
    first_tiles: npt.NDArray[np.int32]
    num_tiles: npt.NDArray[np.int32]
    module_shapes: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()


def num_pages_of(
    ranks: Iterable[tuple[int, str, int]], *, num_layers: int, module_shapes: ModuleShapes, page_num_elements: int
) -> int:
    """Pages that `make_pages` will fill for an adapter with these (layer, module, rank), without a tensor at hand.

    Raises:
        ShapeMismatch: as `make_pages`.
    """
    placing = _Placing(page_num_elements)
    for _, module, rank in _checked(ranks, num_layers, module_shapes):
        _place_module(placing, rank, module_shapes[module])
    return placing.num_pages


def make_pages(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: ModuleShapes,
    page_num_elements: int,
    dtype: torch.dtype,
) -> AdapterPages:
    """Copy an adapter's matrices into new pages, layer by layer; int8 gives each rank's row of A and of B a scale of its own.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks from 1 to `MAX_RANK`.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base.
        page_num_elements: the pool's, a multiple of `UNIT`.
        dtype: the pool's: bfloat16, float16 or int8.

    Raises:
        ShapeMismatch: a module that doesn't fit the base, one given twice, a rank over `MAX_RANK`, a dtype that pools don't have, or a page too
            small for eight rows of the base.
    """
    if dtype not in POOL_DTYPES:
        raise ShapeMismatch(f"pools hold bfloat16, float16 or int8, not {dtype}")
    if page_num_elements % UNIT or page_num_elements < UNIT:
        raise ShapeMismatch(f"a page of {page_num_elements} elements; it must be a multiple of {UNIT}")
    by_place = {(m.layer, m.module): m for m in modules}
    wanted = _checked(((m.layer, m.module, m.lora_a.shape[0]) for m in modules), num_layers, module_shapes)
    num_tiles = np.zeros(len(MODULES), dtype=np.int32)
    for _, module, rank in wanted:
        index = MODULE_INDEX[module]
        num_tiles[index] = max(num_tiles[index], -(-rank // RANK_TILE))
    first_tiles = (np.cumsum(num_tiles) - num_tiles).astype(np.int32)
    num_blocks = 2 * int(num_tiles.sum())
    a_units, b_units = (np.zeros((num_layers, num_blocks), dtype=np.int32) for _ in range(2))
    multipliers = np.zeros((num_layers, num_blocks * RANK_BLOCK), dtype=np.float32)

    placing = _Placing(page_num_elements)
    placed = [
        (by_place[layer, module], _place_module(placing, rank, module_shapes[module])) for layer, module, rank in wanted
    ]
    pages = torch.zeros((placing.num_pages, page_num_elements), dtype=dtype)
    flat = pages.view(-1)
    for m, (a_starts, b_starts) in placed:
        out_features, in_features = module_shapes[m.module]
        rank = m.lora_a.shape[0]
        if tuple(m.lora_a.shape) != (rank, in_features) or tuple(m.lora_b.shape) != (out_features, rank):
            raise ShapeMismatch(
                f"layer {m.layer} {m.module}: lora_a {tuple(m.lora_a.shape)} and lora_b {tuple(m.lora_b.shape)}; "
                f"this base takes (r, {in_features}) and ({out_features}, r)"
            )
        a, b = m.lora_a, m.lora_b.T
        scales = np.full(rank, m.scaling, dtype=np.float32)
        if dtype == torch.int8:
            (a, a_scale), (b, b_scale) = quantize_rows(a.float(), 127), quantize_rows(b.float(), 127)
            scales *= (a_scale * b_scale).numpy()
        first = 2 * int(first_tiles[MODULE_INDEX[m.module]])
        multipliers[m.layer, first * RANK_BLOCK : first * RANK_BLOCK + rank] = scales
        for units, starts, matrix in ((a_units, a_starts, a), (b_units, b_starts, b)):
            units[m.layer, first : first + len(starts)] = np.array(starts) // UNIT
            width = matrix.shape[1]
            for i, start in enumerate(starts):
                rows = matrix[i * RANK_BLOCK : (i + 1) * RANK_BLOCK]
                block = flat[start : start + RANK_BLOCK * row_stride(width)].view(RANK_BLOCK, -1)
                block[: rows.shape[0], :width] = rows
    return AdapterPages(pages, a_units, b_units, multipliers, first_tiles, num_tiles, _shapes(module_shapes))


class PagedPool:
    """Pages of one size on one device, the tables through which kernels find what they hold, and the slots that stand for resident adapters.

    Every address is fixed for the pool's life, so a captured CUDA graph serves whatever is loaded later. Slot 0 is the base model: it has no modules. The
    caller sees to it that no kernel in flight uses an adapter that it loads or unloads.

    Attributes:
        data: [num_pages * page_num_elements].
        a_units, b_units: [num_layers, 2 * max_tiles] int32, on the device.
        multipliers: [num_layers, 16 * max_tiles] float32, on the device.
        first_tiles, num_tiles: [max_slots, 7] int32, in the host's memory: slot → its tiles by module.
    """

    # free pages + pages of all slots == num_pages; the same for tiles

    def __init__(
        self,
        *,
        num_pages: int,
        page_num_elements: int,
        num_layers: int,
        max_tiles: int,
        max_slots: int,
        module_shapes: ModuleShapes,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if dtype not in POOL_DTYPES:
            raise ShapeMismatch(f"pools hold bfloat16, float16 or int8, not {dtype}")
        if page_num_elements % UNIT or num_pages * page_num_elements // UNIT > 2**31 - 1:
            raise ShapeMismatch(
                f"{num_pages} pages of {page_num_elements} elements; a page is a multiple of {UNIT}, a pool under {2**31 * UNIT} elements"
            )
        # a layer's row of each table starts at a multiple of 64 bytes, so that every layer runs the same compiled kernel
        max_tiles = -(-max_tiles // 8) * 8
        self.page_num_elements = page_num_elements
        self.num_layers = num_layers
        self.module_shapes = _shapes(module_shapes)
        self.data = torch.empty(num_pages * page_num_elements, dtype=dtype, device=device)
        self.a_units = torch.zeros((num_layers, 2 * max_tiles), dtype=torch.int32, device=device)
        self.b_units = torch.zeros_like(self.a_units)
        self.multipliers = torch.zeros((num_layers, RANK_TILE * max_tiles), dtype=torch.float32, device=device)
        self.first_tiles = np.zeros((max_slots, len(MODULES)), dtype=np.int32)
        self.num_tiles = np.zeros_like(self.first_tiles)
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._tile_is_used = np.zeros(max_tiles, dtype=np.bool_)
        self._free_slots = list(range(max_slots - 1, 0, -1))
        self._loaded: dict[int, tuple[list[int], slice]] = {}

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def load(self, adapter: AdapterPages) -> int:
        """Copy an adapter into free pages, one copy a page, and return its slot.

        Raises:
            ShapeMismatch: its pages were made for another pool.
            PoolFull: too few free pages, tiles or slots; nothing has changed.
        """
        num_pages, page_num_elements = adapter.pages.shape
        found = (page_num_elements, adapter.pages.dtype, len(adapter.multipliers), adapter.module_shapes)
        if found != (self.page_num_elements, self.data.dtype, self.num_layers, self.module_shapes):
            raise ShapeMismatch("the adapter's pages were made for another page size, dtype or base than the pool's")
        tiles = self._free_run(int(adapter.num_tiles.sum()))
        if tiles is None or num_pages > len(self._free_pages) or not self._free_slots:
            raise PoolFull(
                f"the adapter takes {num_pages} pages, {int(adapter.num_tiles.sum())} tiles and a slot; "
                f"free are {len(self._free_pages)}, {int((~self._tile_is_used).sum())} and {len(self._free_slots)}"
            )
        slot, pages = self._free_slots.pop(), [self._free_pages.pop() for _ in range(num_pages)]
        self._tile_is_used[tiles] = True
        self._loaded[slot] = (pages, tiles)
        for source, page in zip(adapter.pages, pages, strict=True):
            self.data[page * page_num_elements : (page + 1) * page_num_elements].copy_(source)
        units_per_page = page_num_elements // UNIT
        first_unit = np.array(pages, dtype=np.int32) * units_per_page
        blocks = slice(2 * tiles.start, 2 * tiles.stop)
        is_block = adapter.multipliers.reshape(*adapter.a_units.shape, RANK_BLOCK).any(axis=2)
        for table, units in ((self.a_units, adapter.a_units), (self.b_units, adapter.b_units)):
            placed = first_unit[units // units_per_page] + units % units_per_page
            table[:, blocks] = torch.from_numpy(np.where(is_block, placed, 0).astype(np.int32))
        ranks = slice(RANK_TILE * tiles.start, RANK_TILE * tiles.stop)
        self.multipliers[:, ranks] = torch.from_numpy(adapter.multipliers)
        self.first_tiles[slot] = adapter.first_tiles + tiles.start
        self.num_tiles[slot] = adapter.num_tiles
        return slot

    def unload(self, slot: int) -> None:
        """Free the slot, its pages and tiles.

        Raises:
            KeyError: no adapter is loaded in this slot.
        """
        pages, tiles = self._loaded.pop(slot)
        self._free_pages.extend(pages)
        self._tile_is_used[tiles] = False
        self.num_tiles[slot] = 0
        self._free_slots.append(slot)

    def _free_run(self, length: int) -> slice | None:
        edges = np.flatnonzero(np.diff(self._tile_is_used, prepend=True, append=True))
        # the mask starts and ends as used, so edges come in pairs: a free run's start, its end
        for start, end in edges.reshape(-1, 2).tolist():
            if end - start >= length:
                return slice(start, start + length)
        return slice(0, 0) if length == 0 else None


class _Placing:
    """First fit of pieces into pages."""

    def __init__(self, page_num_elements: int) -> None:
        self._page_num_elements = page_num_elements
        self._used: list[int] = []
        self._first_open = 0

    @property
    def num_pages(self) -> int:
        return len(self._used)

    def place(self, num_elements: int) -> int:
        if num_elements > self._page_num_elements:
            raise ShapeMismatch(
                f"eight ranks of a module take {num_elements} elements; a page has {self._page_num_elements}: make pages larger"
            )
        for page in range(self._first_open, len(self._used)):
            if self._used[page] + num_elements <= self._page_num_elements:
                break
        else:
            page = len(self._used)
            self._used.append(0)
            # pages far behind are nearly full: looking at the last eight alone keeps the search short
            self._first_open = max(0, page - 8)
        start = page * self._page_num_elements + self._used[page]
        self._used[page] += num_elements
        return start


def _place_module(placing: _Placing, rank: int, shape: tuple[int, int]) -> tuple[list[int], list[int]]:
    num_blocks, (out_features, in_features) = -(-rank // RANK_BLOCK), shape
    a = [placing.place(RANK_BLOCK * row_stride(in_features)) for _ in range(num_blocks)]
    b = [placing.place(RANK_BLOCK * row_stride(out_features)) for _ in range(num_blocks)]
    return a, b


def _checked(
    ranks: Iterable[tuple[int, str, int]], num_layers: int, module_shapes: ModuleShapes
) -> list[tuple[int, str, int]]:
    """(layer, module, rank) in the order in which they are placed."""
    found: dict[tuple[int, int], tuple[int, str, int]] = {}
    for layer, module, rank in ranks:
        if not 0 <= layer < num_layers:
            raise ShapeMismatch(f"LoRA on layer {layer}; this base has layers 0 to {num_layers - 1}")
        if module not in MODULE_INDEX or module not in module_shapes:
            raise ShapeMismatch(f"layer {layer} has LoRA on {module}; this base has {', '.join(module_shapes)}")
        place = (layer, MODULE_INDEX[module])
        if not 1 <= rank <= MAX_RANK or place in found:
            raise ShapeMismatch(
                f"layer {layer} {module}: rank {rank} (from 1 to {MAX_RANK}), or the module is given twice"
            )
        found[place] = (layer, module, rank)
    return [found[place] for place in sorted(found)]


def _shapes(module_shapes: ModuleShapes) -> tuple[tuple[int, int], ...]:
    return tuple(module_shapes.get(module, (0, 0)) for module in MODULES)
