"""What loads have taught: sizes, failures with the time from which they may be tried again,
durations, damage.
"""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.errors import AdapterCorrupt, AdapterUnavailable, LoraserveError
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.residency.loader import MAX_RETRY_S, RETRY_S, AdapterSize, Corruption, LoadHistory, LoadResult
from loraserve.types import Digest

A = Digest("a")


@pytest.fixture
def history(make: Any) -> LoadHistory:
    return LoadHistory(make.cpu)


def result(make: Any, outcome: LoadedAdapter | LoraserveError, elapsed_s: float = 1.0) -> LoadResult:
    return LoadResult(make.ref(A), outcome, elapsed_s)


def test_size_survives_failure_after_successful_load(make: Any, history: LoadHistory) -> None:
    assert history.size(A) is None
    loaded = make.loaded()
    history.note(result(make, loaded), 0.0)
    size = AdapterSize(make.cpu.footprint_of(loaded.host), loaded.num_bytes)
    assert history.size(A) == size
    history.note(result(make, AdapterUnavailable("gone")), 0.0)
    assert history.size(A) == size


def test_consecutive_failures_double_holdoff_up_to_minute(make: Any, history: LoadHistory) -> None:
    now_s, wait_s = 0.0, RETRY_S
    for _ in range(9):
        history.note(result(make, AdapterUnavailable("gone")), now_s)
        assert history.is_held_off(A, now_s + wait_s - 0.01)
        assert not history.is_held_off(A, now_s + wait_s)
        now_s, wait_s = now_s + wait_s, min(2 * wait_s, MAX_RETRY_S)
    assert wait_s == MAX_RETRY_S


def test_failure_is_reported_until_success_or_forgetting(make: Any, history: LoadHistory) -> None:
    error = AdapterUnavailable("gone")
    assert history.error(A) is None
    for end in (lambda: history.note(result(make, make.loaded()), 0.0), lambda: history.forget_failure(A)):
        history.note(result(make, error), 0.0)
        assert history.error(A) is error
        end()
        assert history.error(A) is None
        assert not history.is_held_off(A, 0.0)
    history.note(result(make, error), 0.0)
    assert not history.is_held_off(A, RETRY_S), "failures count anew"


def test_failed_loads_count_time_but_not_mean(make: Any, history: LoadHistory) -> None:
    assert history.mean_load_s == 0
    for outcome, elapsed_s in ((make.loaded(), 1.0), (make.loaded(), 3.0), (AdapterUnavailable("gone"), 10.0)):
        history.note(result(make, outcome, elapsed_s), 0.0)
    stats = history.stats()
    assert history.mean_load_s == 2.0
    assert (stats["adapter_loads"], stats["adapter_load_failures"], stats["adapter_load_s"]) == (2, 1, 14.0)
    assert stats["host_load_s"].sum_s == 4.0  # type: ignore[union-attr]


def test_blob_damage_is_reported_exactly_once(make: Any, history: LoadHistory) -> None:
    history.note(result(make, AdapterCorrupt("damaged", digest=A, blob="b")), 0.0)
    history.note_corruption(AdapterCorrupt("damaged", digest=A, blob="c"))
    history.note_corruption(AdapterCorrupt("damaged"))
    assert history.take_corruptions() == [Corruption(A, Digest("b")), Corruption(A, Digest("c"))]
    assert history.take_corruptions() == []
