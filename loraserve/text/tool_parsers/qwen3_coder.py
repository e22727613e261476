"""Calls of Qwen3-Coder.

``<tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>``
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from loraserve.text.tool_parsers.format import (
    LarkRules,
    Tool,
    ToolFormat,
    add_marked,
    call_alternatives,
    property_list,
    quoted,
)
from loraserve.text.tool_parsers.json_calls import JsonToolParser
from loraserve.text.tool_parsers.parser import NotACall, Steps

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]*")
_VALUE_PART = re.compile(r"[^<]*")
_STRING_BOUNDS = frozenset({"const", "pattern", "format", "minLength", "maxLength"})


class Qwen3Coder(ToolFormat):
    name = "qwen3_coder"
    starts = (_START, _FUNCTION)
    markers = (_START, _END)

    @staticmethod
    def is_of(template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return _Qwen3CoderParser(tools, hidden)

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        text = rules.text_until("text", _PARAMETER_END)
        others = []
        alternatives = []
        for index, tool in enumerate(tools):
            parameters = _parameters(rules, index, tool, text)
            if parameters is None:
                others.append(tool)
            else:
                head, tail = quoted(f"{_FUNCTION}{tool.name}>\n"), quoted(_FUNCTION_END)
                alternatives.append(rules.add(f"function_{index}", f"{head} {parameters} {tail}"))
        if others:
            alternatives.append(call_alternatives(rules, others))
        body = rules.add("body", f'"\\n" ({" | ".join(alternatives)}) "\\n" {rules.marker(_END)}')
        return add_marked(rules, body, rules.marker(_START), "\n", first=start, is_parallel=is_parallel)


def _parameters(rules: LarkRules, index: int, tool: Tool, text: str) -> str | None:
    """Add rules for the parameters' elements; None where they can't express the schema."""
    values = itertools.count()

    def item(key: str, schema: dict[str, Any]) -> str:
        choices = schema.get("enum")
        tail = quoted(f"\n{_PARAMETER_END}\n")
        head = quoted(f"{_PARAMETER}{key}>\n")
        if _is_text(schema) and not isinstance(choices, list):
            return f'{head} {text} "\\n"'
        if _is_text(schema) and isinstance(choices, list):
            value = f"({' | '.join(quoted(choice) for choice in choices if isinstance(choice, str))})"
        else:
            value = rules.json(f"value_{index}_{next(values)}", schema, f"{tool.param}.properties.{key}")
        return f"{head} {value} {tail}"

    schema = tool.schema
    properties = [value for value in schema.get("properties", {}).values() if isinstance(value, dict)]
    if any(_is_text(value) and value.keys() & _STRING_BOUNDS for value in properties):
        return None
    return property_list(rules, index, schema, "", item)


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


class _Qwen3CoderParser(JsonToolParser):
    """Values are JSON where the tool's schema doesn't declare them as strings."""

    def __init__(self, tools: Sequence[Tool], hidden: Collection[str]) -> None:
        self._schemas = {tool.name: tool.parameters or {} for tool in tools}
        super().__init__(self._schemas, hidden, starts=(_START, _FUNCTION), ends=(_END,))

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if marker != _FUNCTION and (yield from self._accept(_FUNCTION)) is None:
            yield from super()._calls(marker)
            return
        name = yield from self._run(_NAME)
        yield from self._expect(">")
        if not name:
            raise NotACall
        index = self._begin_call(name)
        properties = self._schemas.get(name, {}).get("properties")
        before = "{"
        while True:
            yield from self._skip_space()
            if not (yield from self._accept(_PARAMETER)):
                break
            key = yield from self._run(_NAME)
            yield from self._expect(">")
            value = yield from self._parameter(properties.get(key) if isinstance(properties, dict) else None)
            self._argue(index, f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
            self._text.settle()
            before = ", "
        if (yield from self._accept(_FUNCTION_END)) or not self._text.is_over:
            self._argue(index, "{}" if before == "{" else "}")
        yield from self._end((_END,))

    def _parameter(self, schema: object) -> Steps[str]:
        """Parse the value up to its closing tag, as JSON.

        Raises:
            NotACall: the text ends in it.
        """
        pieces: list[str] = []
        while True:
            pieces.append((yield from self._run(_VALUE_PART)))
            if (yield from self._accept(_PARAMETER_END)):
                break
            pieces.append((yield from self._next()))
        value = "".join(pieces).removeprefix("\n").removesuffix("\n")
        if not (isinstance(schema, dict) and _is_text(schema)):
            try:
                orjson.loads(value)
                # as it is written: a large integer wouldn't survive another writing
                return value.strip()
            except orjson.JSONDecodeError:
                pass
        return json.dumps(value, ensure_ascii=False)
