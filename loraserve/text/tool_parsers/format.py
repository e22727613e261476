"""Format of a family's tool calls: its parser and its grammar."""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loraserve.errors import PayloadTooLarge
from loraserve.limits import LIMITS
from loraserve.text.answer_format import NamedSchema
from loraserve.text.json_schema.preparation import prepare
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.parser import ToolParser

ALPHANUMERIC = string.ascii_letters + string.digits
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as Python's json.dumps writes it, which is what chat templates show."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object's; None: it has none.
        is_strict: whether every keyword of the schema must be enforced.
        param: the field of the request that the parameters came in.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    param: str = "tools"

    @property
    def schema(self) -> dict[str, Any]:
        """Schema for a grammar, in which calls have only declared parameters.

        Raises:
            InvalidRequest: it is no schema, or over a bound; `param` names the place.
            UnsupportedParameter: a part of a strict one can't be enforced.
        """
        schema = _closed(dict(self.parameters or {"properties": {}}))
        prepared = prepare(schema, self.param, is_lenient=not self.is_strict)
        prepared.setdefault("type", "object")
        return prepared | {"x-guidance": _SPACED | {"lenient": not self.is_strict}}


@dataclass(slots=True)
class LarkRules:
    """Rules of a Lark grammar for llguidance, over one tokenizer."""

    tokenizer: Tokenizer
    rules: list[str] = field(default_factory=list)
    schemas: list[NamedSchema] = field(default_factory=list)
    """Schemas that rules refer to."""
    _num_schema_bytes: int = 0

    def add(self, name: str, body: str) -> str:
        """Add a rule, and return its name."""
        self.rules.append(f"{name}: {body}")
        return name

    def json(self, name: str, schema: Mapping[str, Any], param: str) -> str:
        """Add a rule for JSON of this schema; return its symbol.

        Args:
            name: of a grammar next to the rules.
            param: the field that the schema came in.

        Raises:
            PayloadTooLarge: the schemas are over `limits.max_grammar_bytes` together. Each has a
                copy of the definitions, so that many small ones may be.
        """
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        self._num_schema_bytes += len(text.encode())
        if self._num_schema_bytes > LIMITS.max_grammar_bytes:
            raise PayloadTooLarge(
                f"The schemas of tools are longer than {LIMITS.max_grammar_bytes} bytes, with their definitions.",
                param="tools",
            )
        self.schemas.append(NamedSchema(name=name, value=dict(schema), param=param))
        return f"@{name}"

    def marker(self, text: str) -> str:
        """Choose the symbol of a marker: an added token by its id, other text as it is.

        llguidance takes some added tokens for special ones, which no text matches, though the
        tokenizer doesn't.
        """
        token_id = self.tokenizer.token_to_id(text)
        return f"<[{token_id}]>" if token_id in self.tokenizer.added_token_ids else quoted(text)

    def text_without(self, name: str, *texts: str) -> str:
        """Add a terminal for text in which none of `texts` is."""
        return self.add(name, " & ".join(["/(?s:.*)/", *map(_without, texts)]))

    def text_until(self, name: str, end: str, *, without: Collection[str] = ()) -> str:
        """Add a rule for text up to a marker, which is included; the other texts aren't in it.

        Args:
            name: of the rule, in lower case.
        """
        symbol = self.marker(end)
        if symbol.startswith("<["):
            return self.add(name, f"{self.text_without(name.upper(), end, *without)}? {symbol}")
        text = self.add(name.upper(), " & ".join([f"/(?s:.*){_escaped(end)}/", *map(_without, without)]))
        # as short as it can be: the marker ends it
        return self.add(f"{name}[lazy]", text).removesuffix("[lazy]")

    def text(self) -> str:
        """Write the grammar."""
        return "\n".join(self.rules)


class ToolFormat(ABC):
    """A family's format of tool calls, for one model.

    Attributes:
        name: its name in vLLM's ``--tool-call-parser``.
        starts: texts that begin a call or a list of calls.
        markers: texts around calls that are special tokens in some vocabularies.
    """

    name: str
    starts: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Make the format of one model.

        Args:
            template: text of the chat template, which decides between formats of one family.
        """
        self.tokenizer = tokenizer
        self.start: str | None = self.starts[0] if self.starts else None
        """The marker that this model writes."""

    @staticmethod
    @abstractmethod
    def is_of(template: str) -> bool:
        """Check whether a chat template uses this format."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool], hidden: Collection[str] = ()) -> ToolParser:
        """Build a parser of one answer."""

    @abstractmethod
    def add_calls(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool, start: str | None = None) -> str:
        """Add rules for one call, or for several, to a grammar, and return the name of their rule.

        Args:
            start: symbol that begins the first call; None: this model's marker, if any.
        """

    def add_answer(self, rules: LarkRules, tools: Sequence[Tool], *, is_parallel: bool) -> str | None:
        """Add rules for text with calls in it; None if calls have no marker."""
        if self.start is None:
            return None
        others = [start for start in self.starts if start != self.start]
        begin = rules.text_until("begin", self.start, without=others)
        calls = self.add_calls(rules, tools, is_parallel=is_parallel, start=begin)
        return rules.add("free", f"{rules.text_without('FREE', *self.starts)} | {calls} /\\s*/")

    def distinct_start(self, rules: LarkRules) -> str | None:
        """Find the symbol of a marker that only calls have, if there is one."""
        if self.start is not None:
            return rules.marker(self.start)
        symbols = (rules.marker(marker) for marker in self.markers)
        return next((symbol for symbol in symbols if symbol.startswith("<[")), None)

    def special_markers(self) -> dict[str, int]:
        """Find the markers that are special tokens in this vocabulary, with their ids."""
        ids = {marker: special_id(self.tokenizer, marker) for marker in self.markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}

    def new_call_id(self) -> str:
        """Generate a new id for a call, in OpenAI's form."""
        return f"call_{random_id(24)}"

    def template_call_id(self, call_id: str) -> str:
        """Convert a call's id to the form that the chat template gets."""
        return call_id

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write calls as text, for a template that uses only the content of messages.

        Args:
            calls: objects with ``name`` and ``arguments``.
        """
        return "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)


def random_id(length: int) -> str:
    """Generate random letters and digits."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


