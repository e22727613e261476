"""JSON schemas to answer: drawn ones, and the JSON-Schema test suite's (MIT, see its file)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

SUITE = Path(__file__).with_name("json_schema_suite.json")
_MAX_DEPTH = 3
_WORDS = ("name", "age", "city", "tags", "price", "kind", "date", "notes", "items", "size", "ok", "é", "a b", "$x", "0")
_PATTERNS = ("^[0-9]{5}$", "^[A-Z][a-z]{1,8}$", "[ab]c?d", "^(?:\\+|-)?[0-9]{1,3}$", "^.{2,6}$", "x|yz|w{3}")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")
_WIDTHS = ("0.5", "0.1", "0.25", "1", "0.001", "7", "1.5", "49.9")


@dataclass(frozen=True, slots=True)
class SuiteSchema:
    """A schema of the suite.

    Attributes:
        tests: values, and whether each is valid.
    """

    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


@cache
def suite() -> tuple[SuiteSchema, ...]:
    """Return the schemas of draft 2020-12 that every implementation has to support."""
    return tuple(
        SuiteSchema(
            f"{one['file']}: {one['description']}",
            one["schema"],
            tuple((data, valid) for data, valid in one["tests"]),
        )
        for one in json.loads(SUITE.read_text())["schemas"]
    )


def draw_schema(seed: int) -> dict[str, Any]:
    """Return a schema that can be answered, the same for the same seed."""
    draw = random.Random(seed)
    schema = _object(draw, 0) if draw.random() < 0.8 else _any(draw, 0)
    if draw.random() < 0.2:
        # a tree: the schema refers to itself
        node = {
            "type": "object",
            "properties": {"value": _leaf(draw), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema = {
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/node"}, "rest": schema},
            "required": ["first", "rest"],
            "additionalProperties": False,
            "$defs": {"node": node},
        }
    return schema


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth >= _MAX_DEPTH or draw.random() < 0.5:
        return _leaf(draw)
    return draw.choice((_object, _array, _any_of, _all_of, _union))(draw, depth + 1)


def _leaf(draw: random.Random) -> dict[str, Any]:
    return draw.choice((_string, _string, _integer, _number, _enum, _const, _boolean))(draw)


def _string(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 12}
    if kind == 1:
        return {"type": "string", "format": draw.choice(_FORMATS), "maxLength": 40}
    least = draw.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(1, 16)}


def _integer(draw: random.Random) -> dict[str, Any]:
    low = draw.randrange(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + draw.randrange(10, 1000)}
    if draw.random() < 0.3:
        schema["multipleOf"] = draw.choice((2, 3, 5))
    return schema


def _number(draw: random.Random) -> dict[str, Any]:
    """A range of decimal arithmetic, as of a dropout, a learning rate or a price."""
    low = Decimal(draw.randrange(-100, 100)).scaleb(-draw.randrange(3)) if draw.random() < 0.6 else Decimal(0)
    width = Decimal(draw.choice(_WIDTHS))
    low, high = (low, low + width) if draw.random() < 0.7 else (low - width, low)
    lower, upper = draw.choice(("minimum", "exclusiveMinimum")), draw.choice(("maximum", "exclusiveMaximum"))
    return {"type": "number", lower: float(low), upper: float(high)}


def _boolean(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _enum(draw: random.Random) -> dict[str, Any]:
    return {
        "enum": draw.sample(["red", "green", 'quo"ted', 1, -2.5, None, True, [1, "x"], {"k": 0}], draw.randint(1, 4))
    }


def _const(draw: random.Random) -> dict[str, Any]:
    return {"const": draw.choice(("fixed", 42, None, [], {"a": [False]}))}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    if draw.random() < 0.3:
        items = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {
        "type": "array",
        "items": _any(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randrange(1, 3),
    }


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }
    if draw.random() < 0.1:
        schema["patternProperties"] = {"^x_[a-z]{1,3}$": _leaf(draw)}
    return schema


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _all_of(draw: random.Random, depth: int) -> dict[str, Any]:
    schema = _object(draw, depth)
    name = draw.choice(list(schema["properties"]))
    return {"allOf": [schema, {"type": "object", "required": [name]}]}


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    """A union whose alternatives differ in a constant, as pydantic writes it."""
    options = []
    for kind in draw.sample(("cat", "dog", "fox"), 2):
        option = _object(draw, depth)
        option["properties"] = {"kind": {"const": kind}, **option["properties"]}
        option["properties"]["kind"] = {"const": kind}
        option["required"] = ["kind", *(name for name in option["required"] if name != "kind")]
        options.append(option)
    return {"oneOf": options}
