"""Products of adapters' matrices in registers: some rows of a step with a tile of weights.

A tile of A is four ranks, one of B some vectors of columns. Each weight is widened once for all of
a tile's rows. Sums have one order, whatever the number of rows: a dot product is one vector over
the inputs, then its lanes, halves first; an output adds its ranks in ascending order.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.cpu.vector_code import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    ZERO,
    const,
    fma,
    join_sums,
    load_scalar,
    load_vector,
    pointer_to,
    prefetch_vectors,
    splat,
    store_vector,
)

RANKS = 4
"""Ranks of a tile of A."""
ROWS = LANES // RANKS
"""Rows of a tile whose sums are one vector."""
COLUMNS = 4
"""Vectors of columns of a tile of B."""
_F32 = types.float32


def _shrink_tile(num_rows: int) -> Any:
    @intrinsic
    def shrink_tile(
        typingctx: Any,
        x: Any,
        x_stride: Any,
        data: Any,
        first: Any,
        width: Any,
        count: Any,
        scalings: Any,
        out: Any,
        out_stride: Any,
        kind: Any,
    ) -> Any:
        """Write ``scaling · (A[r] · x[t])`` of `num_rows` rows for up to four ranks.

        What follows the tile's weights in memory is prefetched meanwhile.

        Args:
            x: address of the first row, `width` float32; rows are `x_stride` elements apart.
            first: element of `data` at which the first rank's weights start; the others follow.
            count: 1 to 4 ranks, of which the scalings lie at `scalings`. An address of 0: ones.
            out: address of the first row's results.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_stride, data, first, width, count, scalings, out, out_stride, _ = args
            rows = [builder.add(x, builder.mul(x_stride, const(4 * t))) for t in range(num_rows)]
            last = builder.sub(count, const(1))
            # beyond the last rank it's the last again: summed, and not stored
            ranks = []
            for j in range(RANKS):
                number = builder.select(builder.icmp_signed("<", const(j), last), const(j), last)
                ranks.append(builder.add(first, builder.mul(number, width)))
            ahead = builder.add(first, builder.mul(width, const(RANKS)))
            whole = builder.and_(width, const(-LANES))
            cells = [(t, j) for t in range(num_rows) for j in range(RANKS)]
            sums = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
            with cgutils.for_range_slice(builder, const(0), whole, const(LANES), INT64, inc=True) as (k, _):
                prefetch_vectors(builder, data, builder.add(ahead, builder.mul(k, const(RANKS))), RANKS, kind)
                inputs = [load_vector(builder, row, k, _F32) for row in rows]
                for j, rank in enumerate(ranks):
                    weights = load_vector(builder, data, builder.add(rank, k), kind)
                    for t in range(num_rows):
                        builder.store(fma(builder, weights, inputs[t], builder.load(sums[t, j])), sums[t, j])
            vectors = [builder.load(sums[cell]) for cell in cells]
            result = join_sums(builder, [*vectors, *[ZERO] * (LANES - len(vectors))])
            total = cgutils.alloca_once_value(builder, result)
            with cgutils.for_range_slice(builder, whole, width, const(1), INT64, inc=True) as (k, _):
                value = builder.load(total)
                inputs = [load_scalar(builder, row, k, _F32) for row in rows]
                weights = [load_scalar(builder, data, builder.add(rank, k), kind) for rank in ranks]
                for lane, (t, j) in enumerate(cells):
                    at = ir.Constant(INT32, lane)
                    added = fma(builder, weights[j], inputs[t], builder.extract_element(value, at))
                    value = builder.insert_element(value, added, at)
                builder.store(value, total)
            _store_sums(builder, builder.load(total), num_rows, count, scalings, out, out_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, kind), codegen

    return shrink_tile


def _store_sums(builder: Any, sums: Any, num_rows: int, count: Any, scalings: Any, out: Any, out_stride: Any) -> None:
    """Write a tile's sums, scaled, of as many ranks as there are."""
    has_scalings = builder.icmp_signed("!=", scalings, const(0))
    for j in range(RANKS):
        with builder.if_then(builder.icmp_signed("<", const(j), count)):
            factor = cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 1.0))
            with builder.if_then(has_scalings):
                builder.store(load_scalar(builder, scalings, const(j), _F32), factor)
            for t in range(num_rows):
                value = builder.extract_element(sums, ir.Constant(INT32, t * RANKS + j))
                at = builder.add(builder.mul(out_stride, const(t)), const(j))
                builder.store(builder.fmul(value, builder.load(factor)), pointer_to(builder, out, at, FLOAT))


