"""Covers of all pairs of values."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import cover_pairs, pairwise_and_campaign

AXES = (["a", "b", "c", "d"], [True, False], [None, 8, 16], ["x", "y"])


def test_cover_has_all_pairs_of_values() -> None:
    cover = cover_pairs(*AXES)
    for one, other in combinations(range(len(AXES)), 2):
        assert {(case[one], case[other]) for case in cover} == set(product(AXES[one], AXES[other]))
    assert len(cover) <= 14 < len(list(product(*AXES)))


def test_cover_holds_allowed_cases_alone() -> None:
    allowed = [case for case in product(*AXES) if case[:2] != ("a", True)]
    cover = cover_pairs(*AXES, allowed=allowed)
    assert set(cover) <= set(allowed)
    assert {case[:2] for case in cover} == set(product(*AXES[:2])) - {("a", True)}


def test_campaign_has_cases_left_out() -> None:
    cases = pairwise_and_campaign(*AXES)
    assert [case.values for case in cases] == list(product(*AXES))
    assert [case.values for case in cases if not case.marks] == cover_pairs(*AXES)
