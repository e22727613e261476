"""The loop in which a thread claims tiles and multiplies them with chunks of rows."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numba

from loraserve_kernels.cpu.linear.tiles import codes_ahead, tile, tile_writer
from loraserve_kernels.cpu.linear.tiles.tile import CHUNK, MAX_THREADS, NUM_ROWS, NUM_TILES, ROWS
from loraserve_kernels.cpu.simd import fetch_add, load_int, stamp_with


def tile_loop(one: Any, four: Any, eight: Any) -> Any:
    """Build the loop that claims tiles and multiplies their codes with chunks of rows.

    A chunk has one, four or eight rows. All loops have one name, by which numba resolves machine
    code from its cache: an argument of a type of its own, for each of them and each kind of codes,
    keeps them apart.
    """

    @numba.njit
    def run(args, kind):  # type: ignore[no-untyped-def]
        num_rows, num_tiles = load_int(args, NUM_ROWS), load_int(args, NUM_TILES)
        num_items = (num_rows + CHUNK - 1) // CHUNK * num_tiles
        # the next tile is claimed early, to be prefetched; not so the last ones, and of several
        # passes the first ones: no thread may wait for another that holds two
        has_passes = num_rows > ROWS
        num_early = num_items - (num_items // 4 if has_passes else 2 * load_int(args, MAX_THREADS))
        item, is_first = fetch_add(args, 1), True
        while item < num_items:
            start, number = item // num_tiles * CHUNK, item % num_tiles
            end = min(start + CHUNK, num_rows)
            claimed = fetch_add(args, 1) if item < num_early and not (has_passes and is_first) else -1
            # where none is claimed: that of two threads that take turns, a guess on which only
            # speed depends
            following = (claimed if claimed >= 0 else item + 2) % num_tiles
            num_passes = (end - start + ROWS - 1) // ROWS
            for part in range(num_passes):
                row = start + part * ROWS
                # of the first tile nothing has been prefetched
                num_parts = 1 if is_first and part == 0 else num_passes
                if end - row == 1:
                    one(args, number, row, following, part, num_parts, kind)
                elif ROWS == 4 or end - row <= 4:
                    four(args, number, row, following, part, num_parts, kind)
                else:
                    eight(args, number, row, following, part, num_parts, kind)
            is_first = False
            item = claimed if claimed >= 0 else fetch_add(args, 1)

    return run


def tile_stamp() -> int:
    """Hash the stamp of entries that run such a loop; it changes with what they share."""
    return stamp_with(tile.__file__, tile_writer.__file__, codes_ahead.__file__, __file__)
