"""What is made of measurements of answers that follow a schema."""

from __future__ import annotations

import argparse
import json
from collections import Counter

import jsonschema
import pytest

from benchmarks import structured
from benchmarks.asking import Answer
from benchmarks.structured import BESIDE, EACH, FREE, MODES, ONE, Outcome, Times
from benchmarks.traffic import Ask

OPTIONS = argparse.Namespace(size="tiny", quantize="none", streams=4, tokens=3, rounds=1)


def make_answer(gap_s: float, num_tokens: int = 3, error: str = "") -> Answer:
    times = [1.0 + gap_s * number for number in range(num_tokens)]
    return Answer(Ask(0.0, 0, 4, 3, 1), 0.0, 0.0, token_times_s=times, status=200, error=error)


def make_times(**gaps_s: float) -> list[Times]:
    all_times = []
    for mode, gap_s in zip(MODES, gaps_s.values(), strict=True):
        times = Times(mode)
        times.add([(make_answer(gap_s), mode in (FREE, BESIDE))] * 4)
        all_times.append(times)
    return all_times


def test_streams_are_constrained_according_to_mode() -> None:
    def schemas(mode: str) -> list[str]:
        return [json.dumps(structured.fields_of(mode, stream, None)) for stream in range(4)]

    assert schemas(FREE) == ["{}"] * 4
    assert len(set(schemas(ONE))) == 1
    assert len(set(schemas(EACH))) == 4
    assert [text == "{}" for text in schemas(BESIDE)] == [True, False, True, False]


def test_timed_schema_outlasts_any_answer() -> None:
    schema = structured.timed_schema(3)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["minItems"] * len(schema["items"]["required"]) > 1000


def test_the_ratio_is_the_median_of_each_rounds() -> None:
    gaps_s = {"free": 0.05, "one": 0.051, "each": 0.052, "beside": 0.0505}
    times = make_times(**gaps_s)
    # the machine was slower in a round, something else disturbed another, and one has no answers
    for mode, gap_s in zip(times, gaps_s.values(), strict=True):
        mode.add([(make_answer(6 * gap_s), False)])
        mode.add([(make_answer(gap_s if mode.mode == FREE else 9.0), False)])
        mode.add([])
    assert round(structured.ratio(times, ONE), 6) == 1.02
    assert round(structured.ratio(times, EACH), 6) == 1.04
    table = structured.times_table(times)
    assert "1.020" in table
    assert "1.040" in table


def test_broken_answers_are_reported_but_not_measured() -> None:
    times = Times(ONE)
    times.add([(make_answer(0.1), False), (make_answer(9.0, 2), False), (make_answer(9.0, 2, "lost"), False)])
    assert times.best_s == pytest.approx(0.1)
    assert sorted(times.errors) == ["an answer was short", "lost"]


def outcome(**counts: int) -> Outcome:
    return Outcome("x", Counter({name.replace("_", " "): number for name, number in counts.items()}))


def test_only_valid_answers_are_right() -> None:
    assert structured.is_right([outcome(valid=10), outcome(valid=3, refused=4, cut_off=1)])
    assert structured.is_right([outcome(valid=9, cut_off=1), outcome(valid=1)])
    for bad in ({"valid": 9, "failed": 1}, {"valid": 9, "not_valid": 1}, {"valid": 9, "refused": 1}):
        assert not structured.is_right([outcome(**bad), outcome(valid=1)])
    assert not structured.is_right([outcome(valid=1), outcome(valid=3, not_valid=1)])


def test_answer_is_validated_against_schema() -> None:
    schema = {"type": "integer"}
    assert structured.is_valid(schema, "3") is True
    assert structured.is_valid(schema, '"x"') is False
    assert structured.is_valid(schema, "{") is False
    assert structured.is_valid({"pattern": "\\p{L}"}, '"x"') is None


def test_the_page_names_figures_and_failures() -> None:
    times = make_times(free=0.05, one=0.051, each=0.06, beside=0.0505)
    outcomes = [outcome(valid=10), outcome(valid=3, not_valid=1)]
    outcomes[1].examples.append("EXAMPLE")
    scrape = {("loraserve_mask_seconds_count", ()): 100.0, ("loraserve_mask_seconds_sum", ()): 0.01}
    followed = [one for one in make_times(free=0.04, one=0.04, each=0.0404, beside=0.04) if one.mode in (FREE, EACH)]
    page = structured.text(OPTIONS, times, followed, outcomes, scrape)
    assert "1.200 times" in page
    assert "over 1.05" in page
    assert "| 1.010 |" in page
    assert "100 µs" in page
    assert "EXAMPLE" in page


def test_biases_stay_within_request_limit() -> None:
    bias = structured.closing_bias()
    assert 0 < len(bias) <= 300
    assert {value > 0 for value in bias.values()} == {True, False}
