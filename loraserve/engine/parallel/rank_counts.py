"""Counts of all ranks, in memory that they share: each writes its own row, rank 0 reads all."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from loraserve.limits import LIMITS
from loraserve.model.parallel.traffic import MOVES, NUM_COUNTS, SUM_BYTES, SUM_S, TRANSFER_BYTES, TRANSFER_S
from loraserve.progress import Progress
from loraserve.types import RankTraffic

_NUM_BYTES = LIMITS.max_ranks * NUM_COUNTS * 8


class RankCounts:
    """Memory of the counts.

    Attributes:
        descriptor: of the memory, for another process to inherit.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the memory.

        Args:
            descriptor: of memory that another process made; None: it is made, of zeros.

        Raises:
            OSError: the system has no more.
        """
        if descriptor is None:
            descriptor = os.memfd_create("loraserve-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _NUM_BYTES)
        self.descriptor = descriptor
        self._rows: npt.NDArray[np.float64] = np.frombuffer(mmap.mmap(descriptor, _NUM_BYTES), np.float64).reshape(
            -1, NUM_COUNTS
        )

    def row(self, rank: int) -> npt.NDArray[np.float64]:
        """Look up the row in which a rank counts."""
        row: npt.NDArray[np.float64] = self._rows[rank]
        return row

    def read(self, num_ranks: int) -> tuple[RankTraffic, ...]:
        """Read the counts of the first ranks."""
        return tuple(
            RankTraffic(
                sum_s=float(row[SUM_S]),
                sum_bytes=int(row[SUM_BYTES]),
                transfer_s=float(row[TRANSFER_S]),
                transfer_bytes=int(row[TRANSFER_BYTES]),
            )
            for row in self._rows[:num_ranks]
        )

    def num_moves(self) -> int:
        """Sum the marks of progress that all ranks but this one have reached; it only grows."""
        return int(self._rows[1:, MOVES].sum())

    def close(self) -> None:
        """Let go of the descriptor; the memory stays as long as this object."""
        with suppress(OSError):
            os.close(self.descriptor)


class RankProgress(Progress):
    """Progress of a rank above 0, of which rank 0 reads that there is some.

    Args:
        counts: the rank's row.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: npt.NDArray[np.float64]) -> None:
        super().__init__()
        self._counts = counts

    def tick(self) -> None:
        super().tick()
        self._counts[MOVES] = self.num_moves
