"""What a step takes by its number of rows, as measured."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows up to which steps are taken to cost the same."""
MAX_ROWS = BOUNDS[-1]
"""Rows of a step from which on nothing is proposed."""
GUESSED_SLOPES = (0.1, 0.1, 0.1, 0.1, 0.3, 0.9, 0.9, 0.9, 0.9)
"""Share of a step's time that grows with its rows, up to each of the bounds, until it is measured:
low for few rows, so that they are tried, and high for many, of which each counts.
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
        if num_rows > MAX_ROWS or seconds <= 0:
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
                return seconds * _GUESSES[number] / _GUESSES[known]
        return _GUESSES[number]

    def most_gain(self, num_rows: int) -> float:
        """Return what tokens per second grow by at most, if more rows are all of use."""
        rate = num_rows / self.of(num_rows)
        return max((bound / self.of(bound) / rate for bound in BOUNDS if bound > num_rows), default=0.0)


def _guesses() -> tuple[float, ...]:
    """Return what steps take up to each bound, by what a step of one row takes."""
    guesses, before = [1.0], BOUNDS[0]
    for bound, slope in zip(BOUNDS[1:], GUESSED_SLOPES[1:], strict=True):
        guesses.append(guesses[-1] * (1 + slope * (bound / before - 1)))
        before = bound
    return tuple(guesses)


_GUESSES = _guesses()
