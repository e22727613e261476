"""Costs of prompt tokens: a constant and a slope, whatever the order of measurements."""

from __future__ import annotations

import random

import pytest

from loraserve.engine.step_costs import PromptCosts

TOKEN_S, SLOPE_S = 3e-4, 5e-7


def true_s(context: float) -> float:
    return TOKEN_S + SLOPE_S * context


def read_prompts(costs: PromptCosts, num_prompts: int, *, chunk: int = 64, noise: float = 0.0) -> list[float]:
    """Note prompts of 2,000 tokens in chunks; return the estimates before each, by the truth."""
    rng, ratios = random.Random(0), []
    for _ in range(num_prompts):
        for start in range(0, 2000, chunk):
            context = start + chunk / 2
            if costs.is_measured:
                ratios.append(costs.of(context) / true_s(context))
            costs.note(true_s(context) * (1 + rng.uniform(-noise, noise)), context)
    return ratios


def test_estimates_follow_prompt_without_lag() -> None:
    costs = PromptCosts()
    read_prompts(costs, 1)
    assert all(0.97 < ratio < 1.05 for ratio in read_prompts(costs, 2))


def test_noisy_measurements_give_near_estimates() -> None:
    costs = PromptCosts()
    read_prompts(costs, 1, noise=0.2)
    ratios = read_prompts(costs, 3, noise=0.2)
    # at the beginning of a prompt the end of the last is far away
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.1)
    assert min(ratios) > 0.4
    assert max(ratios) < 2.5


def test_tokens_within_seconds_fill_whole_time() -> None:
    costs = PromptCosts()
    read_prompts(costs, 3)
    for context in (0, 500, 1900):
        num_tokens = costs.tokens_within(0.05, context)
        assert num_tokens * true_s(context + num_tokens / 2) == pytest.approx(0.05, rel=0.05)


def test_equal_contexts_have_no_slope() -> None:
    costs = PromptCosts()
    for token_s in (1e-3, 2e-3, 1e-3, 2e-3, 1e-3):
        costs.note(token_s, 50.0)
    assert costs.of(5000.0) == pytest.approx(costs.of(0.0), rel=0.3)
    assert costs.tokens_within(0.1, 0) == pytest.approx(0.1 / costs.of(0.0), rel=0.1)


def test_delayed_step_counts_four_times_at_most() -> None:
    costs = PromptCosts()
    for _ in range(9):
        costs.note(1e-3, 50.0)
    costs.note(1.0, 50.0)
    assert costs.of(50.0) < 3e-3
