"""Streams of requests: seeded, and distributed as they say."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from benchmarks.traffic import Zipf, slora_trace, zipf_stream

LENGTHS = {"prompt_tokens": (8, 65), "output_tokens": (4, 33)}


def test_streams_of_same_seed_differ_only_in_adapters() -> None:
    few, many = (zipf_stream(400, count, 4, 7, exponent=1.0, **LENGTHS) for count in (10, 5000))
    assert [(a.num_prompt_tokens, a.num_output_tokens, a.prompt_seed, a.at_s) for a in few] == [
        (a.num_prompt_tokens, a.num_output_tokens, a.prompt_seed, a.at_s) for a in many
    ]
    assert [a.adapter % 4 for a in few] == [a.adapter % 4 for a in many]
    assert {a.adapter for a in few} == set(range(10))
    assert len({a.adapter for a in many}) > 100


def test_zipf_stream_repeats_only_with_same_seed() -> None:
    once, again, other = (zipf_stream(50, 100, 4, seed, exponent=1.0, **LENGTHS) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_zipf_draws_each_item_in_proportion_to_weight() -> None:
    zipf = Zipf(4, 1.0)
    counts = Counter(zipf.pick(i / 25_000) for i in range(25_000))
    assert [counts[k] / 25_000 for k in range(4)] == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=1e-3)


def test_exponent_0_is_uniform_and_reaches_last_item() -> None:
    zipf = Zipf(3, 0.0)
    assert [zipf.pick(u) for u in (0.0, 0.34, 0.67, 0.999999)] == [0, 1, 2, 2]


def test_number_on_border_of_items_selects_second() -> None:
    assert Zipf(2, 0.0).pick(0.5) == 1


def test_fewer_adapters_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 adapters can't have 4 ranks"):
        zipf_stream(1, 3, 4, 0, exponent=1.0, **LENGTHS)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_trace_gaps_have_requested_mean_and_variation(cv: float) -> None:
    trace = slora_trace(10, 1.0, 50.0, cv, 800.0, 3, **LENGTHS)
    assert len(trace) == 40_000
    times = [0.0, *(ask.at_s for ask in trace)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.1), (0.3, 0.1**0.3), (0.1, 0.1**0.1)])
def test_first_tenth_of_adapters_has_power_law_share(alpha: float, share: float) -> None:
    trace = slora_trace(100, alpha, 100.0, 1.0, 100.0, 5, **LENGTHS)
    assert sum(ask.adapter < 10 for ask in trace) / len(trace) == pytest.approx(share, abs=0.02)
    assert all(0 <= ask.adapter < 100 for ask in trace)


def test_trace_lengths_are_uniform_within_range() -> None:
    trace = slora_trace(10, 1.0, 100.0, 1.0, 100.0, 5, **LENGTHS)
    for lengths, (low, high) in (
        ([ask.num_prompt_tokens for ask in trace], (8, 65)),
        ([ask.num_output_tokens for ask in trace], (4, 33)),
    ):
        assert (min(lengths), max(lengths)) == (low, high - 1)
        assert statistics.mean(lengths) == pytest.approx((low + high - 1) / 2, rel=0.03)


def test_trace_repeats_only_with_same_seed() -> None:
    once, again, other = (slora_trace(9, 0.3, 10.0, 4.0, 9.0, seed, **LENGTHS) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_prompt_has_requested_length_without_special_tokens() -> None:
    first, second = slora_trace(9, 1.0, 2.0, 1.0, 1.0, 1, **LENGTHS)
    assert len(first.prompt(512)) == first.num_prompt_tokens
    assert first.prompt(512) == first.prompt(512) != second.prompt(512)
    assert all(260 <= token < 512 for token in first.prompt(512))
