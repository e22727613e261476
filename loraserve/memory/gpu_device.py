"""Adapters in a GPU's pool of pages: packed into pinned memory by workers, copied beside the steps, found by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from loraserve.errors import AdapterUnavailable, ConfigError, InvariantViolation
from loraserve.limits import MIB
from loraserve.memory.copies import Copies, CudaCopies, DirectCopies
from loraserve.memory.device import DTYPE_NAMES, Footprint, HostAdapter, Placed, refuse_out_of_range
from loraserve.types import BaseSpec
from loraserve_kernels import threads
from loraserve_kernels.errors import PoolFull
from loraserve_kernels.layout import MODULES, LoraModule
from loraserve_kernels.paged_layout import (
    MAX_RANK,
    RANK_BLOCK,
    RANK_TILE,
    UNIT,
    AdapterPages,
    PagedPool,
    make_pages,
    num_pages_of,
    row_stride,
)

PAGE_BYTES = 2 * MIB
"""At most, unless eight rows of the base's widest linear take more."""
TABLES_SHARE = 1 / 128
"""Of the budget, for the tables."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    """An adapter's pages in host memory, pinned beside a GPU."""

    pages: AdapterPages
    num_bytes: int
    """What they take there, which may be more than they hold."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How a budget of bytes is divided into a pool; see `PagedPool`."""

    num_pages: int
    page_num_elements: int
    max_tiles: int
    max_slots: int


