"""Uses are counted by their age, and for a bounded number of names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loraserve.memory.eviction import USE_DECAY_S, Popularity


def test_use_counts_less_with_age(make: Any) -> None:
    popularity, a = Popularity(), make.digest("a")
    popularity.use(a, 100.0)
    assert popularity.per_second(a, 100.0) == pytest.approx(1 / USE_DECAY_S)
    assert popularity.per_second(a, 100.0 + USE_DECAY_S) == pytest.approx(math.exp(-1) / USE_DECAY_S)
    popularity.use(a, 100.0 + USE_DECAY_S)
    assert popularity.per_second(a, 100.0 + USE_DECAY_S) == pytest.approx((1 + math.exp(-1)) / USE_DECAY_S)
    # a clock that goes back makes nothing more likely
    assert popularity.per_second(a, 0.0) == popularity.per_second(a, 100.0 + USE_DECAY_S)
    assert popularity.per_second(make.digest("b"), 100.0) == 0.0


def test_steady_use_approaches_true_rate(make: Any) -> None:
    popularity, a = Popularity(), make.digest("a")
    for second in range(3000):
        popularity.use(a, float(second))
    assert popularity.per_second(a, 3000.0) == pytest.approx(1.0, rel=0.01)


def test_the_longest_unused_name_is_forgotten(make: Any) -> None:
    popularity = Popularity(max_names=2)
    for name in "abac":
        popularity.use(make.digest(name), 0.0)
    assert len(popularity) == 2
    assert popularity.per_second(make.digest("b"), 0.0) == 0.0
    assert popularity.per_second(make.digest("a"), 0.0) > popularity.per_second(make.digest("c"), 0.0) > 0.0
