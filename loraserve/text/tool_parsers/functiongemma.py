"""Calls of FunctionGemma.

``<start_function_call>call:f{city:<escape>Oslo<escape>,days:3}<end_function_call>``
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from loraserve.text.tool_parsers.format import (
    LarkRules,
    Tool,
    ToolFormat,
    add_marked,
    property_list,
    quoted,
)
from loraserve.text.tool_parsers.parser import NotACall, Steps, ToolParser

_START, _END, _ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_KEY = re.compile(r"[^:{}\[\],<]*")
_SCALAR = re.compile(r"[^,{}\[\]<]*")
_QUOTED_PART = re.compile(r'[^"\\]*')
_STRING_PART = re.compile(r"[^<]*")
_CLOSERS = {"{": "}", "[": "]"}
_MAX_DEPTH = 32


class FunctionGemma(ToolFormat):
    name = "functiongemma"
    starts = (_START,)
    markers = (_START, _END, _ESCAPE)

    @staticmethod
    def is_of(template: str) -> bool:
        return _START in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> ToolParser:
        return _FunctionGemmaParser([tool.name for tool in tools], hidden)

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        text = rules.text_until("text", _ESCAPE)
        alternatives = []
        for index, tool in enumerate(tools):
            pairs = _pairs(rules, index, tool, text)
            if pairs is None:
                whole = rules.json(f"arguments_{index}", tool.schema, tool.param)
                alternatives.append(f"{quoted(f'call:{tool.name}')} {whole}")
            else:
                alternatives.append(f"{quoted(f'call:{tool.name}' + '{')} {pairs} {quoted('}')}")
        call = rules.add("call", " | ".join(alternatives))
        body = rules.add("body", f"{call} {rules.marker(_END)}")
        return add_marked(rules, body, rules.marker(_START), "", first=start, is_parallel=is_parallel)


def _pairs(rules: LarkRules, index: int, tool: Tool, text: str) -> str | None:
    """Add rules for ``city:<escape>Oslo<escape>,days:3``; None where the schema has more."""
    escape = rules.marker(_ESCAPE)
    values = itertools.count()

    def item(key: str, schema: dict[str, Any]) -> str:
        choices = schema.get("enum")
        if schema.get("type") == "string" and not schema.keys() & _STRING_BOUNDS:
            value = f"{escape} {text}"
        elif isinstance(choices, list) and all(isinstance(choice, str) and _ESCAPE not in choice for choice in choices):
            value = f"{escape} ({' | '.join(map(quoted, choices))}) {escape}"
        else:
            value = rules.json(f"value_{index}_{next(values)}", schema, f"{tool.param}.properties.{key}")
        return f"{quoted(f'{key}:')} {value}"

    return property_list(rules, index, tool.schema, ",", item)


_STRING_BOUNDS = frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength"})


class _FunctionGemmaParser(ToolParser):
    """A call is emitted once all of it was read: its arguments are translated to JSON."""

    def _parse(self) -> Steps[None]:
        yield from self._read_marked((_START,))

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("call:")
        name = yield from self._run(_NAME)
        yield from self._expect("{")
        if not name:
            raise NotACall
        arguments = yield from self._items("{", 1)
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise NotACall from None
        self._argue(self._begin_call(name), text)
        yield from self._end((_END,))

    def _items(self, opener: str, depth: int) -> Steps[Any]:
        """Parse the list or the object that `opener` began."""
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        yield from self._skip_space()
        while not (yield from self._accept(_CLOSERS[opener])):
            if opener == "{":
                key = yield from self._key()
                yield from self._expect(":")
                pairs[key] = yield from self._value(depth)
            else:
                items.append((yield from self._value(depth)))
            yield from self._skip_space()
            if (yield from self._accept(",")):
                yield from self._skip_space()
            elif (yield from self._peek()) != _CLOSERS[opener]:
                raise NotACall
        return pairs if opener == "{" else items

    def _key(self) -> Steps[str]:
        if (yield from self._peek()) in ('"', "<"):
            key = yield from self._value(_MAX_DEPTH)
        else:
            key = (yield from self._run(_KEY)).strip()
        if not isinstance(key, str) or not key:
            raise NotACall
        yield from self._skip_space()
        return key

    def _value(self, depth: int) -> Steps[Any]:
        if depth > _MAX_DEPTH:
            raise NotACall
        yield from self._skip_space()
        if (yield from self._accept(_ESCAPE)):
            return (yield from self._escaped())
        first = yield from self._peek()
        if first in _CLOSERS:
            self._text.at += 1
            return (yield from self._items(first, depth + 1))
        if first == '"':
            written = yield from self._quoted()
        else:
            written = (yield from self._run(_SCALAR)).strip()
        try:
            # orjson checks, and makes floats of large integers
            orjson.loads(written)
            return json.loads(written)
        except orjson.JSONDecodeError:
            # a string whose marks were forgotten
            if not written or first == '"':
                raise NotACall from None
            return written

    def _quoted(self) -> Steps[str]:
        """Parse a JSON string as it is written; its first quote comes next."""
        pieces = [(yield from self._next())]
        while True:
            pieces.append((yield from self._run(_QUOTED_PART)))
            char = yield from self._next()
            pieces.append(char)
            if char == '"':
                return "".join(pieces)
            pieces.append((yield from self._next()))

    def _escaped(self) -> Steps[str]:
        """Parse the string up to its closing mark; the opening one is read."""
        pieces: list[str] = []
        while True:
            pieces.append((yield from self._run(_STRING_PART)))
            if (yield from self._accept(_ESCAPE)):
                return "".join(pieces)
            pieces.append((yield from self._next()))
