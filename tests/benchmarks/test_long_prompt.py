"""What is made of streams' tokens while long prompts are read."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import long_prompt
from benchmarks.asking import Answer
from benchmarks.long_prompt import Turn
from benchmarks.traffic import Ask


def answer(sent_s: float, *times_s: float) -> Answer:
    return Answer(Ask(0.0, 0, 8, len(times_s), 1), sent_s, sent_s, token_times_s=list(times_s), status=200)


def test_gaps_are_split_by_prompts() -> None:
    stream = answer(0.0, 1.0, 1.5, 2.0, 2.25, 3.25, 4.25, 4.5)
    prompt = answer(2.5, 4.0)
    assert long_prompt.split([stream], [prompt]) == ([0.25, 0.25], [1.0, 1.0])


def test_page_compares_two_settings() -> None:
    turns = [
        Turn("off", [0.01] * 99, [0.4] * 9, [1.0], 5000.0, 700.0),
        Turn("auto", [0.01] * 99, [0.04] * 9, [1.25], 4900.0, 690.0),
    ]
    options = argparse.Namespace(prompt_tokens=2000, quantize="int8", rounds=1, model=Path("base"))
    page = long_prompt.text(options, turns)
    assert "| off | 10.0 | 400 | 400 | 400 | 40.0 | 1000 | 5,000 | 700 |" in page
    assert "| auto | 10.0 | 40.0 | 40.0 | 40.0 | 4.0 | 1250 | 4,900 | 690 |" in page
