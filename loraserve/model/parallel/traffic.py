"""Count of what one rank exchanges with others while steps are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

NUM_COUNTS = 5
SUM_S, SUM_BYTES, TRANSFER_S, TRANSFER_BYTES, MOVES = range(NUM_COUNTS)
"""Places in a rank's row: of sums and gathers within a stage, of transfers between stages, and of
marks of progress.
"""


class Traffic:
    """Seconds, waiting for others included, and bytes that were received.

    Attributes:
        counts: [NUM_COUNTS] float64. One thread writes; other processes may read.
    """

    def __init__(self, counts: npt.NDArray[np.float64] | None = None) -> None:
        self.counts = np.zeros(NUM_COUNTS) if counts is None else counts

    @contextmanager
    def summing(self, num_bytes: int) -> Iterator[None]:
        """Count what is exchanged within a stage."""
        began = time.perf_counter()
        yield
        self.counts[SUM_S] += time.perf_counter() - began
        self.counts[SUM_BYTES] += num_bytes

    @contextmanager
    def transferring(self, num_bytes: int) -> Iterator[None]:
        """Count what comes from the stage before."""
        began = time.perf_counter()
        yield
        self.counts[TRANSFER_S] += time.perf_counter() - began
        self.counts[TRANSFER_BYTES] += num_bytes
