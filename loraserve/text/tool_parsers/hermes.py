"""Calls of Hermes, Qwen, SmolLM and Granite 4.

``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat, add_marked, call_alternatives
from loraserve.text.tool_parsers.json_calls import JsonToolParser

_START, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    name = "hermes"
    starts = (_START,)
    markers = (_START, _END)

    @staticmethod
    def is_of(template: str) -> bool:
        return _START in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return JsonToolParser([tool.name for tool in tools], hidden, starts=self.starts, ends=(_END,))

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        body = rules.add("body", f'"\\n" {call_alternatives(rules, tools)} "\\n" {rules.marker(_END)}')
        return add_marked(rules, body, rules.marker(_START), "\n", first=start, is_parallel=is_parallel)
