"""Cases of a parametrized test that the default run takes, and those left to ``--all``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def default_and_campaign(cases: Iterable[Any], *, default: Sequence[Any]) -> list[ParameterSet]:
    """Return the cases as pytest's parameters, all but those in `default` marked ``campaign``.

    Args:
        cases: what ``pytest.mark.parametrize`` takes: a value, or a tuple of one value per name.
        default: cases that the default run takes too; each has to be one of `cases`.
    """
    cases = list(cases)
    assert all(case in cases for case in default), [case for case in default if case not in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in default else pytest.mark.campaign
        )
        for case in cases
    ]
