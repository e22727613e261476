"""The pool of pages that adapters lie in on a GPU.

It has the records that kernels find them by, and the slots that stand for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.modules import SITES
from loraserve_kernels.errors import PoolFull, TensorMismatch
from loraserve_kernels.gpu.paged.layout import (
    COMPUTE_DTYPES,
    FIRST_SLICE,
    FIRST_TILE,
    NUM_REPLACED,
    NUM_TILES,
    NUM_UNITS,
    RECORD,
    SITE_WORDS,
    SLICE_WORDS,
    UNIT_BYTES,
    AdapterPages,
    ModuleShapes,
    shapes_of,
)


class Pages(Protocol):
    """Source of the pages that a pool takes, by number."""

    @property
    def num_free(self) -> int: ...

    def allocate_pages(self, count: int) -> list[int]:
        """Take this many free pages; there must be as many."""
        ...

    def free_pages(self, pages: Sequence[int]) -> None:
        """Free these pages."""
        ...


class OwnPages:
    """Pages that the pool alone takes."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate_pages(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def free_pages(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class PagedPool:
    """Pages of one size on one device, and the tables of what they hold.

    Kernels find it through the tables; slots stand for resident adapters. Every address is fixed
    for the pool's life, so a captured CUDA graph serves whatever is loaded later. Slot 0 is the
    base model: it has no modules. The caller sees to it that no kernel in flight uses an adapter
    that it loads or unloads. One thread at a time.

    Attributes:
        dtype: the 16-bit dtype that kernels multiply in. Adapters are stored in it or in int8,
            mixed.
        pages: whose pages adapters lie in: the pool's own, unless its owner overrides it while it
            is empty.
        data: [num_pages * page_num_bytes] uint8, on the device.
        weights, codes, deltas: `data` as numbers of `dtype`, as int8, as float32.
        records: [max_tiles, num_layers, RECORD] int32, on the device; see `paged_layout`.
        sites: [max_slots, num_sites, SITE_WORDS] int32, in the host's memory: what a plan copies of
            the slot's adapter.
        module_shapes: (out_features, in_features) in the order of ``layout.MODULES``.
    """

    # each page of a slot was taken from `pages`, and is put back there; free tiles + tiles of all
    # slots == max_tiles

    def __init__(
        self,
        *,
        num_pages: int,
        page_num_bytes: int,
        num_layers: int,
        max_tiles: int,
        max_slots: int,
        module_shapes: ModuleShapes,
        dtype: torch.dtype,
        device: torch.device | str,
        data: Tensor | None = None,
    ) -> None:
        """Allocate the tables, and the pages unless `data` is given.

        Args:
            data: [num_pages * page_num_bytes] uint8 on the device, for pages that others use too;
                None: memory of its own.

        Raises:
            TensorMismatch: kernels can't address that many pages, or such ones, or multiply in this
                dtype; or `data` is of another size.
        """
        if dtype not in COMPUTE_DTYPES:
            raise TensorMismatch(
                f"kernels multiply in bfloat16 or float16, not {dtype} (int8 adapters lie in a pool of either)"
            )
        num_bytes = num_pages * page_num_bytes
        if page_num_bytes % UNIT_BYTES or num_bytes // UNIT_BYTES > 2**31 - 1:
            raise TensorMismatch(
                f"{num_pages} pages of {page_num_bytes} bytes; a page is a multiple of {UNIT_BYTES}, "
                f"a pool under {2**31 * UNIT_BYTES} bytes"
            )
        self.dtype = dtype
        self.page_num_bytes = page_num_bytes
        self.num_layers = num_layers
        self.module_shapes = shapes_of(module_shapes)
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device) if data is None else data
        if self.data.shape != (num_bytes,) or self.data.dtype != torch.uint8 or not self.data.is_contiguous():
            raise TensorMismatch(
                f"the memory of {num_pages} pages of {page_num_bytes} bytes is {tuple(self.data.shape)} "
                f"{self.data.dtype}"
            )
        self.weights = self.data.view(dtype)
        self.codes = self.data.view(torch.int8)
        self.deltas = self.data.view(torch.float32)
        self.records = torch.zeros((max(1, max_tiles), num_layers, RECORD), dtype=torch.int32, device=device)
        self.sites: npt.NDArray[np.int32] = np.zeros((max_slots, len(SITES), SITE_WORDS), dtype=np.int32)
        self.pages: Pages = OwnPages(num_pages)
        self._tile_is_used = np.zeros(max_tiles, dtype=np.bool_)
        self._free_slots = list(range(max_slots - 1, 0, -1))
        self._loaded: dict[int, tuple[list[int], slice]] = {}

    @property
    def num_free_pages(self) -> int:
        return self.pages.num_free

    @property
    def max_slots(self) -> int:
        return len(self.sites)

    def can_load(self, num_pages: int, num_tiles: int, leaving: Iterable[int] = ()) -> bool:
        """Check whether `load` has room for an adapter of that many pages and tiles.

        The slots in `leaving` count as unloaded.
        """
        slots = list(leaving)
        is_used, num_free = self._tile_is_used.copy(), self.pages.num_free
        for slot in slots:
            pages, tiles = self._loaded[slot]
            is_used[tiles] = False
            num_free += len(pages)
        has_slot = bool(self._free_slots or slots)
        return has_slot and num_pages <= num_free and _free_run(is_used, num_tiles) is not None

    def load(self, adapter: AdapterPages, *, non_blocking: bool = False) -> int:
        """Copy an adapter into free pages and return its slot.

        Plans may name it as soon as the copies are done.

        Args:
            non_blocking: only enqueue the copies, on the current stream, and return. The adapter's
                tensors must be pinned (``make_pages(pin_memory=True)``), be kept and be neither
                changed nor loaded again until an event that is recorded after this call has passed.

        Raises:
            TensorMismatch: its pages were made for another pool.
            PoolFull: too few free pages, tiles or slots; nothing has changed.
        """
        num_pages, page_num_bytes = adapter.pages.shape
        dtypes = (self.dtype, torch.int8)
        found = (page_num_bytes, adapter.unit_pages.shape[1], adapter.module_shapes)
        if found != (self.page_num_bytes, self.num_layers, self.module_shapes) or adapter.dtype not in dtypes:
            raise TensorMismatch("the adapter's pages were made for another page size, dtype or base than the pool's")
        tiles = _free_run(self._tile_is_used, adapter.num_tiles)
        if tiles is None or num_pages > self.pages.num_free or not self._free_slots:
            raise PoolFull(
                f"the adapter takes {num_pages} pages, {adapter.num_tiles} tiles and a slot; "
                f"free are {self.pages.num_free}, {int((~self._tile_is_used).sum())} and {len(self._free_slots)}"
            )
        slot, pages = self._free_slots.pop(), self.pages.allocate_pages(num_pages)
        self._tile_is_used[tiles] = True
        self._loaded[slot] = (pages, tiles)
        # a unit of no page stands behind the last, and stands for itself: 0, or the id of a
        # replaced row
        first_units = np.array([*pages, 0], dtype=np.int32) * np.int32(page_num_bytes // UNIT_BYTES)
        adapter.records.numpy()[..., :NUM_UNITS] = first_units[adapter.unit_pages] + adapter.units_in_page
        for first, count in _runs(pages):
            start = pages[first] * page_num_bytes
            source = adapter.pages[first : first + count].view(-1)
            self.data[start : start + source.numel()].copy_(source, non_blocking=non_blocking)
        self.records[tiles].copy_(adapter.records, non_blocking=non_blocking)
        self.sites[slot] = adapter.sites
        self.sites[slot, :, FIRST_SLICE + FIRST_TILE :: SLICE_WORDS] += np.int32(tiles.start)
        return slot

    def unload(self, slot: int) -> None:
        """Free the slot, its pages and tiles.

        Raises:
            KeyError: no adapter is loaded in this slot.
        """
        pages, tiles = self._loaded.pop(slot)
        self.pages.free_pages(pages)
        self._tile_is_used[tiles] = False
        self.sites[slot, :, FIRST_SLICE + NUM_TILES :: SLICE_WORDS] = 0
        self.sites[slot, :, NUM_REPLACED] = 0
        self._free_slots.append(slot)


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """Group pages that follow one another in the pool into runs, each as (first, how many).

    One copy takes a whole run.
    """
    edges = [i for i in range(len(pages)) if i == 0 or pages[i] != pages[i - 1] + 1]
    return [(first, end - first) for first, end in pairwise([*edges, len(pages)])]


def _free_run(is_used: npt.NDArray[np.bool_], length: int) -> slice | None:
    edges = np.flatnonzero(np.diff(is_used, prepend=True, append=True))
    # the mask starts and ends as used, so edges come in pairs: a free run's start, its end
    for start, end in edges.reshape(-1, 2).tolist():
        if end - start >= length:
            return slice(start, start + length)
    return slice(0, 0) if length == 0 else None
