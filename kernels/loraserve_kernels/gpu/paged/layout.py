"""Layout of adapters in a GPU's memory: rows of ranks in fixed-size pages.

They are found through a record for each sixteen ranks and layer. A rank's row of A ([in]) and of B
transposed ([out]) lies anywhere in a page, at a multiple of `UNIT_BYTES`, followed by zeros up to
the next. It never crosses a page's end. So any free pages will do for an adapter: nothing
fragments, no rank is padded to another adapter's or to a block, and a page need only be as large as
one row, the head's over its vocabulary included. δ and shifts (see `modules.LoraModule`) are
float32 rows and lie there too. An adapter's weights are in the pool's 16-bit dtype or in int8.

Kernels take ranks by tiles of `RANK_TILE`. A tile has one number for all layers; what differs by
layer stands in the tile's record for the layer, `RECORD` int32:

    A_UNITS                  16 units: where each rank's row of A starts
    B_UNITS                  16 units: of B
    DELTA_UNIT, SHIFT_UNIT   where δ and the shift start
    HAS_DELTA, HAS_SHIFT     1 where the module has one (in the module's first tile)
    MULTIPLIERS              16 float32, by their bits

A rank's multiplier is alpha / r (or alpha / sqrt(r), or the rank's own), times the scales of its
two rows when they are int8. A multiplier of zero means that there is no such rank: kernels read
neither of its rows. A module without ranks has one tile nevertheless, all of whose multipliers are
zero.

Rows that an adapter has in the place of the head's or the embedding's (`modules.ReplacedRows`) lie
in pages as well. Sixteen of them share a record; these records follow one another through all
layers of as many tiles as it takes, since both sites belong to no layer. There the units of A are
the rows', those of B their ids, ascending, and a multiplier is what the row is multiplied with (1,
or its scale in int8), zero where there is no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.sites import MODULES, SITES
from loraserve_kernels.common.sites import ModuleShapes as ModuleShapes
from loraserve_kernels.common.sizes import MAX_RANK as MAX_RANK
from loraserve_kernels.common.sizes import RANK_TILE as RANK_TILE
from loraserve_kernels.common.sizes import RECORD as RECORD
from loraserve_kernels.common.sizes import REPLACED_SITES as REPLACED_SITES
from loraserve_kernels.common.sizes import UNIT_BYTES as UNIT_BYTES
from loraserve_kernels.common.sizes import row_num_bytes as row_num_bytes
from loraserve_kernels.common.sizes import tiles_of_rows as tiles_of_rows

COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
STORED_DTYPES: tuple[torch.dtype, ...] = (*COMPUTE_DTYPES, torch.int8)

A_UNITS, B_UNITS, DELTA_UNIT, SHIFT_UNIT, HAS_DELTA, HAS_SHIFT, MULTIPLIERS = 0, 16, 32, 33, 34, 35, 48
NUM_UNITS = 34
"""The first words of a record are units."""

SITE_WORDS = 16
KIND, NUM_REPLACED, FIRST_SLICE, SLICE_WORDS = 2, 3, 4, 4
FIRST_ITEM, NUM_TILES, FIRST_TILE, HAS_ENDING = 0, 1, 2, 3
REPLACED_TILE = FIRST_SLICE + SLICE_WORDS + FIRST_TILE
REPLACED_WORK, REPLACED_GROUP = (FIRST_SLICE + 2 * SLICE_WORDS + word for word in (FIRST_ITEM, HAS_ENDING))
"""An adapter at a site, in int32 words as a plan's row tiles have them (see `gpu_plan`): at `KIND`
1 for int8 and 0 otherwise, at `NUM_REPLACED` how many rows of the base's weight it replaces; then,
for up to three slices, four words each.

`HAS_ENDING` is whether the slice has a δ or a shift at any layer. The sites whose rows can be
replaced have one slice: in the words of a second and a third, which they lack, stand the first tile
of the rows' records and, in a plan, their first piece of work and how many row tiles share it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPages:
    """Adapter as the pages that a pool will hold, and its part of the pool's tables.

    They are in the host's memory.

    Attributes:
        pages: [num_pages, page_num_bytes] uint8; whatever isn't a weight is zero.
        dtype: what the weights are stored in.
        records: [num_tiles, num_layers, RECORD] int32. Their units are those of the pool that the
            adapter was loaded into last.
        unit_pages: [num_tiles, num_layers, NUM_UNITS] int32: in which of the adapter's pages the
            row lies; num_pages where there is none.
        units_in_page: the same shape: where in the page; where there is none, the number itself
            that the record is to have.
        sites: [num_sites, SITE_WORDS] int32: the adapter at each site; tiles are counted from the
            adapter's first.
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


def shapes_of(module_shapes: ModuleShapes) -> tuple[tuple[int, int], ...]:
    """List the base's (out_features, in_features) in the order of `MODULES`.

    Zeros stand for what it lacks.
    """
    return tuple(module_shapes.get(module, (0, 0)) for module in MODULES)


def tiles_of_sites(sites: npt.NDArray[np.int32], num_layers: int) -> list[tuple[str, int, int]]:
    """List (module, first tile, tiles) of an adapter, from its words for each site.

    The tiles are those of its ranks and those of its replaced rows.
    """
    found = []
    for words, (site, modules) in zip(sites, SITES.items(), strict=True):
        for module, of_slice in zip(modules, words[FIRST_SLICE:].reshape(-1, SLICE_WORDS).tolist(), strict=False):
            if of_slice[NUM_TILES]:
                found.append((module, of_slice[FIRST_TILE], of_slice[NUM_TILES]))
        if site in REPLACED_SITES and words[NUM_REPLACED]:
            num_tiles = tiles_of_rows(int(words[NUM_REPLACED]), num_layers)
            found.append((REPLACED_SITES[site], int(words[REPLACED_TILE]), num_tiles))
    return found
