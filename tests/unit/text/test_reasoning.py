from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_answers import answer_of

from loraserve.text.reasoning import REASONING_FORMATS, ReasoningParser

CASES: list[tuple[str, bool | None, str, dict[str, Any]]] = [
    ("qwen3", None, "<think>\nHm < 1.\n</think>\n\nYes.", {"reasoning": "Hm < 1.", "content": "Yes."}),
    ("qwen3", None, "\n<think>Hm.</think>Yes. </think>", {"reasoning": "Hm.", "content": "Yes. </think>"}),
    ("qwen3", None, " No thought.\n", {"content": " No thought.\n"}),
    ("qwen3", None, "<thin", {"content": "<thin"}),
    ("qwen3", None, "<think>cut </thi", {"reasoning": "cut </thi"}),
    ("qwen3", None, "<think></think>\n", {}),
    ("qwen3", True, "Hm.\n\nSo.</think>Yes.", {"reasoning": "Hm.\n\nSo.", "content": "Yes."}),
    ("qwen3", False, "<think>no</think>", {"content": "<think>no</think>"}),
    ("deepseek_r1", True, "Hm.</think>Yes.", {"reasoning": "Hm.", "content": "Yes."}),
    ("deepseek_r1", True, "<think>\nHm.</think>Yes.", {"reasoning": "Hm.", "content": "Yes."}),
    ("deepseek_r1", True, "Hm.", {"reasoning": "Hm."}),
    ("mistral", None, "[THINK]Hm.[/THINK]Yes.", {"reasoning": "Hm.", "content": "Yes."}),
    (
        "granite",
        None,
        "Here is my thought process: Hm. Here it is. Here's my response: Yes.",
        {"reasoning": "Hm. Here it is.", "content": "Yes."},
    ),
    (
        "granite",
        None,
        "<think>Hm.</think>\n<response>Yes.</response>",
        {"reasoning": "Hm.", "content": "Yes."},
    ),
    ("granite", None, "Here is my answer.", {"content": "Here is my answer."}),
]


def parser(name: str, is_open: bool | None) -> ReasoningParser:
    return ReasoningParser(REASONING_FORMATS[name], is_open=is_open)


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), CASES)
def test_reasoning_is_separated_at_any_chunk_boundary(
    name: str, is_open: bool | None, text: str, expected: dict[str, Any]
) -> None:
    assert answer_of(parser(name, is_open), [text]) == expected
    assert answer_of(parser(name, is_open), text) == expected
    for at in range(len(text)):
        assert answer_of(parser(name, is_open), [text[:at], text[at:]]) == expected, text[:at]


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(sorted(REASONING_FORMATS)),
    is_open=st.sampled_from([True, False, None]),
    pieces=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "</th", "\n", " ", "Here is my ", "response:", "thought process:", "x"]
        ),
        max_size=8,
    ),
)
def test_any_text_reads_the_same_in_pieces(name: str, is_open: bool | None, pieces: list[str]) -> None:
    whole = answer_of(parser(name, is_open), ["".join(pieces)])
    assert answer_of(parser(name, is_open), pieces) == whole
    assert answer_of(parser(name, is_open), "".join(pieces)) == whole


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|><think>\n</think>", False),
    ],
)
def test_the_prompts_end_says_whether_reasoning_has_begun(name: str, prompt: str, expected: bool | None) -> None:
    assert REASONING_FORMATS[name].is_open(prompt) is expected