def adapter_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a GPU holds adapters: ``auto`` is that of the activations.

    Raises:
        ConfigError: a name that isn't one of auto, bf16, fp16 and int8.
    """
    names: Mapping[str, torch.dtype] = {
        "auto": compute_dtype,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "int8": torch.int8,
    }
    if name not in names:
        raise ConfigError(f"Adapters can't be held in {name!r}; expected one of {', '.join(names)}.")
    return names[name]


def pool_size(base: BaseSpec, budget_bytes: int, dtype: torch.dtype) -> PoolSize:
    """Divide a budget so that pages are what runs out first.

    A page is small beside an adapter: a sixteenth of one with eight ranks everywhere, at most `PAGE_BYTES`. Every adapter takes a page, so there are as many
    slots as pages. Tables take a share of the budget that has several tiles for each one that such adapters would use: runs of free
    tiles stay long, and only adapters on very few layers can run out of tiles before pages.

    Raises:
        ConfigError: the budget holds no page.
    """
    block_elements = [RANK_BLOCK * row_stride(width) for shape in base.modules.values() for width in shape]
    small_adapter = base.num_layers * sum(block_elements)
    page = max(max(block_elements), min(PAGE_BYTES // dtype.itemsize, small_adapter // 16))
    # whole cache lines, whatever the dtype
    page = -(-page // 128) * 128
    # two blocks of A and of B, and sixteen multipliers, in each layer
    tile_bytes = base.num_layers * (4 * 4 + RANK_TILE * 4)
    largest = len(base.modules) * MAX_RANK // RANK_TILE
    floor = min(4 * largest, budget_bytes // 8 // tile_bytes)
    max_tiles = max(8, floor, int(budget_bytes * TABLES_SHARE) // tile_bytes) // 8 * 8
    num_pages = (budget_bytes - max_tiles * tile_bytes) // (page * dtype.itemsize)
    # kernels count in int32 units
    num_pages = min(num_pages, (2**31 - 1) * UNIT // page)
    if num_pages < 1:
        raise ConfigError(
            f"The adapters' part of the memory budget, {budget_bytes:,} bytes, doesn't hold a page of {page * dtype.itemsize:,}.",
            hint="Raise --memory-budget or --adapter-share.",
        )
    return PoolSize(num_pages, page, max_tiles, num_pages + 1)


class GpuDevice:
    """A `PagedPool` as the place of resident adapters. An adapter's handle is its slot.

    An adapter's tiles are one run of the pool's tables, so free tiles may be too scattered for it: `can_lay_out` knows. Whoever is idle is evicted until a
    run is free; nothing is moved.

    Invariants (`check`):
        free pages + pages of what is placed == pages of the pool; the tiles in use are those of what is placed, each of one adapter.

    Attributes:
        pool: what the kernels' plan and launches take.
    """

    is_host_memory = False

    def __init__(self, base: BaseSpec, pool: PagedPool, copies: Copies) -> None:
        """
        Args:
            pool: empty, made for `base`; nobody else loads into it.
            copies: to the pool's device.
        """
        self.pool = pool
        self._base = base
        self._copies = copies
        self._dtype = pool.data.dtype
        self._page_bytes = pool.page_num_elements * self._dtype.itemsize
        self._tile_is_used = np.zeros(pool.multipliers.shape[1] // RANK_TILE, dtype=np.bool_)
        # the longest run of free tiles, until something is placed or removed
        self._longest_run: int | None = None
        self._tiles: dict[int, slice] = {}
        self._landings: dict[int, Callable[[], bool]] = {}
        self.limits = Footprint(
            pool.num_free_pages * self._page_bytes, len(self._tile_is_used), len(pool.num_tiles) - 1
        )

    @classmethod
    def of_size(cls, base: BaseSpec, budget_bytes: int, dtype: torch.dtype, device: torch.device) -> GpuDevice:
        """A device with a new pool of that many bytes, tables included.

        Raises:
            ConfigError: the budget holds no page.
        """
        size = pool_size(base, budget_bytes, dtype)
        pool = PagedPool(
            num_pages=size.num_pages,
            page_num_elements=size.page_num_elements,
            num_layers=base.num_layers,
            max_tiles=size.max_tiles,
            max_slots=size.max_slots,
            module_shapes=base.modules,
            dtype=dtype,
            device=device,
        )
        return cls(base, pool, CudaCopies(device) if device.type == "cuda" else DirectCopies())

    def footprint(self, modules: Sequence[LoraModule], stored: torch.dtype) -> Footprint:
        ranks = [(m.layer, m.module, m.lora_a.shape[0]) for m in modules]
        num_pages = num_pages_of(
            ranks,
            num_layers=self._base.num_layers,
            module_shapes=self._base.modules,
            page_num_elements=self.pool.page_num_elements,
        )
        num_tiles: dict[str, int] = {}
        for _, module, rank in ranks:
            num_tiles[module] = max(num_tiles.get(module, 0), -(-rank // RANK_TILE))
        return Footprint(num_pages * self._page_bytes, sum(num_tiles.values()), 1)

    def pack(self, modules: Sequence[LoraModule], stored: torch.dtype) -> HostPages:
        refuse_out_of_range(modules, stored, self._dtype)
        with threads.alone():
            pages = make_pages(
                modules,
                num_layers=self._base.num_layers,
                module_shapes=self._base.modules,
                page_num_elements=self.pool.page_num_elements,
                dtype=self._dtype,
            )
            _refuse_infinite_multipliers(pages, self._dtype)
            pinned, num_bytes = self._copies.to_pinned(pages.pages)
        return HostPages(replace(pages, pages=pinned), num_bytes)

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        pages = self._pages(packed)
        return Footprint(pages.pages.shape[0] * self._page_bytes, int(pages.num_tiles.sum()), 1)

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[Placed] = ()) -> bool:
        if self._longest_run is None:
            self._longest_run = _longest_run(self._tile_is_used)
        if footprint.num_tiles <= self._longest_run:
            return True
        is_used = self._tile_is_used.copy()
        for placed in leaving:
            is_used[self._tiles[self._slot(placed)]] = False
        return footprint.num_tiles <= _longest_run(is_used)

    def place(self, packed: HostAdapter) -> Placed:
        pages = self._pages(packed)
        try:
            slot, has_landed = self._copies.start(lambda: self.pool.load(pages))
        except PoolFull as error:
            raise InvariantViolation(f"An adapter was placed where there is no room: {error}") from error
        num_tiles = self.pool.num_tiles[slot]
        start = int(self.pool.first_tiles[slot][num_tiles > 0].min(initial=len(self._tile_is_used)))
        self._tiles[slot] = slice(start, start + int(num_tiles.sum()))
        self._tile_is_used[self._tiles[slot]] = True
        self._longest_run = None
        self._landings[slot] = has_landed
        return Placed(slot, self.footprint_of(packed))

    def is_ready(self, placed: Placed) -> bool:
        has_landed = self._landings.get(self._slot(placed))
        if has_landed is not None and has_landed():
            del self._landings[self._slot(placed)]
            return True
        return has_landed is None

    def remove(self, placed: Placed) -> HostAdapter | None:
        slot = self._slot(placed)
        self.pool.unload(slot)
        self._tile_is_used[self._tiles.pop(slot)] = False
        self._longest_run = None
        # a copy that is still on its way lands before any later one, on the same stream
        self._landings.pop(slot, None)
        return None

    def step_launched(self) -> None:
        self._copies.step_launched()

    def check(self, placed: Sequence[Placed]) -> list[str]:
        problems: list[str] = []
        num_pages = sum(p.footprint.num_bytes for p in placed) // self._page_bytes
        if (num_pages + self.pool.num_free_pages) * self._page_bytes != self.limits.num_bytes:
            problems.append(
                f"adapter pages: {num_pages} are in use and {self.pool.num_free_pages} free, which isn't all of them"
            )
        owners = np.zeros(len(self._tile_is_used), dtype=np.int32)
        for tiles in self._tiles.values():
            owners[tiles] += 1
        if (owners > 1).any():
            problems.append("adapter tiles: one belongs to two adapters")
        if (owners.astype(np.bool_) != self._tile_is_used).any():
            problems.append("adapter tiles: those in use aren't those of the adapters")
        if {self._slot(p) for p in placed} != self._tiles.keys() or 0 in self._tiles:
            problems.append("adapter slots: those in use aren't those of the adapters")
        return problems

    def _pages(self, packed: HostAdapter) -> AdapterPages:
        if not isinstance(packed, HostPages):
            raise InvariantViolation("An adapter that was packed for another device can't be placed on this GPU.")
        return packed.pages

    def _slot(self, placed: Placed) -> int:
        if not isinstance(placed.handle, int):
            raise InvariantViolation("An adapter on another device has no slot here.")
        return placed.handle


def _longest_run(is_used: npt.NDArray[np.bool_]) -> int:
    # the mask starts and ends as used, so edges come in pairs: a free run's start, its end
    edges = np.flatnonzero(np.diff(is_used, prepend=True, append=True)).reshape(-1, 2)
    return int((edges[:, 1] - edges[:, 0]).max(initial=0))


def _refuse_infinite_multipliers(pages: AdapterPages, dtype: torch.dtype) -> None:
    """A rank's multiplier is its scaling, times its rows' scales in int8."""
    found = np.argwhere(~np.isfinite(pages.multipliers))
    if not len(found):
        return
    layer, rank = found[0].tolist()
    tile = rank // RANK_TILE
    index = int(np.flatnonzero((pages.first_tiles <= tile) & (tile < pages.first_tiles + pages.num_tiles))[0])
    raise AdapterUnavailable(
        f"Layer {layer} {MODULES[index]} has weights so large that their scales in {DTYPE_NAMES[dtype]} have no finite product.",
        hint="Serve with --adapter-dtype bf16.",
    )
