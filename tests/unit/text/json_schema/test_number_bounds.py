"""Numbers lie within their bounds, drawn from decimal arithmetic, and have few digits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from campaigns import default_and_campaign

from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of

NEAR = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (NEAR, ["0.25", "0.001", "0.000000001", "0.4999"], ["0", "0.0", "-0", "0.5"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "type": "number"}, ["0.5", "0.1"], ["0", "0.00"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0, "type": "number"}, ["-0.5", "-0.001"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 3, "maximum": 3.25, "type": "number"}, ["3.1", "3.25"], ["3", "3.0"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5, "type": "number"}, ["0.1"], ["0"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0", "0.0"]),
        ({"exclusiveMinimum": 0, "maximum": 1e-12, "type": "number"}, ["0.000000000001"], ["0"]),
        (
            {"exclusiveMinimum": 5000000000, "maximum": 5000000000.5, "type": "number"},
            ["5000000000.25"],
            ["5000000000"],
        ),
        ({"exclusiveMinimum": 0, "type": "integer"}, ["1", "9000000000000000000"], ["0", "0.5"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25, "type": "number"}, ["0.25"], ["0"]),
    ],
)
def test_exclusive_bound_excludes_bound_value(
    accepts: Callable[..., bool], schema: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not accepts(schema, text)] == []
    assert [text for text in outside if accepts(schema, text)] == []


def draw_bounds(draw: random.Random) -> dict[str, Any]:
    """Draw bounds with few decimals, near each other, in one node or in two that meet."""
    places = draw.choice((0, 0, 1, 2, 3))
    low = Decimal(draw.randrange(-30, 30)).scaleb(-places) if draw.random() < 0.7 else Decimal(draw.randrange(-3, 4))
    width = Decimal(draw.choice((1, 2, 5, 7, 10, 25, 50, 99, 100, 150))).scaleb(-draw.randrange(4))
    high = low + width
    if draw.random() < 0.3:
        high = Decimal(draw.randrange(-3, 4))
        low = high - width
    bounds: dict[str, Any] = {}
    for names, bound in ((("minimum", "exclusiveMinimum"), low), (("maximum", "exclusiveMaximum"), high)):
        if draw.random() < 0.9:
            name = names[draw.random() < 0.6]
            bounds[name] = int(bound) if bound == int(bound) and draw.random() < 0.5 else float(bound)
    if draw.random() < 0.2:
        first, *rest = bounds.items() or [("type", "number")]
        return {"allOf": [{"type": "number", first[0]: first[1]}, dict(rest)]}
    return {"type": "number", **bounds}


@pytest.mark.parametrize("seed", default_and_campaign(range(40), default=[0]))
def test_numbers_lie_within_drawn_bounds(babbler: Any, seed: int) -> None:
    draw = random.Random(seed)
    num_refused = 0
    for _ in range(60):
        schema = draw_bounds(draw)
        try:
            grammar = babbler.grammar(schema)
        except InvalidRequest:
            num_refused += 1
            continue
        for text in babbler.answers(grammar, 6, seed):
            jsonschema.validate(json.loads(text), schema)
    assert num_refused <= 2


def test_bounds_without_numbers_between_are_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"exclusiveMinimum": 1e15, "maximum": 1e15 + 0.125}}}
    with pytest.raises(UnsupportedParameter, match="no number lies between") as refused:
        grammar_of(AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=schema, param="field"))
    assert refused.value.param == "field.properties.a.exclusiveMinimum"


@pytest.mark.parametrize(
    ("schema", "short", "long"),
    [
        ({"type": "number"}, ["-1.5", "1234567890123456789", "0.123456789"], ["0.1234567891", "1" * 20, "1e400"]),
        ({"type": "integer"}, ["-1234567890123456789", "0"], ["1" * 20]),
        ({"type": ["number", "null"], "minimum": 0}, ["null", "7.25"], ["0.1234567891", "1" * 20]),
        ({"type": "array", "items": {"type": "number"}}, ["[1.5]"], ["[0.1234567891]"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "number"}}}, ["2.5"], ["0.1234567891"]),
        ({"type": "number", "multipleOf": 0.25}, ["0.75"], ["1" * 20]),
    ],
)
def test_digits_are_bounded_unless_asked_otherwise(
    accepts: Callable[..., bool], schema: dict[str, Any], short: list[str], long: list[str]
) -> None:
    assert [text for text in short if not accepts(schema, text)] == []
    assert [text for text in long if accepts(schema, text)] == []
    assert [text for text in [*short, *long] if not accepts(schema, text, has_bounded_numbers=False)] == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "minimum": 8.9e18}, "8950000000000000000"),
        ({"allOf": [{"type": "number"}, {"const": 1e19}]}, "10000000000000000000"),
        ({"type": "number", "maximum": 0.0000000000001}, "0.0000000000001"),
        ({"allOf": [{"type": "number"}, {"multipleOf": 5}]}, "1005"),
        ({"allOf": [{"type": "number"}, {"multipleOf": 0.125}]}, "1.125"),
    ],
)
def test_numbers_named_by_schema_stay_possible(accepts: Callable[..., bool], schema: dict[str, Any], text: str) -> None:
    assert accepts(schema, text)
