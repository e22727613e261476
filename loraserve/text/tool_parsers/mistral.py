"""Calls of Mistral.

``[TOOL_CALLS]`` before a JSON list, or, with later tokenizers, before each ``name[ARGS]{…}``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import (
    ALPHANUMERIC,
    LarkRules,
    Tool,
    ToolFormat,
    add_marked,
    call_alternatives,
    listed,
    quoted,
    random_id,
)
from loraserve.text.tool_parsers.json_calls import JsonToolParser
from loraserve.text.tool_parsers.parser import NotACall, Steps

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LENGTH = 9
"""Length of the ids that Mistral's templates take, letters and digits alone."""
_WORD = re.compile(r"[A-Za-z0-9_.-]*")


class Mistral(ToolFormat):
    name = "mistral"
    starts = (_START,)
    markers = (_START, _ID, _ARGUMENTS)

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        super().__init__(tokenizer, template)
        self._is_list = tokenizer.token_to_id(_ARGUMENTS) is None

    @staticmethod
    def is_of(template: str) -> bool:
        return _START in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> JsonToolParser:
        return _MistralParser([tool.name for tool in tools], hidden, starts=self.starts)

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        marker = rules.marker(_START)
        if self._is_list:
            calls = listed(call_alternatives(rules, tools), ", ", is_parallel=is_parallel)
            return rules.add("calls", f'{start or marker} " "? "[" {calls} "]"')
        alternatives = []
        for index, tool in enumerate(tools):
            schema = rules.json(f"arguments_{index}", tool.schema, tool.param)
            alternatives.append(f"{quoted(tool.name)} {rules.marker(_ARGUMENTS)} {schema}")
        call = rules.add("call", " | ".join(alternatives))
        return add_marked(rules, call, marker, "", first=start, is_parallel=is_parallel)

    def new_call_id(self) -> str:
        return random_id(_ID_LENGTH)

    def template_call_id(self, call_id: str) -> str:
        if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
            return call_id
        digest = int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=8).digest(), "big")
        return "".join(ALPHANUMERIC[digest // len(ALPHANUMERIC) ** n % len(ALPHANUMERIC)] for n in range(_ID_LENGTH))


class _MistralParser(JsonToolParser):
    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._peek()) in ("[", "{"):
            yield from super()._calls(marker)
            return
        name = yield from self._run(_WORD)
        if not name:
            raise NotACall
        if (yield from self._accept(_ID)):
            yield from self._run(_WORD)
        yield from self._accept(_ARGUMENTS)
        yield from self._skip_space()
        yield from self._stream_arguments(name)
        self._text.settle()
