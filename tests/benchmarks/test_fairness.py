"""What is made of a quiet tenant's measurements beside a noisy one's."""

from __future__ import annotations

import argparse

from benchmarks import fairness
from benchmarks.asking import Answer
from benchmarks.fairness import Phase
from benchmarks.traffic import Ask

OPTIONS = argparse.Namespace(size="tiny", quantize="none", rate=2.0, duration=30.0, rounds=2)
NOISY = {
    "tokens_per_s": 50.0,
    "summary": {"offered_per_s": 40.0, "num_sent": 1200, "num_complete": 90, "num_refused": 5, "ttft_p50_s": 2.5},
}


def make_phase(kind: str, ttft_s: list[float]) -> Phase:
    return Phase(kind, ttft_s, [0.01], 0, NOISY if kind == "beside" else {})


def test_phases_of_round_match_except_for_prompts() -> None:
    alone, beside = fairness.asks_of(OPTIONS, 1, seed=0), fairness.asks_of(OPTIONS, 1, seed=fairness.SEEDS)
    shapes = [[(one.at_s, one.num_prompt_tokens, one.num_output_tokens) for one in asks] for asks in (alone, beside)]
    assert shapes[0] == shapes[1]
    assert len({one.prompt_seed for one in (*alone, *beside)}) == len(alone) + len(beside)
    assert {one.adapter for one in alone} == {fairness.NUM_ADAPTERS}


def test_the_ratio_is_of_all_rounds_percentiles() -> None:
    phases = [
        make_phase("alone", [0.1] * 99 + [0.2]),
        make_phase("beside", [0.2] * 100),
        make_phase("alone", [0.1] * 100),
        make_phase("beside", [0.2] * 80 + [0.35] * 20),
    ]
    assert round(fairness.ratio(phases), 6) == 3.5
    assert round(fairness.ratio(phases, 50), 6) == 2.0


def test_page_reports_bound_result_and_noisy_tenant_throughput() -> None:
    good = [make_phase("alone", [0.1]), make_phase("beside", [0.19])]
    page = fairness.text(OPTIONS, good)
    assert "1.90 times what it is alone (within 2)" in page
    assert "| 1 | 40.0 | 1200 | 90 | 5 | 50.0 | 2500 |" in page
    assert "(over 2)" in fairness.text(OPTIONS, [make_phase("alone", [0.1]), make_phase("beside", [0.3])])


def test_broken_answers_are_counted_but_not_timed() -> None:
    ask = Ask(0.0, 0, 1, 1, 1)
    good = Answer(ask, 1.0, token_times_s=[1.5], status=200)
    phase = Phase.of("alone", [good, Answer(ask, 0.0, status=503, error="full")], {})
    assert (phase.ttft_s, phase.num_unanswered, phase.errors) == ([0.5], 1, ["full"])
