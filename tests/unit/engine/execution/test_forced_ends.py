"""The token that ends reasoning, found from a request's tokens alone."""

from __future__ import annotations

import pytest

from loraserve.engine.execution.sampler import forced_end
from loraserve.types import ThinkingBudget

OPEN, CLOSE, OTHER_CLOSE, BLANK = 90, 91, 92, 93
PROMPT = [1, OPEN, CLOSE, 2]


def forced(output: list[int], num_tokens: int, *, is_open: bool = True, num_sampled: int = 0) -> int | None:
    budget = ThinkingBudget(
        num_tokens=num_tokens, closers=(CLOSE, OTHER_CLOSE), openers=(OPEN,), blanks=(BLANK,), is_open=is_open
    )
    known, sampled = output[: len(output) - num_sampled], output[len(output) - num_sampled :]
    return forced_end(budget, [*PROMPT, *known], len(PROMPT), tuple(sampled))


@pytest.mark.parametrize("num_sampled", [0, 1])
def test_open_reasoning_ends_at_budget(num_sampled: int) -> None:
    assert forced([], 0) == CLOSE
    assert forced([5, 6], 3, num_sampled=num_sampled) is None
    assert forced([5, 6, 7], 3, num_sampled=num_sampled) == CLOSE
    # it was refused by a grammar: it is tried again
    assert forced([5, 6, 7, 8], 3, num_sampled=num_sampled) == CLOSE


@pytest.mark.parametrize("closer", [CLOSE, OTHER_CLOSE])
def test_closed_reasoning_forces_no_more_tokens(closer: int) -> None:
    for output in ([closer, 5, 6, 7], [5, 6, 7, closer], [5, 6, 7, closer, 8, 9]):
        assert forced(output, 3) is None


@pytest.mark.parametrize("blanks", [[], [BLANK], [BLANK] * 4])
def test_opener_begins_budget_of_answer(blanks: list[int]) -> None:
    assert forced([*blanks, OPEN], 0, is_open=False) == CLOSE
    assert forced([*blanks, OPEN, 5], 2, is_open=False) is None
    assert forced([*blanks, OPEN, 5, 6], 2, is_open=False) == CLOSE
    assert forced([*blanks, OPEN, 5, CLOSE, 6, 7], 2, is_open=False) is None


def test_answer_without_reasoning_has_no_budget() -> None:
    for output in ([], [5, 6, 7], [BLANK] * 9, [BLANK] * 5 + [OPEN, 5, 6], [5, OPEN, 6, 7]):
        assert forced(output, 0 if output else 1, is_open=False) is None
