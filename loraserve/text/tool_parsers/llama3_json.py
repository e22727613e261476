"""Calls of Llama 3.

``{"name": …, "parameters": {…}}``, at the answer's beginning or behind ``<|python_tag|>``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat, call_alternatives, listed
from loraserve.text.tool_parsers.json_calls import JsonToolParser

_START = "<|python_tag|>"


class Llama3Json(ToolFormat):
    name = "llama3_json"
    markers = (_START,)

    @staticmethod
    def is_of(template: str) -> bool:
        return _START in template or '"parameters": dictionary' in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return JsonToolParser([tool.name for tool in tools], hidden, starts=(_START,), bare="{")

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        call = call_alternatives(rules, tools, arguments="parameters")
        return rules.add("calls", f"{start or ''} {listed(call, '; ', is_parallel=is_parallel)}")
