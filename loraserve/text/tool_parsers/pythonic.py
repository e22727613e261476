"""Calls of Llama 3.2, Llama 4 and Gemma 3: Python, ``[get_weather(city="Oslo"), get_time()]``."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat, listed, property_list, quoted
from loraserve.text.tool_parsers.parser import NotACall, Steps, ToolParser

_STARTS = ("<|python_start|>", "<|python_tag|>")
_END = "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_SCALAR = re.compile(r"[^\s,:()\[\]{}'\"=]*")
_STRING_PART = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_HEX = re.compile(r"[0-9A-Fa-f]{0,8}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 32


class Pythonic(ToolFormat):
    name = "pythonic"
    markers = (*_STARTS, _END)

    @staticmethod
    def is_of(template: str) -> bool:
        return "func_name1(" in template or "<|python_start|>" in template

    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> ToolParser:
        return _PythonicParser([tool.name for tool in tools], hidden)

    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        alternatives = []
        for index, tool in enumerate(tools):
            arguments = _keyword_arguments(rules, index, tool)
            alternatives.append(f'{quoted(f"{tool.name}(")} {arguments} ")"')
        call = rules.add("call", " | ".join(alternatives))
        return rules.add("calls", f'{start or ""} "[" {listed(call, ", ", is_parallel=is_parallel)} "]"')


def _keyword_arguments(rules: LarkRules, index: int, tool: Tool) -> str:
    """Add rules for ``city="Oslo", days=3``, and return their symbol.

    What isn't a plain object's schema makes ``**{"city": "Oslo"}``.
    """
    values = itertools.count()

    def item(key: str, schema: dict[str, Any]) -> str:
        value = rules.json(f"value_{index}_{next(values)}", schema, f"{tool.param}.properties.{key}")
        return f"{quoted(f'{key}=')} {value}"

    schema = tool.schema
    keywords = property_list(rules, index, schema, ", ", item)
    return f'"**" {rules.json(f"arguments_{index}", schema, tool.param)}' if keywords is None else keywords


class _PythonicParser(ToolParser):
    """A call is emitted once all of it was read: its arguments are translated to JSON."""

    def _parse(self) -> Steps[None]:
        try:
            yield from self._skip_space()
            if (yield from self._peek()) != "[":
                raise NotACall
            yield from self._call_list(is_marked=False)
        except NotACall:
            self._give_back()
        yield from self._read_marked(_STARTS)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._call_list(is_marked=True)

    def _call_list(self, *, is_marked: bool) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            name = yield from self._run(_NAME)
            if not name or not (is_marked or name in self._tool_names):
                raise NotACall
            yield from self._skip_space()
            yield from self._expect("(")
            arguments = yield from self._keywords()
            self._argue(self._begin_call(name), arguments)
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                yield from self._expect("]")
                break
        yield from self._end((_END,))

    def _keywords(self) -> Steps[str]:
        """Parse the keyword arguments up to the closing parenthesis, as JSON."""
        arguments: dict[str, Any] = {}
        yield from self._skip_space()
        while not (yield from self._accept(")")):
            if (yield from self._accept("**")):
                more = yield from self._literal(1)
                if not isinstance(more, dict):
                    raise NotACall
                arguments |= more
            else:
                key = yield from self._run(_NAME)
                yield from self._skip_space()
                yield from self._expect("=")
                if not key:
                    raise NotACall
                arguments[key] = yield from self._literal(1)
            yield from self._skip_space()
            if (yield from self._accept(",")):
                yield from self._skip_space()
            elif (yield from self._peek()) != ")":
                raise NotACall
        try:
            # a NaN, an infinity or half a surrogate pair has no JSON
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ValueError:
            raise NotACall from None
        return text

    def _literal(self, depth: int) -> Steps[Any]:
        """Parse a Python or JSON literal to its value."""
        if depth > _MAX_DEPTH:
            raise NotACall
        yield from self._skip_space()
        first = yield from self._peek()
        if first in _STRING_PART:
            value = ""
            # adjacent strings are one
            while (yield from self._peek()) in _STRING_PART:
                value += yield from self._string()
                yield from self._skip_space()
            return value
        if first in _CLOSERS:
            self._text.at += 1
            return (yield from self._items(first, depth))
        word = yield from self._run(_SCALAR)
        if word in _WORDS:
            return _WORDS[word]
        try:
            return int(word)
        except ValueError:
            pass
        try:
            return float(word)
        except ValueError:
            raise NotACall from None

    def _items(self, opener: str, depth: int) -> Steps[Any]:
        """Parse the list or the dictionary that `opener` began."""
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        yield from self._skip_space()
        while not (yield from self._accept(_CLOSERS[opener])):
            item = yield from self._literal(depth + 1)
            yield from self._skip_space()
            if opener == "{":
                yield from self._expect(":")
                if not isinstance(item, str):
                    item = json.dumps(item)
                pairs[item] = yield from self._literal(depth + 1)
                yield from self._skip_space()
            else:
                items.append(item)
            if (yield from self._accept(",")):
                yield from self._skip_space()
            elif (yield from self._peek()) != _CLOSERS[opener]:
                raise NotACall
        return pairs if opener == "{" else items

    def _string(self) -> Steps[str]:
        """Parse the string that a quote begins."""
        quote = yield from self._next()
        closer = quote
        if (yield from self._accept(quote * 2)):
            closer = quote * 3
        pieces: list[str] = []
        while True:
            pieces.append((yield from self._run(_STRING_PART[quote])))
            if (yield from self._accept(closer)):
                break
            char = yield from self._next()
            pieces.append((yield from self._escape()) if char == "\\" else char)
        # \ud83d\ude00 is one character in JSON, which models mix with Python's strings
        return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _escape(self) -> Steps[str]:
        """Decode the escape behind a backslash."""
        char = yield from self._next()
        if char in _HEX_ESCAPES:
            digits = yield from self._run(_HEX)
            length = _HEX_ESCAPES[char]
            self._text.at -= max(0, len(digits) - length)
            try:
                return chr(int(digits[:length], 16))
            except (ValueError, OverflowError):
                raise NotACall from None
        if char in "\\'\"":
            return char
        return _ESCAPES.get(char, f"\\{char}")
