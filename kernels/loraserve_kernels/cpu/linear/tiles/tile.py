"""A tile of a linear's output channels: its size, and the argument block of the kernels over it.

A thread claims a tile of `TILE` output channels and a chunk of rows. The codes of a tile stand side
by side for each input, so that one load has an input's codes of `LANES` channels. A channel's sum
runs over the inputs in one order, with the same instructions for any number of rows, so that a
row's bits don't depend on the others.
"""

from __future__ import annotations

from loraserve_kernels.cpu.simd import FEATURES, LANES

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, X, X_STRIDE, NUM_ROWS, Y, Y_STRIDE, CODES, TILE_BYTES = 0, 8, 9, 10, 11, 12, 13, 14
SCALES, SCALE_STRIDE, ZEROS, ZERO_STRIDE, BIAS, WIDTH, GROUP, NUM_TILES, NUM_WORDS = 15, 16, 17, 18, 19, 20, 21, 22, 28
SUM_STARTS, ROW_SCALES, DOT_BIAS = GROUP, ZEROS, BIAS
"""int8 by int8: each channel's first sum, [channels] int32; the rows' scales, [rows] float32."""
GROUP_STARTS, START_STRIDE, GROUP_ZEROS = 23, ZERO_STRIDE, 24
"""int4 by int8: what the zero of each group is multiplied with, [rows, groups] float32; the zeros,
[groups, channels] uint8. Where groups of inputs have scales, ROW_SCALES are [rows, groups] too.
"""
OUTLIERS, NUM_OUTLIERS = 25, 26
"""Inputs that are multiplied as they are, where groups of inputs have scales: [rows, outliers]
pairs of float32, the input's number and its value; their number in a row.
"""
MAX_THREADS = 27
"""Threads that may enter the kernel, on which only speed depends."""

VECTORS = 2
TILE = VECTORS * LANES
"""Output channels of a tile."""
HAS_VNNI = ("avx512vnni" if LANES == 16 else "avxvnni") in FEATURES
DOT_INPUTS = 4 if HAS_VNNI else 2
"""Inputs of a channel that one instruction multiplies in int8 by int8: they stand side by side."""
CHUNK = 64
"""Rows that a thread claims with a tile: few enough for a core's own cache."""

HAS_BYTE_PAIRS = "avx512bw" in FEATURES if LANES == 16 else "avx2" in FEATURES
"""Whether there is an instruction that multiplies bytes without a sign by bytes with one."""
ROWS = 8 if LANES == 16 else 4
"""Rows that one pass over a tile's codes multiplies:
as many as there are registers for their sums.
"""
PREFETCH_BYTES = 6144
"""Distance at which the one pass over a tile prefetches codes: memory's latency
at its bandwidth.
"""
