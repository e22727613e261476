"""Blocks of a weight's rows, small enough to be float32 for a while."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_WEIGHTS = 1 << 18
"""Weights per block of rows that is float32 at a time: 1 MiB, memory that the allocator has at
hand, in a core's own cache.

At 16 MiB, which the system clears each time, it took three times as long; a whole weight is rounded
to int8 in six times as long.
"""

GPU_BLOCK_WEIGHTS = 1 << 22
"""The same on a GPU: 16 MiB, so that launches stay few."""


def row_blocks(start: int, end: int, width: int, block_weights: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks of rows of `width` weights.

    A block has at most `block_weights` weights; None: what suits a CPU.
    """
    step = max(1, (block_weights or BLOCK_WEIGHTS) // width)
    for first in range(start, end, step):
        yield first, min(first + step, end)
