"""Calls of Granite 3.

``<|tool_call|>[{"name": …, "arguments": {…}}]``, or ``<tool_call>`` before the list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat, call_alternatives, listed
from loraserve.text.tool_parsers.json_calls import JsonToolParser

_TOKEN, _TEXT, _END = "<|tool_call|>", "<tool_call>", "</tool_call>"


class Granite(ToolFormat):
    name = "granite"
    starts = (_TOKEN, _TEXT)
    markers = (_TOKEN, _TEXT, _END)

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        super().__init__(tokenizer, template)
        self.start = _TOKEN if _TOKEN in template or tokenizer.token_to_id(_TOKEN) is not None else _TEXT

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|start_of_role|>" in template and _TOKEN in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return JsonToolParser([tool.name for tool in tools], hidden, starts=self.starts, ends=(_END,), bare="[")

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        call = call_alternatives(rules, tools)
        calls = listed(call, ", ", is_parallel=is_parallel)
        return rules.add("calls", f'{start or rules.marker(self.start or _TOKEN)} "[" {calls} "]"')
