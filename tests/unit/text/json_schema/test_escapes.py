"""Names in an answer have one spelling, so that no listed property is there twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from loraserve.errors import UnsupportedParameter
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of

OPEN: dict[str, Any] = {"properties": {"admin": {"const": False}}, "required": ["admin"]}


@pytest.mark.parametrize(
    ("schema", "first", "second"),
    [
        (OPEN, "admin", r'"\u0061dmin": true'),
        (OPEN, "admin", '"admin": true'),
        ({**OPEN, "type": "object", "patternProperties": {"^x": {"const": 1}}}, "admin", r'"\u0061dmin": true'),
        ({**OPEN, "type": "object", "patternProperties": {"^x": {"const": 1}}}, "admin", r'"\u0078y": 2'),
        ({"properties": {"a\nb": {"const": False}}, "required": ["a\nb"]}, r"a\nb", r'"a\u000ab": true'),
        ({"properties": {'q"/': {"const": False}}, "required": ['q"/']}, r"q\"/", r'"q\u0022/": true'),
        ({"properties": {'q"/': {"const": False}}, "required": ['q"/']}, r"q\"/", r'"q\"\/": true'),
        ({"properties": {"é": {"const": False}}, "required": ["é"]}, "é", r'"\u00e9": true'),
        ({"properties": {"a\u0001": {"const": False}}, "required": ["a\u0001"]}, r"a\u0001", r'"\u0061\u0001": true'),
        ({"required": ["admin"]}, "admin", r'"\u0061dmin": true'),
    ],
)
def test_listed_name_occurs_once_in_any_spelling(
    accepts: Callable[..., bool], schema: dict[str, Any], first: str, second: str
) -> None:
    assert accepts(schema, f'{{"{first}": false}}')
    assert accepts(schema, f'{{"{first}": false, "other": 1}}')
    assert not accepts(schema, f'{{"{first}": false, {second}}}')


VALUES = ["é", "\u2028", "\U0001f600", 'q"\\/', "a\nb\tc\r\b\f", "\u0001", "a\u0000b", "\u007f", "\u001f\u0085"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("make", [lambda value: {"const": value}, lambda value: {"enum": ["x", [value]]}])
def test_listed_value_equals_parsed_value(babbler: Any, value: str, make: Callable[[str], Any]) -> None:
    schema = make(value)
    texts = set(babbler.answers(babbler.grammar(schema), 12))
    listed = [schema["const"]] if "const" in schema else schema["enum"]
    assert all(json.loads(text) in listed for text in texts)
    assert any(value in text or "\\" in text for text in texts)


@pytest.mark.parametrize("name", VALUES)
def test_listed_name_equals_parsed_name(babbler: Any, name: str) -> None:
    schema = {"type": "object", "properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    assert {json.loads(text)[name] for text in babbler.answers(babbler.grammar(schema), 3)} == {1}
    # in an open object too
    del schema["additionalProperties"]
    assert babbler.accepts(babbler.grammar(schema), json.dumps({name: 1, "other": 2}, ensure_ascii=False))


@pytest.mark.parametrize(
    ("field", "keyword"),
    [
        ({"const": "a\u0001"}, "const"),
        ({"enum": ["b", {"c": ["\u007f"]}]}, "enum"),
        ({"type": "string", "pattern": "^[\\x00-\\x05]$"}, "pattern"),
        ({"type": "object", "patternProperties": {"^\\x01+$": {}}}, "patternProperties"),
    ],
)
def test_control_character_needs_closed_objects(
    accepts: Callable[..., bool], field: dict[str, Any], keyword: str
) -> None:
    schema = {"type": "object", "properties": {"a": field}, "required": ["a"]}

    def make(**fields: Any) -> str:
        return grammar_of(AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value={**schema, **fields}, param="field"))

    with pytest.raises(UnsupportedParameter, match="control character") as refused:
        make()
    assert refused.value.param == f"field.properties.a.{keyword}"
    if keyword != "patternProperties":
        make(additionalProperties=False)


def test_pattern_without_control_characters_is_enforced(accepts: Callable[..., bool]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^[^\x00-\x1f]{2}$"}}}
    assert accepts(schema, '{"a": "xy"}')
    assert not accepts(schema, r'{"a": "x\n"}')
    assert not accepts(schema, '{"a": "x"}')