def _expand_tile(num_rows: int, num_vectors: int) -> Any:
    @intrinsic
    def expand_tile(
        typingctx: Any,
        y: Any,
        y_stride: Any,
        factors: Any,
        factor_stride: Any,
        data: Any,
        first: Any,
        b_stride: Any,
        num_ranks: Any,
        kind: Any,
    ) -> Any:
        """Add ``Σ_r factor[t, r] · B[r, n]`` to some vectors of columns of `num_rows` rows of y.

        The columns behind them are prefetched meanwhile.

        Args:
            y: address of the first row's first column; rows are `y_stride` elements apart.
            factors: address of the first row's factors, float32.
            first: element of `data` with the first rank's first column; ranks are `b_stride` apart.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, y_stride, factors, factor_stride, data, first, b_stride, num_ranks, _ = args
            rows = [builder.add(y, builder.mul(y_stride, const(4 * t))) for t in range(num_rows)]
            inputs = [builder.add(factors, builder.mul(factor_stride, const(4 * t))) for t in range(num_rows)]
            cells = [(t, c) for t in range(num_rows) for c in range(num_vectors)]
            sums = {
                (t, c): cgutils.alloca_once_value(builder, load_vector(builder, rows[t], const(c * LANES), _F32))
                for t, c in cells
            }
            with cgutils.for_range_slice(builder, const(0), num_ranks, const(1), INT64, inc=True) as (rank, _):
                at = builder.add(first, builder.mul(rank, b_stride))
                prefetch_vectors(builder, data, builder.add(at, const(num_vectors * LANES)), num_vectors, kind)
                factor = [splat(builder, load_scalar(builder, row, rank, _F32)) for row in inputs]
                for c in range(num_vectors):
                    weights = load_vector(builder, data, builder.add(at, const(c * LANES)), kind)
                    for t in range(num_rows):
                        builder.store(fma(builder, weights, factor[t], builder.load(sums[t, c])), sums[t, c])
            for t, c in cells:
                store_vector(builder, builder.load(sums[t, c]), rows[t], const(c * LANES))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, kind), codegen

    return expand_tile


@intrinsic
def expand_row(
    typingctx: Any,
    y: Any,
    factors: Any,
    data: Any,
    first: Any,
    b_stride: Any,
    width: Any,
    kind: Any,
) -> Any:
    """Add ``Σ_r factor[r] · B[r, n]`` of four ranks to whole vectors of `width` columns of a row.

    The next four ranks' weights, which may be far behind in memory, are prefetched meanwhile.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y, factors, data, first, b_stride, width, _ = args
        ranks = [builder.add(first, builder.mul(b_stride, const(j))) for j in range(RANKS)]
        factor = [splat(builder, load_scalar(builder, factors, const(j), _F32)) for j in range(RANKS)]
        whole = builder.and_(width, const(-LANES))
        # a quarter of the columns prefetches one rank of the next tile
        vectors = builder.lshr(builder.add(whole, const(RANKS * LANES - 1)), const((RANKS * LANES).bit_length() - 1))
        quarter = builder.mul(vectors, const(LANES))
        for number, rank in enumerate(ranks):
            ahead = builder.add(rank, builder.mul(b_stride, const(RANKS)))
            start = builder.mul(quarter, const(number))
            end = builder.add(start, quarter)
            end = builder.select(builder.icmp_signed("<", end, whole), end, whole)
            with cgutils.for_range_slice(builder, start, end, const(LANES), INT64, inc=True) as (n, _):
                at = builder.add(ahead, builder.mul(builder.sub(n, start), const(RANKS)))
                prefetch_vectors(builder, data, at, RANKS, kind)
                value = load_vector(builder, y, n, _F32)
                for j in range(RANKS):
                    weights = load_vector(builder, data, builder.add(ranks[j], n), kind)
                    value = fma(builder, weights, factor[j], value)
                store_vector(builder, value, y, n)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6, kind), codegen


shrink_rows, shrink_row = _shrink_tile(ROWS), _shrink_tile(1)
expand_rows, expand_rows_narrow = _expand_tile(ROWS, COLUMNS), _expand_tile(ROWS, 1)
expand_row_narrow = _expand_tile(1, 1)
