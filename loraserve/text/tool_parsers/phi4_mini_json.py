"""Calls of Phi-4-mini.

``functools[{"name": …, "arguments": {…}}]``, or the list between ``<|tool_call|>`` markers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat, call_alternatives, listed
from loraserve.text.tool_parsers.json_calls import JsonToolParser
from loraserve.text.tool_parsers.parser import Steps

_WORD, _START, _END = "functools[", "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniJson(ToolFormat):
    name = "phi4_mini_json"
    starts = (_WORD, _START)
    markers = (_START, _END)

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        super().__init__(tokenizer, template)
        if _WORD not in template and tokenizer.token_to_id(_START) is not None:
            self.start = _START

    @staticmethod
    def is_of(template: str) -> bool:
        return _WORD in template or "<|/tool_call|>" in template or "<|/tool|>" in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return _Phi4MiniParser([tool.name for tool in tools], hidden, starts=self.starts, ends=(_END,))

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        call = call_alternatives(rules, tools)
        calls = listed(call, ", ", is_parallel=is_parallel)
        if self.start == _START:
            return rules.add("calls", f'{start or rules.marker(_START)} "[" {calls} "]" {rules.marker(_END)}')
        return rules.add("calls", f'{start or rules.marker(_WORD)} {calls} "]"')

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        text = json.dumps(list(calls), ensure_ascii=False)
        return f"{_START}{text}{_END}" if self.start == _START else f"{_WORD}{text[1:]}"


class _Phi4MiniParser(JsonToolParser):
    def _calls(self, marker: str) -> Steps[None]:
        if marker == _WORD:
            yield from self._call_list()
            yield from self._end(self._ends)
        else:
            yield from super()._calls(marker)
