"""Versions get replicas with their share of the requests, and give them up without flapping."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.cluster.placement import PlacementPolicy
from loraserve.cluster.placement.hot_versions import HotVersions

POLICY = PlacementPolicy(hot_share=0.5, cold_share=0.2, hot_half_life_s=60.0, cooldown_s=60.0, min_hot_requests=8.0)


def run(hot: HotVersions, share: float, begin_s: float, seconds: float, num_replicas: int = 8) -> list[int]:
    """Record ten requests a second, so many of them for the version, at even distances; return its
    number of replicas after each.
    """
    sizes, due = [], 0.0
    for number in range(int(10 * seconds)):
        due += share
        is_ours, due = due >= 1, due % 1
        hot.record("ours" if is_ours else f"other-{number % 997}", num_replicas, begin_s + number / 10)
        hot.refresh(num_replicas, begin_s + number / 10)
        sizes.append(hot.num_replicas("ours", num_replicas))
    return sizes


def test_version_grows_with_share_and_shrinks_after() -> None:
    hot = HotVersions(POLICY)
    cold = run(hot, 0.01, 0.0, 120)
    crowd = run(hot, 0.5, 120.0, 300)
    after = run(hot, 0.0, 420.0, 900)
    assert set(cold) == {1}
    assert crowd[-1] == 8
    assert crowd == sorted(crowd)
    assert after[0] == 8
    assert after == sorted(after, reverse=True)
    assert after[-1] == 1
    assert len(hot) == 0


def test_version_far_over_share_grows_several_replicas() -> None:
    sizes = run(HotVersions(POLICY), 0.6, 0.0, 3)
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) >= 3


def test_version_keeps_replicas_until_cooldown_ends() -> None:
    hot = HotVersions(POLICY)
    grown = run(hot, 0.5, 0.0, 60)[-1]
    kept = run(hot, 0.0, 60.0, 30)
    assert grown > 1
    assert set(kept) == {grown}


def test_few_requests_make_no_version_hot() -> None:
    hot = HotVersions(POLICY)
    for second in range(7):
        hot.record("ours", 8, float(second))
    assert hot.num_replicas("ours", 8) == 1


@given(st.floats(0.02, 0.9), st.integers(2, 32), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_steady_share_doesnt_flap(share: float, num_replicas: int, seed: int) -> None:
    """A share that only chance moves gains replicas while the count warms up, and then changes
    hardly: once grown it isn't shrunk and grown again.
    """
    hot, chance = HotVersions(POLICY), random.Random(seed)
    sizes = []
    for number in range(6000):
        is_ours = chance.random() < share
        hot.record("ours" if is_ours else f"other-{number % 997}", num_replicas, number / 10)
        if number >= 3000:
            sizes.append(hot.num_replicas("ours", num_replicas))
    changes = [after - before for before, after in itertools.pairwise(sizes) if after != before]
    turns = sum(before * after < 0 for before, after in itertools.pairwise(changes))
    assert turns == 0


def zipf_hot(num_places: int, num_versions: int = 400, num_replicas: int = 2) -> dict[str, int]:
    """Record requests by Zipf's law with an exponent of 1; return the versions that are hot."""
    hot, chance = HotVersions(PlacementPolicy()), random.Random(1)
    hot.num_places = num_places
    weights = [1 / rank for rank in range(1, num_versions + 1)]
    for number, version in enumerate(chance.choices(range(num_versions), weights, k=5000)):
        hot.record(f"v{version}", num_replicas, number / 20)
    return hot.all()


def test_hot_versions_leave_most_of_small_memory_free() -> None:
    unknown, large, small = zipf_hot(0), zipf_hot(10_000), zipf_hot(60)
    assert large == unknown
    part = PlacementPolicy().hot_memory
    assert len(unknown) > part * 60
    assert 0 < len(small) <= part * 60
    # the hottest of all
    assert small.keys() <= unknown.keys()


def test_hottest_version_has_copies_in_small_memory() -> None:
    assert zipf_hot(10, num_versions=3) == {"v0": 2}


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 100)), max_size=200))
@settings(deadline=None)
def test_counted_versions_are_bounded(history: list[tuple[int, float]]) -> None:
    hot = HotVersions(PlacementPolicy(max_versions=10))
    now_s = 0.0
    for number, gap_s in history:
        now_s += gap_s
        hot.record(f"v{number}", 4, now_s)
    assert hot.num_counted <= 10
    assert all(1 < size <= 4 for size in hot.all().values())
