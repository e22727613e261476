"""How a budget of bytes becomes an arena's pages, and KV blocks lie in them. Numbers alone: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.errors import ConfigError
from loraserve.limits import MIB

GPU_BLOCK_ALIGNMENT = 256
"""Bytes that a KV block on a GPU is filled up to a multiple of."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """
    Attributes:
        num_pages: of the arena.
        page_num_bytes: of one.
        block_num_bytes: from one KV block to the next.
        blocks_per_page: where pages have places, on a GPU; else 1.
        pages_per_block: where they are only counted, on a CPU; else 1.
        num_dedicated_pages: of the same size, behind the arena's: for KV blocks alone.
        num_kv_pages: of the arena's, those that adapters must leave: with the own ones they hold one sequence of the model's full length.
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
        """KV blocks, if there were no adapters."""
        return self.num_pages // self.pages_per_block * self.blocks_per_page + self.num_dedicated_blocks

    @property
    def num_dedicated_blocks(self) -> int:
        return self.num_dedicated_pages * self.blocks_per_page

    @property
    def max_adapter_pages(self) -> int:
        """What adapters may take at most, pinned ones included."""
        return self.num_pages - self.num_kv_pages

    @property
    def max_adapter_bytes(self) -> int:
        return self.max_adapter_pages * self.page_num_bytes


def plan_cpu_memory(budget_bytes: int, kv_block_bytes: int, num_needed_blocks: int, page_num_bytes: int) -> MemoryPlan:
    """Divide a budget into pages that are counted: a KV block takes as many as its bytes, as does an adapter.

    Args:
        kv_block_bytes: keys and values of one block, in all layers.
        num_needed_blocks: of one sequence of the model's full length.
        page_num_bytes: the system's.

    Raises:
        ConfigError: such a sequence doesn't fit.
    """
    pages_per_block = -(-kv_block_bytes // page_num_bytes)
    division = MemoryPlan(
        num_pages=budget_bytes // page_num_bytes,
        page_num_bytes=page_num_bytes,
        block_num_bytes=pages_per_block * page_num_bytes,
        pages_per_block=pages_per_block,
        num_kv_pages=num_needed_blocks * pages_per_block,
    )
    _refuse_small(division, num_needed_blocks, budget_bytes)
    return division


def plan_gpu_memory(
    budget_bytes: int, kv_block_bytes: int, num_needed_blocks: int, widest_row_bytes: int, max_pool_bytes: int
) -> MemoryPlan:
    """Divide a budget into pages with places: each is a KV block, or as many as the widest row of an adapter takes, which must lie in one page.

    Args:
        budget_bytes: without what the tables of adapters take.
        kv_block_bytes: keys and values of one block, in all layers.
        num_needed_blocks: of one sequence of the model's full length.
        widest_row_bytes: of an adapter on this base.
        max_pool_bytes: what the kernels of adapters can address: pages behind it are for KV blocks alone.

    Raises:
        ConfigError: such a sequence doesn't fit.
    """
    block_num_bytes = -(-kv_block_bytes // GPU_BLOCK_ALIGNMENT) * GPU_BLOCK_ALIGNMENT
    blocks_per_page = max(1, -(-widest_row_bytes // block_num_bytes))
    page_num_bytes = blocks_per_page * block_num_bytes
    total = budget_bytes // page_num_bytes
    num_pages = min(total, max_pool_bytes // page_num_bytes)
    division = MemoryPlan(
        num_pages=num_pages,
        page_num_bytes=page_num_bytes,
        block_num_bytes=block_num_bytes,
        blocks_per_page=blocks_per_page,
        num_dedicated_pages=total - num_pages,
        num_kv_pages=max(0, -(-num_needed_blocks // blocks_per_page) - (total - num_pages)),
    )
    _refuse_small(division, num_needed_blocks, budget_bytes)
    return division


def _refuse_small(division: MemoryPlan, num_needed_blocks: int, budget_bytes: int) -> None:
    if division.num_blocks < num_needed_blocks:
        raise ConfigError(
            f"The memory budget, {budget_bytes / MIB:.1f} MiB, holds {division.num_blocks} KV blocks; one sequence of the model's full length "
            f"takes {num_needed_blocks}, {num_needed_blocks * division.block_num_bytes / MIB:.1f} MiB.",
            hint="Raise --memory-budget or lower --max-model-len.",
        )
