"""Few cases of a product of parameters in which each pair of values occurs; the whole product is
left to ``--all``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def cover_pairs(*axes: Sequence[Any], allowed: Iterable[tuple[Any, ...]] | None = None) -> list[tuple[Any, ...]]:
    """Return cases in which each pair of two axes' values occurs, in the order of the product.

    Greedy: the case that covers the most pairs not yet covered comes next, and of several the
    first, so that the result is the same each time.

    Args:
        axes: the values of each parameter.
        allowed: cases to choose from, where the product has some that mean nothing.
    """
    cases = list(product(*axes) if allowed is None else allowed)
    pairs = [_pairs(case, axes) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(best)
        missing -= pairs[best]
    return [cases[index] for index in sorted(chosen)]


def _pairs(case: tuple[Any, ...], axes: Sequence[Sequence[Any]]) -> set[tuple[int, ...]]:
    """Return a case's pairs, as (axis, value, axis, value) by index."""
    assert len(case) == len(axes), case
    places = [(axis, list(values).index(value)) for axis, (value, values) in enumerate(zip(case, axes, strict=True))]
    if len(places) == 1:
        return {places[0]}
    return {(*one, *other) for one, other in combinations(places, 2)}


def pairwise_and_campaign(*axes: Sequence[Any], allowed: Iterable[tuple[Any, ...]] | None = None) -> list[ParameterSet]:
    """Return a product as pytest's parameters, one tuple a case, all but a cover of its pairs
    marked ``campaign``.

    Args:
        axes, allowed: see `cover_pairs`.
    """
    cases = list(product(*axes) if allowed is None else allowed)
    default = cover_pairs(*axes, allowed=cases)
    return [
        pytest.param(*case, marks=() if any(case is taken for taken in default) else pytest.mark.campaign)
        for case in cases
    ]
