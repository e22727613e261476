"""Durations land in fixed buckets, and a stopwatch counts each moment once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from loraserve.memory import timings as timings_module
from loraserve.memory.timings import Stopwatch, Timings, timed
from loraserve.types import TIME_BOUNDS_S, EngineStats


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (-1.0, 0), (0.001, 6), (0.001_000_1, 7), (600.0, 23), (601.0, 24)],
)
def test_bucket_includes_upper_bound(seconds: float, bucket: int) -> None:
    timings = Timings()
    timings.add(seconds)
    counts = timings.histogram.counts
    assert len(counts) == len(TIME_BOUNDS_S) + 1
    assert [i for i, count in enumerate(counts) if count] == [bucket]


def test_backward_time_subtracts_no_seconds() -> None:
    timings = Timings()
    timings.add(2.0)
    timings.add(-1.0)
    assert (timings.histogram.num, timings.histogram.sum_s) == (2, 2.0)


def test_bounds_ascend() -> None:
    assert list(TIME_BOUNDS_S) == sorted(set(TIME_BOUNDS_S))


def test_histograms_cross_between_processes() -> None:
    timings = Timings()
    timings.add(0.3)
    stats = EngineStats(host_load_s=timings.histogram)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


def test_stopwatch_counts_nested_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr(timings_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    watch = Stopwatch()
    with watch, watch:
        pass
    with watch:
        pass
    assert watch.take_s() == 4.0
    assert watch.take_s() == 0.0


def test_timed_method_is_timed_when_raising() -> None:
    class Owner:
        stopwatch = Stopwatch()

        @timed
        def fail(self, seconds: float) -> None:
            time.sleep(seconds)
            raise KeyError

    with pytest.raises(KeyError):
        Owner().fail(0.002)
    assert Owner.stopwatch.take_s() >= 0.002
