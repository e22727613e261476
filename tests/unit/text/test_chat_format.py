from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_answers import TOOLS, answer_of

from loraserve.text.chat_format import ChatFormat, ToolUse
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, ReasoningDelta, TextDelta

TEMPLATES = Path(__file__).resolve().parent / "templates"
CALL = '<tool_call>{"name": "get_time", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def make_format(make_model_dir: Callable[..., Path]) -> Callable[..., ChatFormat]:
    def make(template: str = "hermes", **kwargs: Any) -> ChatFormat:
        path = make_model_dir("byte_level")
        (path / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
        tokenizer = Tokenizer(path)
        return ChatFormat(ChatTemplate(path, tokenizer), tokenizer, **kwargs)

    return make


def test_adjacent_pieces_of_same_kind_become_single_delta(make_format: Callable[..., ChatFormat]) -> None:
    answer_format = make_format().answer_format("", ToolUse(TOOLS, ()))
    assert answer_format is not None
    parser = answer_format.parser()
    deltas = [*parser.push(f"<think>a b</think>c d {CALL}{CALL}"), *parser.finish()]
    assert deltas == [
        ReasoningDelta("a b"),
        TextDelta("c d"),
        CallStart(0, "get_time"),
        ArgumentsDelta(0, '{"a": 1}'),
        CallStart(1, "get_time"),
        ArgumentsDelta(1, '{"a": 1}'),
    ]


def test_extra_calls_are_dropped_without_parallel_calls(make_format: Callable[..., ChatFormat]) -> None:
    answer_format = make_format().answer_format("", ToolUse(TOOLS, (), is_parallel=False))
    assert answer_format is not None
    text = f"{CALL}\n{CALL}"
    assert answer_of(answer_format.parser(), text) == {"calls": [["get_time", '{"a": 1}']]}


def test_calls_in_reasoning_are_thoughts(make_format: Callable[..., ChatFormat]) -> None:
    answer_format = make_format().answer_format("", ToolUse(TOOLS, ()))
    assert answer_format is not None
    assert answer_of(answer_format.parser(), [f"<think>{CALL}</think>No."]) == {"reasoning": CALL, "content": "No."}


def test_plain_text_answer_has_no_parser(make_format: Callable[..., ChatFormat]) -> None:
    without = make_format(reasoning_parser="none")
    assert without.answer_format("", None) is None
    assert make_format("llama3_json").answer_format("", None) is None
    closed = make_format().answer_format("<|im_start|>assistant\n<think>\n\n</think>\n\n", None)
    assert closed is None


def test_parsers_can_be_named_and_turned_off(make_format: Callable[..., ChatFormat]) -> None:
    chosen = make_format("llama3_json", tool_call_parser="qwen3_xml", reasoning_parser="deepseek_r1")
    assert chosen.tools is not None
    assert chosen.reasoning is not None
    assert (chosen.tools.name, chosen.reasoning.name) == ("qwen3_coder", "deepseek_r1")
    off = make_format(tool_call_parser="none", reasoning_parser="none")
    assert (off.tools, off.reasoning) == (None, None)
