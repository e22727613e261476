"""Schemas made ready: what can't be enforced is named, and the part at fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.text.json_schema.alternatives import has_exclusive_alternatives
from loraserve.text.json_schema.nodes import find_fault, place, subschemas
from loraserve.text.json_schema.preparation import prepare

DEFS = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
}


def nested(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": fields}}}


@pytest.mark.parametrize(
    ("fields", "keyword"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"contains": {"type": "string"}}, "contains"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "json-pointer"}, "format"),
    ],
)
def test_unenforceable_keyword_is_named_with_path(fields: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        prepare(nested(**fields), "schema")
    assert caught.value.param == f"schema.properties.a.items.{keyword}"
    assert caught.value.hint is not None
    lenient = prepare(nested(**fields), "schema", is_lenient=True)
    assert keyword not in lenient["properties"]["a"]["items"]


@pytest.mark.parametrize(
    "fields",
    [
        {"uniqueItems": False},
        {"propertyNames": True},
        {"unevaluatedItems": True},
        {"then": {"minLength": 1}, "else": {"minLength": 2}},
        {"format": "password"},
    ],
)
def test_keywords_without_effect_are_left_out(fields: dict[str, Any]) -> None:
    assert prepare(nested(**fields), "schema")["properties"]["a"]["items"] == {}


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "uniqueItems": {"type": "integer"}}}
    assert prepare(schema, "schema") == schema


def test_the_callers_schema_is_kept() -> None:
    schema = nested(uniqueItems=False, minItems=2.0)
    prepared = prepare(schema, "schema")
    assert schema["properties"]["a"]["items"] == {"uniqueItems": False, "minItems": 2.0}
    assert prepared["properties"]["a"]["items"] == {"minItems": 2}
    assert isinstance(prepared["properties"]["a"]["items"]["minItems"], int)


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [(r"^(?!^[-+.]*$)[+-]?0*\d*$", False), (r"(a)\1", False), (r"(?<=a)b", False), (r"^(?:a|\\0)=!$", True)],
)
def test_lookaround_patterns_are_dropped_only_when_lenient(pattern: str, is_kept: bool) -> None:
    """Pydantic writes the first for a Decimal."""
    schema = nested(type="string", pattern=pattern)
    assert prepare(schema, "schema") == schema
    lenient = prepare(schema, "schema", is_lenient=True)
    assert ("pattern" in lenient["properties"]["a"]["items"]) == is_kept


def test_other_documents_are_not_fetched() -> None:
    with pytest.raises(UnsupportedParameter, match="another document") as caught:
        prepare(nested(**{"$ref": "http://127.0.0.1/schema"}), "schema")
    assert caught.value.param == "schema.properties.a.items.$ref"


CAT, DOG = ({"$ref": f"#/$defs/{name}"} for name in ("cat", "dog"))
TREE = {
    "type": "object",
    "properties": {"kind": {"const": "tree"}, "parts": {"items": {"oneOf": [{"$ref": "#/$defs/tree"}, CAT]}}},
    "required": ["kind"],
}


@pytest.mark.parametrize(
    ("options", "are_exclusive"),
    [
        ([CAT, DOG, {"type": ["string", "null"]}], True),
        ([CAT, CAT], False),
        ([CAT, {"type": "object"}], False),
        ([CAT, {"anyOf": [DOG, {"type": "array"}]}], True),
        ([CAT, {"allOf": [{"title": "dog"}, DOG]}], True),
        ([CAT, {"$ref": "#/$defs/tree"}], True),
        ([{"$ref": "#/$defs/circle"}, CAT], False),
        ([{"$ref": "#/nowhere"}, CAT], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "integer"}, {"enum": ["a", None]}], True),
        ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": [{"a": 1}]}, {"const": [{"a": 1.0}]}], False),
        ([{"const": 1}, {"const": True}], True),
        ([True, {"const": 1}], False),
        ([False, {"const": 1}], True),
        # a kind that may be missing tells nothing
        ([CAT, {"properties": {"kind": {"const": "dog"}}}], True),
        ([{**DEFS["cat"], "required": []}, {**DEFS["dog"], "required": []}], False),
        # a string is no object, and matches both
        ([{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"], False),
    ],
)
def test_evidently_exclusive_alternatives_are_detected(options: list[Any], are_exclusive: bool) -> None:
    schema = {
        "properties": {"a": {"oneOf": options}},
        "$defs": {**DEFS, "tree": TREE, "circle": {"$ref": "#/$defs/circle"}},
    }
    assert has_exclusive_alternatives(prepare(schema, "schema")) is are_exclusive


@pytest.mark.parametrize("schema", [None, 3, "x", [], False])
def test_non_object_schema_is_refused(schema: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(schema, "schema")
    assert caught.value.param == "schema"


def test_unlisted_properties_need_schema_permission() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}, "additionalProperties": True}}}
    prepared = prepare(schema, "schema", has_no_more_properties=True)
    assert prepared["additionalProperties"] is False
    assert prepared["properties"]["a"]["additionalProperties"] is True


def test_every_subschema_has_a_path() -> None:
    schema = {
        "properties": {"a": {"anyOf": [{"type": "string"}, {"items": {"minimum": 1}}]}},
        "additionalProperties": {"maxLength": 1},
        "$defs": {"x": {"prefixItems": [{"const": 1}]}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        (),
        ("properties", "a"),
        ("properties", "a", "anyOf", 0),
        ("properties", "a", "anyOf", 1),
        ("properties", "a", "anyOf", 1, "items"),
        ("additionalProperties",),
        ("$defs", "x"),
        ("$defs", "x", "prefixItems", 0),
    ]


def bad(part: dict[str, Any]) -> bool:
    """Whether a part, or anything that it holds or refers to, has the keyword ``bad``."""
    todo, seen = [part], set()
    while todo:
        for _, node in subschemas({k: v for k, v in todo.pop().items() if k != "$defs"}):
            if "bad" in node:
                return True
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if name in part.get("$defs", {}) and name not in seen:
                seen.add(name)
                todo.append(part["$defs"][name])
    return False


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"bad": 1}, ()),
        ({"properties": {"a": {}, "b": {"items": {"bad": 1}}}}, ("properties", "b", "items")),
        ({"anyOf": [{}, {"not": {"bad": 1}}]}, ("anyOf", 1, "not")),
        (
            {"properties": {"b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"properties": {"q": {"bad": 1}}}}},
            ("$defs", "x", "properties", "q"),
        ),
    ],
)
def test_fault_is_innermost_part_failing_alone(schema: dict[str, Any], path: tuple[object, ...]) -> None:
    assert find_fault(schema, lambda part: not bad(part)) == path


def test_a_search_for_a_fault_ends() -> None:
    trials = []
    find_fault({"anyOf": [{"const": i} for i in range(1000)]}, lambda part: trials.append(part) is None)
    assert len(trials) < 100


def test_places_hold_plain_words_alone() -> None:
    assert place("schema", ("properties", "a b<script>", 0)) == "schema.properties.*.0"
    assert len(place("schema", ("properties", "x" * 60) * 50)) < 300
