"""Histograms of durations, and a stopwatch for parts of a step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from loraserve.types import TIME_BOUNDS_S, Histogram

OwnerT = TypeVar("OwnerT", bound="HasStopwatch")
ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class Timings:
    """A histogram that durations are added to. One thread at a time; its size is fixed."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(TIME_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration; a negative one, as a clock may give, counts as 0."""
        seconds = max(0.0, seconds)
        self._counts[bisect_left(TIME_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    @property
    def histogram(self) -> Histogram:
        """The durations counted until now."""
        return Histogram(counts=tuple(self._counts), sum_s=self._sum_s)


class Stopwatch:
    """The time spent in ``with`` blocks; nested blocks count once. One thread at a time."""

    __slots__ = ("_depth", "_elapsed_s", "_started_s")

    def __init__(self) -> None:
        self._depth = 0
        self._started_s = 0.0
        self._elapsed_s = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._started_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._elapsed_s += time.perf_counter() - self._started_s

    def take_s(self) -> float:
        """Take the seconds of all blocks that ended since the last call."""
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        return elapsed_s


class HasStopwatch(Protocol):
    stopwatch: Stopwatch


def timed(
    method: Callable[Concatenate[OwnerT, ParamsT], ResultT],
) -> Callable[Concatenate[OwnerT, ParamsT], ResultT]:
    """Add the method's time to its owner's stopwatch, whether it returns or raises."""

    @wraps(method)
    def run(self: OwnerT, /, *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        with self.stopwatch:
            return method(self, *args, **kwargs)

    return run
