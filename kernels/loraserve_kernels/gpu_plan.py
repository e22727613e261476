"""Which rows of a step belong to which adapter, as the GPU's kernels read it: one buffer at one address, filled once a step for all layers.

The buffer is int32. Its first `HEADER` numbers say, for each site in turn, how many work items there are, where they start, how many row tiles there are
and where they start (in elements of the buffer); kernels read the counts there, so one captured CUDA graph serves every mix of adapters,
ranks and rows. At `HEADER` stands the permutation: token rows sorted by adapter, base rows left out. Then, packed:

    work item (shrink)   row0, num_rows, tile, 0: sixteen ranks of one module for up to block_m rows of one adapter
    row tile (expand)    row0, num_rows, 0, 0, then for each of up to three slices: first work item, work items, first tile, 0; all 0 at the end

row0 counts in the permutation. Item i leaves its sums at place i of `scratch`, so a row tile finds a slice's sums one after the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.errors import InvalidPlan, ShapeMismatch
from loraserve_kernels.layout import MODULE_INDEX, SITES
from loraserve_kernels.paged_layout import RANK_TILE, PagedPool

BLOCK_K = 128
HEADER = -(-4 * len(SITES) // 16) * 16
ITEM = 4
ROW_TILE = 16
ROWS_OF_A_TILE = (16, 32)
"""Rows that a tile may hold, small for decoding and large for prefill: below 64 the tensor cores take their first operand from registers safely."""

SITE_INDEX: dict[str, int] = {site: index for index, site in enumerate(SITES)}


def split_k(in_features: int) -> int:
    """Into how many parts shrink cuts a row's sum: fixed by its length, never by the batch, so a row's bits don't depend on what shares its step."""
    return min(16, max(1, in_features // 512))


class GpuLoraPlan:
    """The step's rows by adapter, and the scratch memory between shrink and expand. Addresses are fixed for the plan's life; one step at a time.

    Attributes:
        pool: where the adapters lie.
        block_m: rows of a tile.
        num_tokens: rows of the step that was filled in last; 0 before.
        buffer: int32, on the pool's device; see the module's docstring.
        scratch: [max_work_items, split_k, block_m, 16] float32, on the pool's device; a site with a lower split_k packs its items closer.
    """

    def __init__(self, pool: PagedPool, *, max_num_tokens: int, max_work_items: int, block_m: int = 16) -> None:
        """Allocate for the largest step: buffers in the host's memory (pinned beside a GPU) and on the pool's device.

        Args:
            pool: kept for the plan's life.
            max_num_tokens: rows.
            max_work_items: of one site; for each tile of rows, the sum over the site's modules of rank / 16, rounded up.
            block_m: one of `ROWS_OF_A_TILE`.

        Raises:
            InvalidPlan: a block_m that the kernels don't have.
        """
        if block_m not in ROWS_OF_A_TILE:
            raise InvalidPlan(f"tiles of {block_m} rows; the kernels have {ROWS_OF_A_TILE}")
        self.pool = pool
        self.block_m = block_m
        self.num_tokens = 0
        self._max_num_tokens = max_num_tokens
        self._max_work_items = max_work_items
        device = pool.data.device
        # a row tile has at least one work item
        num_elements = HEADER + max_num_tokens + 16 + len(SITES) * (max_work_items * (ITEM + ROW_TILE) + 16)
        self.buffer = torch.zeros(num_elements, dtype=torch.int32, device=device)
        self._staged = torch.zeros(num_elements, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host: npt.NDArray[np.int32] = self._staged.numpy()
        most = max(split_k(shape[1]) for shape in pool.module_shapes)
        self.scratch = torch.empty(max_work_items * most * block_m * RANK_TILE, dtype=torch.float32, device=device)

    def fill(self, row_slots: npt.NDArray[np.int32]) -> bool:
        """Describe the next step and send it to the device in one copy; False when every row is the base's, so that the step launches no LoRA kernel.

        The copy doesn't wait: call again only once the last one is done, as it is when that step's result is known.

        Args:
            row_slots: [num_tokens]: the slot of each row's adapter in the pool; 0 for a base row.

        Raises:
            InvalidPlan: more rows or work items than the plan was made for, or a slot that the pool doesn't have; the last step stands.
        """
        if len(row_slots) > self._max_num_tokens:
            raise InvalidPlan(f"a step of {len(row_slots)} rows; this plan was made for {self._max_num_tokens}")
        if len(row_slots) and not 0 <= int(row_slots.min()) <= int(row_slots.max()) < len(self.pool.num_tiles):
            raise InvalidPlan(f"slots {row_slots.min()} to {row_slots.max()}; the pool has {len(self.pool.num_tiles)}")
        num_elements = self._describe(row_slots)
        self.num_tokens = len(row_slots)
        if num_elements:
            self.buffer[:num_elements].copy_(self._staged[:num_elements], non_blocking=True)
        return num_elements > 0

    def _describe(self, row_slots: npt.NDArray[np.int32]) -> int:
        """Write the step's description to the host's buffer; its length, or 0 when there is nothing to do."""
        order = np.argsort(row_slots, kind="stable").astype(np.int32)
        perm = order[len(order) - np.count_nonzero(row_slots) :]
        slots = row_slots[perm]
        starts = np.flatnonzero(np.diff(slots, prepend=0))
        sizes = np.diff(starts, append=len(slots))
        tiles_of_group = -(-sizes // self.block_m)
        group = np.repeat(np.arange(len(starts)), tiles_of_group)
        first_tile_of_group = np.cumsum(tiles_of_group) - tiles_of_group
        done = (np.arange(len(group)) - first_tile_of_group[group]) * self.block_m
        row0 = starts[group] + done
        num_rows = np.minimum(self.block_m, sizes[group] - done)
        tile_slots = slots[row0]

        header = np.zeros((len(SITES), 4), dtype=np.int32)
        parts: list[npt.NDArray[np.int32]] = []
        position = HEADER + -(-len(perm) // 16) * 16
        for site, modules in SITES.items():
            first = MODULE_INDEX[modules[0]]
            columns = slice(first, first + len(modules))
            counts = self.pool.num_tiles[tile_slots, columns]
            kept = np.flatnonzero(counts.any(axis=1))
            counts, first_tiles = counts[kept], self.pool.first_tiles[tile_slots[kept], columns]
            flat = counts.ravel()
            first_items = np.cumsum(flat) - flat
            num_items = int(flat.sum())
            if num_items > self._max_work_items:
                raise InvalidPlan(
                    f"{num_items} work items at site {site}; this plan was made for {self._max_work_items}: admit fewer rows with high ranks"
                )
            row_tiles = np.zeros((len(kept), ROW_TILE), dtype=np.int32)
            row_tiles[:, 0], row_tiles[:, 1] = row0[kept], num_rows[kept]
            for s in range(len(modules)):
                row_tiles[:, 4 + 4 * s] = first_items.reshape(counts.shape)[:, s]
                row_tiles[:, 5 + 4 * s] = counts[:, s]
                row_tiles[:, 6 + 4 * s] = first_tiles[:, s]
            # the (row tile, slice) of each item
            owner = np.repeat(np.arange(len(flat)), flat)
            items = np.zeros((num_items, ITEM), dtype=np.int32)
            row_tile = kept[owner // len(modules)]
            items[:, 0], items[:, 1] = row0[row_tile], num_rows[row_tile]
            items[:, 2] = first_tiles.ravel()[owner] + np.arange(num_items) - first_items[owner]
            items_end = position + -(-items.size // 16) * 16
            header[SITE_INDEX[site]] = num_items, position, len(kept), items_end
            parts += [items.ravel(), row_tiles.ravel()]
            position = items_end + row_tiles.size
        if not header[:, 0].any():
            return 0
        self._host[:HEADER] = header.ravel()
        self._host[HEADER : HEADER + len(perm)] = perm
        for site_index in range(len(SITES)):
            for which in (0, 1):
                part, start = parts[2 * site_index + which], int(header[site_index, 1 + 2 * which])
                self._host[start : start + part.size] = part
        return position

    def check_layer(self, site: str, layer: int) -> None:
        """Raises: ShapeMismatch: no such layer or site."""
        if site not in SITES or not 0 <= layer < self.pool.num_layers:
            raise ShapeMismatch(
                f"site {site}, layer {layer}; sites are {', '.join(SITES)}, layers 0 to {self.pool.num_layers - 1}"
            )