def special_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Look up the id of the special token with this spelling; None if there is none."""
    token_id = tokenizer.token_to_id(text)
    return token_id if token_id in tokenizer.special_token_ids else None


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def call_alternatives(rules: LarkRules, tools: Sequence[Tool], *, arguments: str = "arguments") -> str:
    """Add a rule for one JSON call of any of the tools, and return its name."""
    alternatives = []
    for index, tool in enumerate(tools):
        schema = rules.json(f"arguments_{index}", tool.schema, tool.param)
        head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
        alternatives.append(f'{quoted(head)} {schema} "}}"')
    return rules.add("call", " | ".join(alternatives))


def add_marked(rules: LarkRules, body: str, start: str, separator: str, *, first: str | None, is_parallel: bool) -> str:
    """Add a rule for calls that each have a marker before them, and return its name.

    Args:
        first: symbol in the place of the first call's marker.
    """
    begin = start if first is None else first
    more = f"{quoted(separator)} {start} {body}" if separator else f"{start} {body}"
    return rules.add("calls", f"{begin} {body} ({more})*" if is_parallel else f"{begin} {body}")


def listed(item: str, separator: str, *, is_parallel: bool) -> str:
    """Write a symbol for one item, or for several with a separator between them."""
    return f"{item} ({quoted(separator)} {item})*" if is_parallel else item


def property_list(
    rules: LarkRules, index: int, schema: Mapping[str, Any], separator: str, item: Callable[[str, dict[str, Any]], str]
) -> str | None:
    """Add rules for an object's properties, one after the other, and return their symbol.

    Args:
        index: number of the tool, which makes the rules' names.
        item: from a property's name and its schema, which stands alone, to a symbol.

    Returns:
        None where the schema is more than a list of properties.
    """
    if not _is_plain(schema):
        return None
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    required = frozenset(schema.get("required", ()))
    # `first` begins the list of what is left, `rest` continues after another property
    first, rest = "", ""
    for number, (key, value) in reversed(list(enumerate(schema["properties"].items()))):
        own = value if isinstance(value, dict) else {}
        pair = rules.add(f"item_{index}_{number}", f"{item(key, own | shared)} {rest}")
        after = f"{quoted(separator)} {pair}"
        if key in required:
            first, rest = pair, rules.add(f"rest_{index}_{number}", after)
        else:
            first = rules.add(f"first_{index}_{number}", f"{pair} | {first}" if first else f"{pair}?")
            rest = rules.add(f"rest_{index}_{number}", f"{after} | {rest}" if rest else f"({after})?")
    return first


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Check whether each property can be written for itself."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _PLAIN_KEYWORDS
        and schema.get("additionalProperties") is False
        and properties.keys() >= set(schema.get("required", ()))
        and all(_PLAIN_NAME.fullmatch(key) for key in properties)
        and not _OTHER_REFERENCE.search(json.dumps(schema))
    )


_PLAIN_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
    | {"title", "description", "$schema", "$id", "examples"}
)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OTHER_REFERENCE = re.compile(r'"\$(?:dynamicRef|ref)": "(?!#/(?:\$defs|definitions)/)')
"""Reference that isn't to a definition, and so can't be copied with one property's schema."""


def _without(text: str) -> str:
    """Write a regular expression for text that doesn't hold `text`."""
    return f"~/(?s:.*){_escaped(text)}(?s:.*)/"


def _escaped(text: str) -> str:
    """Write a regular expression for `text`, inside slashes."""
    return "".join(char if char.isalnum() else f"\\x{ord(char):02x}" for char in text)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Close the schema's objects: they take their declared properties alone.

    Below ``allOf`` and its like nothing is closed: there, properties are declared in several
    places.
    """
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema = schema | {
            "properties": {
                key: _closed(value) if isinstance(value, dict) else value for key, value in properties.items()
            }
        }
        if not _OPENERS & schema.keys():
            schema["additionalProperties"] = False
    items = schema.get("items")
    if isinstance(items, dict):
        schema = schema | {"items": _closed(items)}
    return schema


_OPENERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
"""Keywords with which `properties` isn't the whole of what an object may have."""
