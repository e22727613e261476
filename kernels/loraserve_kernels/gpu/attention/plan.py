"""Plan of a step's attention as the GPU's kernels read it.

It is one buffer at one address, filled once a step for all layers. The buffer is int32. Its first
`HEADER` numbers hold where its parts start (in elements of the buffer) and how long they are;
kernels read them there, so one captured CUDA graph serves every mix of context lengths. The parts:

    items          eight numbers each: row0, num_rows, position of row0, sequence, split,
                   num_splits, 0, 0;
                   decode items come first: one split of the keys of a sequence that has a single
                   row; then tiles: up to `tile_rows` rows of a chunk
    rows           four numbers for each sequence with a single row: row0, its first item,
                   num_splits, 0
    tables         [num_seqs, table_width] block tables, no wider than the step's longest
                   context needs

A sequence with a single row has its keys cut into splits that different programs attend to: how
many depends on its own context alone (`num_splits`), and so do the bits of its row. Item i leaves
its part at place i of `partials` and `lse`; a row with one split needs neither.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.errors import InvalidPlan

HEADER = 16
NUM_DECODE_ITEMS, NUM_ITEMS, ITEMS_AT, NUM_ROWS, ROWS_AT, TABLES_AT, TABLE_WIDTH = range(7)
"""Indices of the header's numbers."""

ITEM = 8
ROW = 4
CHUNK_BLOCK_M = 32
"""Query heads of a tile of a chunk.

From 64 on, tensor cores of sm_90 would take the weights that were just computed from registers,
which some versions of the compiler get wrong.
"""

MIN_SPLIT = 256
"""Keys.

A shorter split would write and read again more than a fortieth of what it reads of the cache, with
four heads to a group.
"""


