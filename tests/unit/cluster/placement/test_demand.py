"""Counts that decay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.cluster.placement.demand import DecayingCounts


def test_count_halves_every_half_life() -> None:
    counts = DecayingCounts(10.0, 5)
    counts.add("a", 0.0)
    counts.add("a", 0.0)
    assert counts.count("a", 10.0) == pytest.approx(1.0)
    assert counts.counts(["a", "none"], 20.0) == [pytest.approx(0.5), 0.0]


def test_share_is_the_names_part_of_all() -> None:
    counts = DecayingCounts(10.0, 5)
    for name in ("a", "a", "b", "c"):
        counts.add(name, 0.0)
    assert counts.share("a") == 0.5
    counts.remove("b")
    assert counts.share("a") == pytest.approx(2 / 3)


def test_longest_unused_name_is_forgotten() -> None:
    counts = DecayingCounts(10.0, 2)
    for name in ("a", "b", "a", "c"):
        counts.add(name, 0.0)
    assert counts.names() == ["a", "c"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 5_000)), min_size=1, max_size=100))
@settings(deadline=None)
def test_counts_equal_definition_over_any_time(history: list[tuple[str, float]]) -> None:
    counts, now_s, times = DecayingCounts(10.0, 100), 0.0, list[tuple[str, float]]()
    for name, gap_s in history:
        now_s += gap_s
        counts.add(name, now_s)
        times.append((name, now_s))
    for name in "abcdef":
        expected = sum(0.5 ** ((now_s - at_s) / 10) for other, at_s in times if other == name)
        assert counts.count(name, now_s) == pytest.approx(expected, abs=1e-9)
    assert sum(counts.share(name) for name in "abcdef") == pytest.approx(1.0)


def test_backward_clock_adds_no_demand() -> None:
    counts = DecayingCounts(10.0, 5)
    counts.add("a", 1000.0)
    counts.add("a", 0.0)
    assert counts.count("a", 0.0) == pytest.approx(2.0)
