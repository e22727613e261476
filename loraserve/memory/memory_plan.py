"""The plan of a memory budget: how many pages an arena has and how KV blocks lie in them.

Nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraserve.errors import ConfigError
from loraserve.limits import LIMITS, MIB
from loraserve.types import BaseSpec
from loraserve_kernels.common.sizes import MAX_RANK, RANK_TILE, RECORD, UNIT_BYTES, row_num_bytes

GPU_BLOCK_ALIGNMENT = 256
"""Bytes of which the size of a KV block on a GPU is a multiple."""
TABLES_SHARE = 1 / 128
"""Share of the budget that the tables take."""
DRAFT_SEQUENCES = 4
"""Sequences that a draft base's cache has room for: as many as a step proposes tokens for."""
SNAPSHOTS_PER_SLOT = 4
"""Snapshots of recurrent states, at most, for each sequence that may run."""
MAX_POOL_BYTES = (2**31 - 1) * UNIT_BYTES
"""Bytes that the kernels can address, in int32 units."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of a budget into an arena's pages.

    Attributes:
        num_pages: pages of the arena.
        page_num_bytes: bytes of a page.
        block_num_bytes: bytes from one KV block to the next.
        blocks_per_page: KV blocks of a page in an indexed arena, on a GPU; otherwise 1.
        pages_per_block: pages of a KV block in a counted arena, on a CPU; otherwise 1.
        num_dedicated_pages: pages of the same size behind the arena's, for KV blocks alone.
        num_kv_pages: pages of the arena that adapters must leave: with the dedicated ones they hold
            one sequence of the model's full length.
    """

    num_pages: int
    page_num_bytes: int
    block_num_bytes: int
    blocks_per_page: int = 1
    pages_per_block: int = 1
    num_dedicated_pages: int = 0
    num_kv_pages: int = 0

    @property
    def num_blocks(self) -> int:
        """KV blocks if there are no adapters."""
        return self.num_pages // self.pages_per_block * self.blocks_per_page + self.num_dedicated_blocks

    @property
    def num_dedicated_blocks(self) -> int:
        return self.num_dedicated_pages * self.blocks_per_page

    @property
    def max_adapter_pages(self) -> int:
        """Pages that adapters may take at most, pinned ones included."""
        return self.num_pages - self.num_kv_pages

    @property
    def max_adapter_bytes(self) -> int:
        return self.max_adapter_pages * self.page_num_bytes


