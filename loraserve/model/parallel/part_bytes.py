"""Bytes of a rank's part of an adapter, in memory that all ranks map. Imports no torch."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from loraserve_kernels.common.sizes import ItemSized, PackedLayout

_ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """Compute where the next array of a part begins."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def region_bytes(layout: PackedLayout, dtype: ItemSized, norms: Sequence[int]) -> int:
    """Compute the bytes of a part's pages.

    Args:
        norms: numbers of each norm's weights.
    """
    arrays = [layout.num_elements * dtype.itemsize, 4 * layout.num_floats, 4 * layout.num_row_ids]
    used = sum(aligned(num_bytes) for num_bytes in [*arrays, *(4 * count for count in norms)])
    # memory of no byte can't be mapped
    return max(1, -(-used // mmap.PAGESIZE)) * mmap.PAGESIZE
