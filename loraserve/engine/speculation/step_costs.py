"""What a step takes by its number of rows, as measured."""

from __future__ import annotations

import math
from bisect import bisect_left

BOUNDS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows up to which steps are taken to cost the same."""
MAX_ROWS = BOUNDS[-1]
"""Rows of a step from which on nothing is proposed."""
GUESSED_GROWTH = 1.1
"""Cost of a step by that of one below the next smaller bound, until it is measured: low enough that
it is tried.
"""
STALE_STEPS = 1024
"""Steps after which a measurement is a guess again."""
_SMOOTHING = 0.15
_MAX_JUMP = 2.0
"""Cap on a measurement by the average before it: a step that waited for something else counts as
twice as long.
"""


class StepCosts:
    """Average seconds of steps that only decode, by their rows."""

    def __init__(self) -> None:
        self._seconds: list[float | None] = [None] * len(BOUNDS)
        self._noted_at = [0] * len(BOUNDS)
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Note what a step took."""
        if num_rows > MAX_ROWS:
            return
        self._num_steps += 1
        number = bisect_left(BOUNDS, num_rows)
        average = self._seconds[number]
        if average is None:
            self._seconds[number] = seconds
        else:
            self._seconds[number] = average + _SMOOTHING * (min(seconds, _MAX_JUMP * average) - average)
        self._noted_at[number] = self._num_steps

    def of(self, num_rows: int) -> float:
        """Return what a step of up to `MAX_ROWS` rows takes, in a unit that all have in common.

        Where it isn't known, it is guessed from what the next smaller step takes that is, or else
        the next larger one.
        """
        number = bisect_left(BOUNDS, num_rows)
        order: list[int] = [*range(number, -1, -1), *range(number + 1, len(BOUNDS))]
        for known in order:
            seconds = self._seconds[known]
            if seconds is not None and self._num_steps - self._noted_at[known] < STALE_STEPS:
                return seconds * math.pow(GUESSED_GROWTH, number - known)
        return math.pow(GUESSED_GROWTH, number)