def plan_cpu_memory(budget_bytes: int, kv_block_bytes: int, num_needed_blocks: int, page_num_bytes: int) -> MemoryPlan:
    """Divide a budget into the pages of a counted arena.

    KV blocks and adapters take as many pages as their bytes need.

    Args:
        kv_block_bytes: bytes of one block's keys and values, in all layers.
        num_needed_blocks: blocks of one sequence of the model's full length.
        page_num_bytes: bytes of a page of the system.

    Raises:
        ConfigError: such a sequence doesn't fit.
    """
    pages_per_block = -(-kv_block_bytes // page_num_bytes)
    plan = MemoryPlan(
        num_pages=budget_bytes // page_num_bytes,
        page_num_bytes=page_num_bytes,
        block_num_bytes=pages_per_block * page_num_bytes,
        pages_per_block=pages_per_block,
        num_kv_pages=num_needed_blocks * pages_per_block,
    )
    _refuse_small(plan, num_needed_blocks, budget_bytes)
    return plan


def draft_context(max_model_len: int, base_max_model_len: int) -> int:
    """Compute how many tokens of a sequence a draft base's cache has room for.

    Args:
        max_model_len: of the draft base's own.
    """
    return min(max_model_len, base_max_model_len, LIMITS.max_draft_tokens)


def draft_kv_blocks(num_tokens: int, block_size: int) -> int:
    """Count the KV blocks of a draft base's cache: of all its sequences, at their longest.

    Args:
        num_tokens: of a sequence, from `draft_context`.
    """
    return DRAFT_SEQUENCES * -(-num_tokens // block_size)


def beside_draft(budget_bytes: int, draft_bytes: int) -> int:
    """Compute what a draft base's cache leaves of the budget.

    Raises:
        ConfigError: it takes half of the budget or more.
    """
    if 2 * draft_bytes >= budget_bytes:
        raise ConfigError(
            f"The draft base's cache of {draft_bytes / MIB:.1f} MiB takes half of the memory budget or more, "
            f"which is {budget_bytes / MIB:.1f} MiB.",
            hint="Raise --memory-budget, lower --max-model-len, or leave --draft-model out.",
        )
    return budget_bytes - draft_bytes


def state_slots(budget_bytes: int, state_bytes: int, max_num_seqs: int) -> int:
    """Count the sequences whose recurrent states take half of the budget at most, two of each.

    Args:
        state_bytes: bytes of one state.
        max_num_seqs: more aren't needed.

    Raises:
        ConfigError: not one does.
    """
    num_slots = min(max_num_seqs, budget_bytes // 2 // (2 * state_bytes))
    if num_slots < 1:
        raise ConfigError(
            f"The recurrent state of one sequence takes {2 * state_bytes / MIB:.1f} MiB, more than half of the memory "
            f"budget, which is {budget_bytes / MIB:.1f} MiB.",
            hint="Raise --memory-budget.",
        )
    return num_slots


def state_snapshots(budget_bytes: int, state_bytes: int, num_slots: int) -> int:
    """Count the snapshots of recurrent states that take a quarter of the budget at most.

    One at least, since two states of a sequence take half of it at most.

    Args:
        state_bytes: bytes of one state.
        num_slots: sequences that run at once.
    """
    return min(SNAPSHOTS_PER_SLOT * num_slots, budget_bytes // 4 // state_bytes)


def plan_gpu_memory(
    budget_bytes: int, kv_block_bytes: int, num_needed_blocks: int, widest_row_bytes: int, max_pool_bytes: int
) -> MemoryPlan:
    """Divide a budget into the pages of an indexed arena.

    Each page holds a KV block, or as many as cover the widest row of an adapter, which lies in one
    page.

    Args:
        budget_bytes: bytes without the tables of adapters.
        kv_block_bytes: bytes of one block's keys and values, in all layers.
        num_needed_blocks: blocks of one sequence of the model's full length.
        widest_row_bytes: bytes of an adapter's widest row on this base.
        max_pool_bytes: bytes that the adapters' kernels can address: pages behind them are
            dedicated to KV blocks.

    Raises:
        ConfigError: such a sequence doesn't fit.
    """
    block_num_bytes = -(-kv_block_bytes // GPU_BLOCK_ALIGNMENT) * GPU_BLOCK_ALIGNMENT
    blocks_per_page = max(1, -(-widest_row_bytes // block_num_bytes))
    page_num_bytes = blocks_per_page * block_num_bytes
    total = budget_bytes // page_num_bytes
    num_pages = min(total, max_pool_bytes // page_num_bytes)
    plan = MemoryPlan(
        num_pages=num_pages,
        page_num_bytes=page_num_bytes,
        block_num_bytes=block_num_bytes,
        blocks_per_page=blocks_per_page,
        num_dedicated_pages=total - num_pages,
        num_kv_pages=max(0, -(-num_needed_blocks // blocks_per_page) - (total - num_pages)),
    )
    _refuse_small(plan, num_needed_blocks, budget_bytes)
    return plan


def plan_gpu_arena(base: BaseSpec, budget_bytes: int, kv_block_bytes: int, num_needed_blocks: int) -> MemoryPlan:
    """Plan a GPU's budget: tables for adapters, and an arena's pages.

    Args:
        kv_block_bytes: bytes of one block's keys and values, in all layers.
        num_needed_blocks: blocks of one sequence of the model's full length.

    Raises:
        ConfigError: such a sequence doesn't fit.
    """
    tables = max_adapter_tiles(base, budget_bytes) * _tile_bytes(base)
    return plan_gpu_memory(
        budget_bytes - tables, kv_block_bytes, num_needed_blocks, _widest_row_bytes(base), MAX_POOL_BYTES
    )


def _widest_row_bytes(base: BaseSpec) -> int:
    # of weights and of deltas, which are float32
    return row_num_bytes(max(max(shape) for shape in base.modules.values()), np.dtype(np.float32))


def _tile_bytes(base: BaseSpec) -> int:
    return base.num_layers * RECORD * 4


def max_adapter_tiles(base: BaseSpec, budget_bytes: int) -> int:
    """Compute the number of tiles of the tables.

    There are several for each that adapters of eight ranks everywhere use if they take the whole
    budget, and at least those of four of the largest adapter, if that is little of the budget.
    """
    largest = len(base.modules) * MAX_RANK // RANK_TILE
    floor = min(4 * largest, budget_bytes // 8 // _tile_bytes(base))
    return max(1, floor, int(budget_bytes * TABLES_SHARE) // _tile_bytes(base))


def _refuse_small(plan: MemoryPlan, num_needed_blocks: int, budget_bytes: int) -> None:
    if plan.num_blocks < num_needed_blocks:
        raise ConfigError(
            f"The memory budget, {budget_bytes / MIB:.1f} MiB, holds {plan.num_blocks} KV blocks; "
            f"one sequence of the model's full length "
            f"takes {num_needed_blocks}, {num_needed_blocks * plan.block_num_bytes / MIB:.1f} MiB.",
            hint="Raise --memory-budget or lower --max-model-len.",
        )
