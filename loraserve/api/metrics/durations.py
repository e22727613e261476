"""Durations counted by bucket, and percentiles read from the counts."""

from __future__ import annotations

import bisect

DURATION_BOUNDS_S = tuple(round(0.001 * 1.25**step, 6) for step in range(56))
"""Upper bounds of the buckets of durations: a percentile read from them is at most 25 % too long.

One more bucket has what is longer than the last.
"""


def bucket(seconds: float) -> int:
    return bisect.bisect_left(DURATION_BOUNDS_S, seconds)


def empty_counts() -> list[int]:
    """Make a count of 0 for every bucket."""
    return [0] * (len(DURATION_BOUNDS_S) + 1)


def quantile(counts: list[int], part: float) -> float | None:
    """Find the upper bound of the bucket in which `part` of the durations end.

    None without a duration; of those longer than all bounds, the last one.
    """
    wanted = part * sum(counts)
    if not wanted:
        return None
    for bound, count in zip(DURATION_BOUNDS_S, counts, strict=False):
        wanted -= count
        if wanted <= 0:
            return bound
    return DURATION_BOUNDS_S[-1]