def max_splits(num_kv_heads: int) -> int:
    """Compute the most parts that a long context is cut into.

    The splits of one sequence then keep about a hundred multiprocessors busy.
    """
    return min(64, max(16, 128 // num_kv_heads // 16 * 16))


def tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Count a chunk's rows in a tile.

    As many as have their query heads of one KV head fit in, 1 where a group alone fills it.
    """
    return max(1, CHUNK_BLOCK_M // (num_heads // num_kv_heads))


class GpuAttentionPlan:
    """Sequences of a step, and the scratch memory between the splits of a sequence.

    Addresses are fixed for the plan's life; one step at a time.

    Attributes:
        num_tokens: rows of the step that was filled in last; 0 before.
        num_seqs: its sequences, those without rows included.
        num_decode_rows: sequences with a single row, whatever their context; the others' rows are
            in tiles.
        is_decode_only: every sequence has at most one row.
        max_query_len: the most rows of a sequence in this step.
        buffer: int32, on the device; see the module's docstring.
        partials: [items, num_heads, head_dim] float32, on the device: what each split alone would
            answer.
        lse: [items, num_heads] float32, on the device: the binary logarithm of its sum of
            exponentials; −inf where it has no keys.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Allocate buffers for the largest step in the host's memory and on the device.

        The host's are pinned where there is a GPU.

        Raises:
            InvalidPlan: heads that don't form groups, or a head_dim that the kernels don't have.
        """
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise InvalidPlan(f"{num_heads} query heads don't form groups over {num_kv_heads} KV heads")
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise InvalidPlan(f"a head_dim of {head_dim}; the kernels take multiples of 16 from 16 to 256")
        self.num_heads, self.num_kv_heads, self.head_dim, self.block_size = (
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
        )
        self.max_num_tokens, self.max_num_seqs, self.max_model_len = max_num_tokens, max_num_seqs, max_model_len
        self.max_splits = max_splits(num_kv_heads)
        self.num_tokens = self.num_seqs = self.num_decode_rows = self.num_tiles = self._tables_at = 0
        self.max_query_len = self.table_width = 0
        self.is_decode_only = True
        self.device = torch.device(device)
        self._tile_rows = tile_rows(num_heads, num_kv_heads)

        most_splits = max_num_seqs * min(self.max_splits, -(-max_model_len // MIN_SPLIT))
        # a chunk has a tile for each whole tile of rows, and one for what is left of a sequence's
        most_items = most_splits + max_num_tokens // self._tile_rows + max_num_seqs
        num_elements = HEADER + most_items * ITEM + _aligned(max_num_seqs * ROW)
        num_elements += max_num_seqs * _aligned(-(-max_model_len // block_size)) + 16
        pinned = self.device.type == "cuda"
        self.buffer = torch.zeros(num_elements, dtype=torch.int32, device=self.device)
        self._staged = [torch.zeros(num_elements, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._hosts: list[npt.NDArray[np.int32]] = [staged.numpy() for staged in self._staged]
        self._turn = 0
        self.partials = torch.empty((most_splits, num_heads, head_dim), dtype=torch.float32, device=self.device)
        self.lse = torch.empty((most_splits, num_heads), dtype=torch.float32, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan holds on the device."""
        return sum(t.numel() * t.element_size() for t in (self.buffer, self.partials, self.lse))

    def num_splits(self, context_lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Compute into how many parts the keys of a sequence with a single row are cut.

        It is 0 without context, else by the context's own length alone.
        """
        split = np.maximum(MIN_SPLIT, -(-context_lens // self.max_splits))
        return -(-context_lens // split)

    def fill(
        self,
        query_starts: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
    ) -> None:
        """Describe the next step and send it to the device in one copy.

        The rows of a sequence are its last ones: row j of m stands at position ``context_len - m +
        j``. A sequence without context has one row at most, whose answer is zeros. The copy doesn't
        wait: the copy of the fill before last must be done, as it is when that step's result is
        known.

        Args:
            query_starts: [num_seqs + 1], the first 0: sequence i has rows
                ``query_starts[i]:query_starts[i + 1]``.
            context_lens: [num_seqs]: cached tokens of the sequence, its own rows included.
            block_tables: [num_seqs, at least as many as the longest context's blocks]; numbers past
                a context's end aren't used. Which blocks there are isn't known here: nothing checks
                the numbers.

        Raises:
            InvalidPlan: sequences that contradict each other or exceed what the plan was made for;
                the last step stands.
        """
        starts, contexts = query_starts.astype(np.int64), context_lens.astype(np.int64)
        num_seqs = len(contexts)
        lens = np.diff(starts)
        if num_seqs == 0 or len(lens) != num_seqs or block_tables.shape[:1] != (num_seqs,) or block_tables.ndim != 2:
            raise InvalidPlan(
                f"{len(query_starts)} query_starts and block tables {block_tables.shape} for {num_seqs} sequences"
            )
        longest, num_tokens = int(contexts.max()), int(starts[-1])
        width = -(-longest // self.block_size)
        if num_seqs > self.max_num_seqs or num_tokens > self.max_num_tokens or longest > self.max_model_len:
            raise InvalidPlan(
                f"{num_seqs} sequences, {num_tokens} rows, a context of {longest}; "
                f"this plan was made for {self.max_num_seqs}, "
                f"{self.max_num_tokens} and {self.max_model_len}"
            )
        if starts[0] != 0 or (lens < 0).any() or (lens > np.maximum(contexts, 1)).any() or (contexts < 0).any():
            raise InvalidPlan(f"sequences of {lens.tolist()} rows can't have contexts of {contexts.tolist()}")
        if block_tables.shape[1] < width:
            raise InvalidPlan(
                f"{block_tables.shape[1]} blocks of {self.block_size} for a context of {longest}; it takes {width}"
            )
        num_elements = self._describe(starts, contexts, lens, block_tables[:, :width], self._hosts[self._turn])
        self.num_tokens, self.num_seqs, self.table_width = num_tokens, num_seqs, width
        self.max_query_len = int(lens.max())
        self.is_decode_only = self.max_query_len <= 1
        self.buffer[:num_elements].copy_(self._staged[self._turn][:num_elements], non_blocking=True)
        self._turn = 1 - self._turn

    def _describe(
        self,
        starts: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        lens: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int32],
        host: npt.NDArray[np.int32],
    ) -> int:
        """Write the step's description to the host's buffer; its length."""
        decode = np.flatnonzero(lens == 1)
        splits = self.num_splits(contexts[decode])
        first_item = np.cumsum(splits) - splits
        num_decode_items = int(splits.sum())

        chunks = np.flatnonzero(lens > 1)
        num_tiles = -(-lens[chunks] // self._tile_rows)
        chunk = np.repeat(chunks, num_tiles)
        done = (np.arange(len(chunk)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * self._tile_rows
        positions = contexts[chunk] - lens[chunk] + done
        # the longest first, so that the programs finish together
        order = np.argsort(-positions, kind="stable")
        chunk, done, positions = chunk[order], done[order], positions[order]

        num_items = num_decode_items + len(chunk)
        items = host[HEADER : HEADER + num_items * ITEM].reshape(num_items, ITEM)
        of_decode, of_tiles = items[:num_decode_items], items[num_decode_items:]
        split_rows = np.zeros((len(decode), ITEM), dtype=np.int32)
        split_rows[:, 0], split_rows[:, 1], split_rows[:, 2] = starts[decode], 1, contexts[decode] - 1
        # as if each split were the row's first: its number less its item's
        split_rows[:, 3], split_rows[:, 4], split_rows[:, 5] = decode, -first_item, splits
        of_decode[:] = np.repeat(split_rows, splits, axis=0)
        of_decode[:, 4] += np.arange(num_decode_items, dtype=np.int32)
        of_tiles[:, 0] = starts[chunk] + done
        of_tiles[:, 1] = np.minimum(self._tile_rows, lens[chunk] - done)
        of_tiles[:, 2] = positions
        of_tiles[:, 3] = chunk
        of_tiles[:, 4] = 0
        of_tiles[:, 5] = 1

        rows_at = HEADER + items.size
        rows = host[rows_at : rows_at + len(decode) * ROW].reshape(len(decode), ROW)
        rows[:, 0], rows[:, 1], rows[:, 2] = starts[decode], first_item, splits
        tables_at = rows_at + _aligned(rows.size)
        host[tables_at : tables_at + tables.size].reshape(tables.shape)[:] = tables

        header = (num_decode_items, num_items, HEADER, len(decode), rows_at, tables_at, tables.shape[1])
        host[: len(header)] = header
        self.num_decode_rows, self.num_tiles, self._tables_at = len(decode), len(chunk), tables_at
        return tables_at + tables.size

    @property
    def device_block_tables(self) -> torch.Tensor:
        """[num_seqs, the longest context's blocks] int32, on the device.

        Its address and width change with the step.
        """
        shape = (self.num_seqs, self.table_width)
        return self.buffer[self._tables_at : self._tables_at + shape[0] * shape[1]].view(shape)


def _aligned(num_elements: int) -> int:
    return -(-num_elements // 16) * 16
