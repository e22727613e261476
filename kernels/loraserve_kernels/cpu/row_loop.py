"""The loop in which a thread claims rows of a step; compiled by numba into the kernels of rows."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numba

from loraserve_kernels.cpu.simd import fetch_add, load_int


@numba.njit
def rows_at_once(num_rows):  # type: ignore[no-untyped-def]
    """Decide how many of a step's rows a thread claims at once: several where there are many."""
    return 4 if num_rows > 64 else 1


def row_loop(name: str, compute: Any, num_rows_word: int) -> Any:
    """Build the loop that claims rows and computes each.

    The argument block starts with the counter of claimed rows.

    Args:
        name: unlike any other loop's: by it numba resolves machine code from its cache.
        compute: takes the argument block's address and the row.
        num_rows_word: word of the argument block with the number of rows.
    """

    def run(args):  # type: ignore[no-untyped-def]
        num_rows = load_int(args, num_rows_word)
        block = rows_at_once(num_rows)
        while True:
            first = fetch_add(args, block)
            if first >= num_rows:
                return
            for row in range(first, min(first + block, num_rows)):
                compute(args, row)

    run.__name__ = run.__qualname__ = f"claim_rows_{name}"
    return numba.njit(run)
