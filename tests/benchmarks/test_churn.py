"""What is made of a churn's measurements."""

from __future__ import annotations

import itertools

from benchmarks import churn
from benchmarks.asking import Answer
from benchmarks.churn import FirstTokens, Numbers, Phase
from benchmarks.traffic import Ask
from benchmarks.watching import Seen


def make_phase(kind: str, gaps_s: list[float], tokens_per_s: float = 100.0) -> Phase:
    return Phase(kind, gaps_s, tokens_per_s, [0.1, 0.2], 0, Seen(), 0.0)


def make_answer(*token_times_s: float) -> Answer:
    return Answer(Ask(0.0, 0, 1, len(token_times_s), 1), 0.0, token_times_s=list(token_times_s), status=200)


def test_no_adapter_is_for_two_purposes() -> None:
    numbers = Numbers(num_alone=5, num_cold=7)
    used = [*range(churn.NUM_STREAMS), *numbers.alone, *numbers.cold, *numbers.uploaded]
    assert used == list(range(32 + 5 + 7 + 7))


def test_extra_requests_have_steady_rate_and_distinct_prompts() -> None:
    asks = churn.extra_asks([4, 5, 6], 2.0, seed=10)
    assert [(ask.at_s, ask.adapter, ask.num_output_tokens) for ask in asks] == [(0.0, 4, 1), (0.5, 5, 1), (1.0, 6, 1)]
    assert len({ask.prompt_seed for ask in asks}) == 3


def test_total_stream_length_is_constant_from_start() -> None:
    first, second = (
        [next(itertools.islice(churn.stream_asks(i, 1024, 1000 * i), n, None)) for i in range(churn.NUM_STREAMS)]
        for n in range(2)
    )
    lengths = [ask.num_prompt_tokens for ask in first]
    assert [length - churn.PROMPT_TOKENS for length in lengths] == list(range(0, 1024, 32))
    assert {ask.num_prompt_tokens + ask.num_output_tokens for ask in first + second} == {1024 + churn.PROMPT_TOKENS}
    assert {ask.num_prompt_tokens for ask in second} == {churn.PROMPT_TOKENS}
    assert len({ask.prompt_seed for ask in first + second}) == 2 * churn.NUM_STREAMS


def test_gaps_lie_within_single_answer_and_window() -> None:
    answers = [make_answer(0.0, 1.0, 2.5, 9.0), make_answer(2.0)]
    assert churn.gaps_within(answers, 0.5, 3.0) == [1.0, 1.5]


def test_phases_are_pooled_by_kind_and_divided() -> None:
    phases = [
        make_phase("resident", [0.010] * 99 + [0.020]),
        make_phase("churn", [0.011] * 97 + [0.030] * 3, 80.0),
        make_phase("resident", [0.010] * 98 + [0.020] * 2),
        make_phase("churn", [0.011] * 97 + [0.030] * 3, 90.0),
    ]
    resident, both, ratio = churn.streams_table(phases).splitlines()[2:]
    assert resident.startswith("| requests for resident adapters | 10.0 | 20.0 | 20.0 | 100.0 | 100 | 200 | 0 |")
    assert both.startswith("| cold adapters, and uploads | 11.0 | 30.0 | 30.0 | 85.0 |")
    assert ratio.startswith("| the second ÷ the first | 1.100 | 1.500 | 1.500 | 0.850 |")


def test_gaps_after_uploads_are_excluded_from_ratio() -> None:
    phases = [make_phase("resident", [0.010] * 10), make_phase("churn", [0.011] * 10)]
    phases[1].gaps_after_s = [0.050] * 10
    ratio, left = churn.streams_table(phases).splitlines()[-2:]
    assert ratio.startswith("| the second ÷ the first | 1.100 | 1.100 | 1.100 |")
    assert left.startswith("| what was left of the uploads | 50.0 | 50.0 | 50.0 |")


def test_first_tokens_are_compared_with_loading_without_server() -> None:
    first = FirstTokens(
        [0.05] * 3, [0.02] * 3, [0.033] * 3, [0.003] * 3, read_s=[0.01] * 3, load_s=[0.025] * 3, server_load_s=0.03
    )
    cells = [line.split(" | ") for line in churn.first_table(first, [make_phase("churn", [])]).splitlines()[2:]]
    assert [row[-1].rstrip(" |") for row in cells] == ["0.40", "1.00", "1.20", "0.80", "2.00", "1.20", "4.00"]


def test_summary_has_percentiles_instead_of_all_gaps() -> None:
    summary = churn.summary(make_phase("churn", [0.01] * 1000))
    assert summary["num_gaps"] == 1000
    assert summary["gaps_s"]["p99"] == 0.01
    assert all(not isinstance(value, list) or len(value) < 10 for value in summary.values())
