"""Mapping from a step's rows to adapters as the GPU's kernels read it.

It is one buffer at one address, filled once a step for all layers. The buffer is int32. Its first
`HEADER` numbers hold, for each site in turn, how many work items there are, where they start, how
many row tiles there are and where they start (in elements of the buffer), and from `REPLACED_AT`
on, for each site, how many pieces of work there are on rows that adapters have in the place of the
base's; kernels read the counts there, so one captured CUDA graph serves every mix of adapters,
ranks and rows. At `HEADER` stands the permutation: token rows sorted by adapter, base rows left
out; then the same of the sampled rows, where the head has adapters. Then, packed:

    work item (shrink)   row0, num_rows, tile, kind: sixteen ranks of one module for up to
                         block_m rows of one adapter
    row tile (expand)    row0, num_rows, kind, replaced rows, then for each of up to three
                         slices: first work item, work items, first tile, whether there is a δ or a
                         shift

At the head and the embedding, which have one slice, the third's words speak of replaced rows.
Sixteen of them for one row tile are a piece of work; those of an adapter's row tiles stand in turn,
so that programs next to one another read the same rows. The first of these row tiles has the
group's first piece, `NO_WORK` stands in the others', and the last word is how many they are. row0
counts in the permutation. The kind is 1 for an adapter stored in int8, 0 otherwise. Item i of a
site leaves its sums at place i of `scratch`, so a row tile finds a slice's sums one after the
other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.common.modules import MODULE_INDEX, SITES
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.gpu.paged.layout import (
    FIRST_ITEM,
    FIRST_SLICE,
    FIRST_TILE,
    KIND,
    NUM_REPLACED,
    NUM_TILES,
    RANK_TILE,
    REPLACED_GROUP,
    REPLACED_SITES,
    REPLACED_TILE,
    REPLACED_WORK,
    SITE_WORDS,
    SLICE_WORDS,
)
from loraserve_kernels.gpu.paged.pool import PagedPool

BLOCK_K = 128
REPLACED_AT = 4 * len(SITES)
HEADER = -(-(REPLACED_AT + len(SITES)) // 16) * 16
NO_WORK = 2**31 - 1
ITEM = 4
ROW_TILE = SITE_WORDS
ROWS_OF_A_TILE = (16, 32)
"""Rows that a tile may hold, small for decoding and large for prefill: below 64 the tensor cores
take their first operand from registers safely.
"""

SITE_INDEX: dict[str, int] = {site: index for index, site in enumerate(SITES)}
_HEAD = SITE_INDEX["lm_head"]
_ITEMS, _COUNTS, _TILES = (slice(FIRST_SLICE + word, None, SLICE_WORDS) for word in (FIRST_ITEM, NUM_TILES, FIRST_TILE))

Rows = npt.NDArray[np.int32]


def split_k(site: str, in_features: int) -> int:
    """Decide into how many parts shrink cuts a row's sum.

    It is fixed by the sum's length, never by the batch, so a row's bits don't depend on what shares
    its step.
    """
    return 1 if site == "embed" else min(16, max(1, in_features // 512))


class GpuLoraPlan:
    """The step's rows by adapter, and the scratch memory between shrink and expand.

    Addresses are fixed for the plan's life; one step at a time.

    Attributes:
        pool: where the adapters lie.
        block_m: rows of a tile.
        num_tokens: rows of the step that was filled in last; 0 before.
        num_sampled: those of them whose logits are computed.
        buffer: int32, on the pool's device; see the module's docstring.
        scratch: [max_work_items, split_k, block_m, 16] float32, on the pool's device; a site with a
            lower split_k packs its items closer.
    """

    def __init__(self, pool: PagedPool, *, max_num_tokens: int, max_work_items: int, block_m: int = 16) -> None:
        """Allocate buffers for the largest step in the host's memory and on the pool's device.

        The host's are pinned where there is a GPU.

        Args:
            pool: kept for the plan's life.
            max_num_tokens: rows.
            max_work_items: of one site; for each tile of rows, the sum over the site's modules of
                rank / 16, rounded up.
            block_m: one of `ROWS_OF_A_TILE`.

        Raises:
            InvalidPlan: a block_m that the kernels don't have.
        """
        if block_m not in ROWS_OF_A_TILE:
            raise InvalidPlan(f"tiles of {block_m} rows; the kernels have {ROWS_OF_A_TILE}")
        self.pool = pool
        self.block_m = block_m
        self.num_tokens = self.num_sampled = 0
        self._max_num_tokens = max_num_tokens
        self._max_work_items = max_work_items
        device = pool.data.device
        # a row tile has at least one work item
        num_elements = HEADER + 2 * max_num_tokens + 32 + len(SITES) * max_work_items * (ITEM + ROW_TILE)
        self.buffer = torch.zeros(num_elements, dtype=torch.int32, device=device)
        # used in turn: one is filled while the other's copy may still wait for the step before
        self._staging = [
            torch.zeros(num_elements, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        most = max(self.split_k(site) for site in SITES)
        self.scratch = torch.empty(max_work_items * most * block_m * RANK_TILE, dtype=torch.float32, device=device)

    def split_k(self, site: str) -> int:
        """Planes of a work item's sums at this site."""
        return split_k(site, self.pool.module_shapes[MODULE_INDEX[SITES[site][0]]][1])

    def fill(self, row_slots: Rows, sampled_rows: Rows | None = None) -> bool:
        """Describe the next step and send it to the device in one copy.

        Return False when every row is the base's, so that the step launches no LoRA kernel. The
        copy is enqueued on the current stream and isn't waited for. Two buffers take turns, so the
        copy of the fill before last must be done: a step may be filled in while the one before it
        runs.

        Args:
            row_slots: [num_tokens]: the slot of each row's adapter in the pool; 0 for a base row.
            sampled_rows: the rows that the head's inputs are made of, in their order; None: all,
                each in its own place.

        Raises:
            InvalidPlan: more rows or work items than the plan was made for, or a row or slot that
                doesn't exist; the last step stands.
        """
        if len(row_slots) > self._max_num_tokens:
            raise InvalidPlan(f"a step of {len(row_slots)} rows; this plan was made for {self._max_num_tokens}")
        if len(row_slots) and not 0 <= int(row_slots.min()) <= int(row_slots.max()) < self.pool.max_slots:
            raise InvalidPlan(f"slots {row_slots.min()} to {row_slots.max()}; the pool has {self.pool.max_slots}")
        num_sampled = len(row_slots) if sampled_rows is None else len(sampled_rows)
        if sampled_rows is not None and num_sampled:
            first, last = int(sampled_rows.min()), int(sampled_rows.max())
            if not 0 <= first <= last < len(row_slots) or num_sampled > self._max_num_tokens:
                raise InvalidPlan(f"{num_sampled} sampled rows, {first} to {last}, of a step of {len(row_slots)}")
        staged = self._staging[0]
        num_elements = self._describe(row_slots, sampled_rows, staged.numpy())
        self.num_tokens, self.num_sampled = len(row_slots), num_sampled
        if num_elements:
            self.buffer[:num_elements].copy_(staged[:num_elements], non_blocking=True)
            self._staging.reverse()
        return num_elements > 0

    def _describe(self, row_slots: Rows, sampled_rows: Rows | None, out: Rows) -> int:
        """Write the step's description; its length, or 0 when there is nothing to do."""
        perm, row0, num_rows, slots = _tiles_of_rows(row_slots, self.block_m)
        if not len(slots):
            return 0
        num_sites = len(SITES)
        num_tiles, first_tiles = np.array([len(slots)] * num_sites), np.zeros(num_sites, dtype=np.int64)
        if sampled_rows is not None and self.pool.sites[slots, _HEAD, FIRST_SLICE + NUM_TILES].any():
            sampled = _tiles_of_rows(row_slots[sampled_rows], self.block_m)
            num_tiles[_HEAD], first_tiles[_HEAD] = len(sampled[3]), len(slots)
            row0 = np.concatenate((row0, sampled[1] + np.int32(len(perm))))
            num_rows, slots = np.concatenate((num_rows, sampled[2])), np.concatenate((slots, sampled[3]))
            perm = np.concatenate((perm, sampled[0]))
        # a row tile at a site: which site, which tile of rows
        site = np.arange(num_sites).repeat(num_tiles)
        tile = np.arange(len(site)) + (first_tiles - num_tiles.cumsum() + num_tiles)[site]
        row_tiles = self.pool.sites[slots[tile], site]
        row_tiles[:, 0], row_tiles[:, 1] = row0[tile], num_rows[tile]
        kept = row_tiles[:, _COUNTS].any(axis=1)
        if not kept.all():
            row_tiles, site = row_tiles[kept], site[kept]
            if not len(row_tiles):
                return 0
        counts = row_tiles[:, _COUNTS].ravel()
        ends = counts.cumsum()
        first_items = ends - counts
        bounds = site.searchsorted(np.arange(num_sites + 1))
        items_before = np.concatenate((first_items, ends[-1:]))[3 * bounds]
        num_items = items_before[1:] - items_before[:-1]
        if int(num_items.max()) > self._max_work_items:
            most = int(num_items.argmax())
            raise InvalidPlan(
                f"{num_items[most]} work items at site {list(SITES)[most]}; "
                f"this plan was made for {self._max_work_items}: "
                "admit fewer rows with high ranks"
            )
        row_tiles[:, _ITEMS] = first_items.reshape(-1, 3) - items_before[site][:, None]
        # the (row tile, slice) of each item
        owner = np.arange(len(counts)).repeat(counts)
        items = row_tiles[owner // 3, :ITEM]
        items[:, 3] = items[:, KIND]
        items[:, 2] = (row_tiles[:, _TILES].ravel() - first_items)[owner] + np.arange(len(owner))

        items_at = HEADER + -(-len(perm) // 16) * 16
        tiles_at = items_at + -(-items.size // 16) * 16
        end: int = tiles_at + row_tiles.size
        header = out[: 4 * num_sites].reshape(num_sites, 4)
        header[:, 0], header[:, 1] = num_items, items_at + ITEM * items_before[:-1]
        header[:, 2], header[:, 3] = bounds[1:] - bounds[:-1], tiles_at + ROW_TILE * bounds[:-1]
        out[REPLACED_AT : REPLACED_AT + num_sites] = 0
        if row_tiles[:, NUM_REPLACED].any():
            for replaced in map(SITE_INDEX.__getitem__, REPLACED_SITES):
                tiles = row_tiles[bounds[replaced] : bounds[replaced + 1]]
                works = (tiles[:, NUM_REPLACED] + np.int32(RANK_TILE - 1)) // np.int32(RANK_TILE)
                # no two adapters' records are in one tile
                is_first = np.diff(tiles[:, REPLACED_TILE], prepend=-1) != 0
                groups = is_first.cumsum() - 1
                tiles[:, REPLACED_WORK] = np.where(is_first, works.cumsum() - works, NO_WORK)
                tiles[:, REPLACED_GROUP] = np.bincount(groups)[groups]
                out[REPLACED_AT + replaced] = works.sum()
        out[HEADER : HEADER + len(perm)] = perm
        out[items_at : items_at + items.size] = items.ravel()
        out[tiles_at:end] = row_tiles.ravel()
        return end

    def check_layer(self, site: str, layer: int) -> None:
        """Check that the base has this layer and site.

        Raises:
            TensorMismatch: it hasn't.
        """
        if site not in SITES or not 0 <= layer < self.pool.num_layers:
            raise TensorMismatch(
                f"site {site}, layer {layer}; sites are {', '.join(SITES)}, layers 0 to {self.pool.num_layers - 1}"
            )


def _tiles_of_rows(row_slots: Rows, block_m: int) -> tuple[Rows, Rows, Rows, Rows]:
    """Sort rows by adapter, base rows left out, and cut them into tiles.

    Of each tile: where it starts among them, how many rows it has, the slot of its adapter.
    """
    order = row_slots.argsort(kind="stable").astype(np.int32)
    perm = order[len(order) - np.count_nonzero(row_slots) :]
    slots = row_slots[perm]
    is_first = np.ones(len(slots), dtype=np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
    row0 = is_first.nonzero()[0].astype(np.int32)
    num_rows = np.empty_like(row0)
    num_rows[-1:] = len(slots)
    num_rows[:-1] = row0[1:]
    num_rows -= row0
    if len(row0) and int(num_rows.max()) > block_m:
        num_tiles = -(-num_rows // block_m)
        ends = num_tiles.cumsum()
        group = np.arange(len(row0)).repeat(num_tiles)
        done = (np.arange(len(group)) - (ends - num_tiles)[group]).astype(np.int32) * np.int32(block_m)
        row0, num_rows = row0[group] + done, np.minimum(block_m, num_rows[group] - done)
    return perm, row0, num_rows, slots[row0]
