"""Tools to call, the markers around calls, and answers with calls as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from loraserve.text.chat_format import AnswerParser
from loraserve.text.tool_parsers.format import Tool
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, Delta, Parser, ReasoningDelta, TextDelta

EOS = "<|eos|>"
MARKERS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>"),
    *("<start_function_call>", "<end_function_call>", "<escape>", "<think>", "</think>"),
)

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "$defs": {"flag": {"type": "boolean"}},
    },
    is_strict=True,
)
TIME = Tool("get_time")
SAY = Tool("say", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
TOOLS = (WEATHER, TIME, SAY)


def answer_of(parser: Parser | AnswerParser, pieces: Iterable[str]) -> dict[str, Any]:
    """Return what a parser finds in a text that comes in pieces."""
    return joined([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


def joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return what deltas add up to."""
    answer: dict[str, Any] = {}
    for delta in deltas:
        match delta:
            case TextDelta(text):
                answer["content"] = answer.get("content", "") + text
            case ReasoningDelta(text):
                answer["reasoning"] = answer.get("reasoning", "") + text
            case CallStart(index, name):
                calls = answer.setdefault("calls", [])
                assert index == len(calls)
                calls.append([name, ""])
            case ArgumentsDelta(index, text):
                assert index == len(answer["calls"]) - 1, "only the last call's arguments go on"
                answer["calls"][index][1] += text
    return answer


def decoded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with arguments that are JSON as values."""
    calls = [[name, json.loads(arguments)] for name, arguments in answer.get("calls", [])]
    return {**answer, **({"calls": calls} if calls else {})}
