"""The loop in which a thread claims tiles and multiplies them with chunks of rows."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numba

from loraserve_kernels.cpu.linear.tiles import tile, tile_writer
from loraserve_kernels.cpu.linear.tiles.tile import CHUNK, NUM_ROWS, NUM_TILES, ROWS
from loraserve_kernels.cpu.simd import fetch_add, load_int, stamp_with


def tile_loop(one: Any, four: Any, eight: Any) -> Any:
    """Return the loop that claims tiles and multiplies their codes with chunks of rows.

    A chunk has one, four or eight rows. All loops have one name, by which numba resolves machine
    code from its cache: an argument of a type of its own, for each of them and each kind of codes,
    keeps them apart.
    """

    @numba.njit
    def run(args, kind):  # type: ignore[no-untyped-def]
        num_rows, num_tiles = load_int(args, NUM_ROWS), load_int(args, NUM_TILES)
        while True:
            item = fetch_add(args, 1)
            start = item // num_tiles * CHUNK
            if start >= num_rows:
                return
            end = min(start + CHUNK, num_rows)
            number = item % num_tiles
            for row in range(start, end, ROWS):
                if end - row == 1:
                    one(args, number, row, kind)
                elif ROWS == 4 or end - row <= 4:
                    four(args, number, row, kind)
                else:
                    eight(args, number, row, kind)

    return run


def tile_stamp() -> int:
    """Return the stamp of entries that run such a loop; it changes with what they share."""
    return stamp_with(tile.__file__, tile_writer.__file__, __file__)
