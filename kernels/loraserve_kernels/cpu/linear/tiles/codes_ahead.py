"""Codes of tiles that are prefetched before they're multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.core import cgutils

from loraserve_kernels.cpu.linear.tiles.tile import CODES, PREFETCH_BYTES, TILE_BYTES
from loraserve_kernels.cpu.linear.tiles.tile_writer import TileWriter
from loraserve_kernels.cpu.vector_code import LINE_BYTES, prefetch


class CodesAhead:
    """Codes that are prefetched while others are multiplied.

    They are those that a pass over a tile reads next, and towards its end the first ones of the
    tile that the thread takes next, which isn't the one that follows in memory: that is another
    thread's. With several passes they are those of the tile that the thread takes next, of which
    each pass prefetches its part: else the first pass would wait for memory, and memory for the
    others.

    The processor's own prefetchers stop at each page, and a tile has few. Codes are brought into
    the second level of the caches, which has more of them under way than the first.

    Args:
        values: of a product: the argument block, the tile and the row; the tile that comes next,
            which part of it is prefetched, and of how many. Of one, it is what is read next.
        step_bytes: codes that are read between two calls of `ask`.
    """

    def __init__(self, writer: TileWriter, values: Sequence[Any], step_bytes: int) -> None:
        _, number, _, following, part, num_parts, *_ = values
        builder, tile_bytes = writer.builder, writer.word(TILE_BYTES)
        self._writer, self._step_bytes, self._end = writer, step_bytes, tile_bytes
        codes, ahead = (writer.at(writer.word(CODES), builder.mul(tile, tile_bytes)) for tile in (number, following))
        is_one = builder.icmp_signed("==", num_parts, writer.const(1))
        # what an offset is counted from: up to the tile's end, and from there on
        self._before = builder.select(is_one, codes, ahead)
        self._after = builder.select(is_one, builder.sub(ahead, tile_bytes), ahead)
        near = writer.smaller(writer.const(PREFETCH_BYTES), tile_bytes)
        first = builder.udiv(builder.mul(part, tile_bytes), num_parts)
        self._offset = cgutils.alloca_once_value(builder, builder.select(is_one, near, first))
        self._step = builder.udiv(writer.const(step_bytes), num_parts)

    def ask(self) -> None:
        """Prefetch the codes of a step, and move on by a part of them."""
        writer, builder = self._writer, self._writer.builder
        offset = builder.load(self._offset)
        start = builder.select(builder.icmp_signed("<", offset, self._end), self._before, self._after)
        at = writer.at(start, offset)
        for line in range(0, self._step_bytes, LINE_BYTES):
            prefetch(builder, at, writer.const(line), types.int8, level=2)
        builder.store(writer.at(offset, self._step), self._offset)
