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

    They are those that a pass over a tile reads next. With several passes they are those of the
    tile that the thread takes next, of which each pass prefetches its part: else the first pass
    would wait for memory, and memory for the others.

    The processor's own prefetchers stop at each page, and a tile has few.

    Args:
        values: of a product: the argument block, the tile and the row; the tile that comes next,
            which part of it is prefetched, and of how many. Of one, it is what is read next.
        step_bytes: codes that are read between two calls of `ask`.
        is_once: they aren't read again, so they needn't drive others out of the caches.
    """

    def __init__(self, writer: TileWriter, values: Sequence[Any], step_bytes: int, *, is_once: bool) -> None:
        _, number, _, following, part, num_parts, *_ = values
        builder, tile_bytes = writer.builder, writer.word(TILE_BYTES)
        self._writer, self._step_bytes, self._is_once = writer, step_bytes, is_once
        codes, ahead = (writer.at(writer.word(CODES), builder.mul(tile, tile_bytes)) for tile in (number, following))
        next_ = writer.at(codes, writer.const(PREFETCH_BYTES))
        ahead = writer.at(ahead, builder.udiv(builder.mul(part, tile_bytes), num_parts))
        is_one = builder.icmp_signed("==", num_parts, writer.const(1))
        self._at = cgutils.alloca_once_value(builder, builder.select(is_one, next_, ahead))
        self._step = builder.udiv(writer.const(step_bytes), num_parts)

    def ask(self) -> None:
        """Prefetch the codes of a step, past the end too; move on by a part of them."""
        writer, builder = self._writer, self._writer.builder
        at = builder.load(self._at)
        for offset in range(0, self._step_bytes, LINE_BYTES):
            prefetch(builder, at, writer.const(offset), types.int8, is_once=self._is_once)
        builder.store(writer.at(at, self._step), self._at)
