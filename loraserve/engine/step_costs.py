"""Measured costs of steps: by their number of rows, and of prompt tokens by their context."""

from __future__ import annotations

import math
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
_RISE, _FALL = 0.15, 0.4
"""Part of the way to a measurement that the average goes: less to one above it, which may be a step
that waited for something else, or whose kernels were made for its number of rows.
"""
_MAX_JUMP = 2.0
"""Cap on a measurement by the average before it."""
_PROMPT_WEIGHT = 0.5
"""Part of the way to a measurement that the cost without context goes."""
_PROMPT_DECAY = 0.95
"""Weight of a measurement beside the next one in the slope, which changes less."""
_RIDGE_TOKENS = 64.0
"""Standard deviation of contexts below which they say little of the slope."""
_MAX_PROMPT_JUMP = 4.0
"""Cap on a measurement by what was expected: a step may have waited for other work."""
_MIN_CONSTANT_SHARE = 0.1
"""Least part of a measurement that is the cost without context."""


class StepCosts:
    """Average seconds of steps that only decode, by their rows."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(BOUNDS)
        # number of the step that was measured last; 0: none
        self._noted_at = [0] * len(BOUNDS)
        self._counts = [0] * len(BOUNDS)
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Note what a step took."""
        if num_rows > MAX_ROWS or seconds <= 0:
            return
        number = bisect_left(BOUNDS, num_rows)
        # one measurement proves little against what is known of smaller steps
        average = self.of(num_rows) if self.is_measured else seconds
        weight = _FALL if seconds < average else _RISE
        self._seconds[number] = average + weight * (min(seconds, _MAX_JUMP * average) - average)
        self._num_steps += 1
        self._noted_at[number] = self._num_steps
        self._counts[number] += 1

    def of(self, num_rows: int) -> float:
        """Estimate what a step of up to `MAX_ROWS` rows takes, in a unit that all have in common.

        Where it isn't known, it is guessed from what the next smaller step takes that is, or else
        the next larger one.
        """
        number = bisect_left(BOUNDS, num_rows)
        order: list[int] = [*range(number, -1, -1), *range(number + 1, len(BOUNDS))]
        for known in order:
            if self._is_known(known):
                return self._seconds[known] * _GUESSES[number] / _GUESSES[known]
        return _GUESSES[number]

    def is_sure(self, num_rows: int, *, min_count: int, max_age: int) -> bool:
        """Check whether steps of that many rows were measured often enough, and not long ago.

        Args:
            max_age: in steps.
        """
        number = bisect_left(BOUNDS, num_rows)
        return self._counts[number] >= min_count and self._num_steps - self._noted_at[number] < max_age

    @property
    def is_measured(self) -> bool:
        """Whether a step of any number of rows is known."""
        return any(map(self._is_known, range(len(BOUNDS))))

    def _is_known(self, number: int) -> bool:
        return self._noted_at[number] > 0 and self._num_steps - self._noted_at[number] < STALE_STEPS

    def most_gain(self, num_rows: int) -> float:
        """Bound the growth of tokens per second if more rows are all of use."""
        rate = num_rows / self.of(num_rows)
        return max((bound / self.of(bound) / rate for bound in BOUNDS if bound > num_rows), default=0.0)


def _guesses() -> tuple[float, ...]:
    """Guess what steps take up to each bound, by what a step of one row takes."""
    guesses, before = [1.0], BOUNDS[0]
    for bound, slope in zip(BOUNDS[1:], GUESSED_SLOPES[1:], strict=True):
        guesses.append(guesses[-1] * (1 + slope * (bound / before - 1)))
        before = bound
    return tuple(guesses)


_GUESSES = _guesses()


class PromptCosts:
    """Estimate seconds per prompt token: a constant, and a slope times its context.

    A token attends to all before it: at the end of a prompt of 2,000 tokens one takes several times
    what the first ones take. An average would always be some steps behind.
    """

    def __init__(self) -> None:
        self._token_s, self._slope_s = 0.0, 0.0
        # sums of measurements, of which older ones count less
        self._weight = self._mean_context = self._mean_s = 0.0
        self._context_squares = self._products = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether any is known."""
        return self._weight > 0

    def of(self, context: float) -> float:
        """Estimate the seconds of a token that attends to `context` others."""
        return self._token_s + self._slope_s * context

    def tokens_within(self, seconds: float, context: int) -> float:
        """Estimate how many tokens after `context` others take these seconds together."""
        first_s = self.of(context)
        if self._slope_s <= 0.0:
            return seconds / first_s
        # of n tokens the mean context is n / 2 more
        return (math.sqrt(first_s**2 + 2 * self._slope_s * seconds) - first_s) / self._slope_s

    def note(self, token_s: float, context: float) -> None:
        """Note what each token of a step took, on the average.

        Args:
            context: mean number of tokens before them.
        """
        if self.is_measured:
            token_s = min(token_s, _MAX_PROMPT_JUMP * self.of(context))
        self._weight = _PROMPT_DECAY * self._weight + 1.0
        distance = context - self._mean_context
        self._mean_context += distance / self._weight
        self._mean_s += (token_s - self._mean_s) / self._weight
        self._context_squares = _PROMPT_DECAY * self._context_squares + distance * (context - self._mean_context)
        self._products = _PROMPT_DECAY * self._products + distance * (token_s - self._mean_s)
        ridge = self._weight * _RIDGE_TOKENS**2
        self._slope_s = max(0.0, self._products / (self._context_squares + ridge))
        without_s = max(_MIN_CONSTANT_SHARE * token_s, token_s - self._slope_s * context)
        before = self._token_s or without_s
        self._token_s = before + _PROMPT_WEIGHT * (without_s - before)
