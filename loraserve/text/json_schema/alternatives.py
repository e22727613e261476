"""Alternatives of a schema that plainly exclude each other."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

from loraserve.text.json_schema.nodes import Node, at, path_of, subschemas

_MAX_DEPTH = 16
"""References and parts of alternatives that are compared."""


def has_exclusive_alternatives(root: Node) -> bool:
    """Check whether no value can match two alternatives of any ``oneOf``, as far as is plain.

    ``oneOf`` then means the same as ``anyOf``, which a grammar can enforce.
    """
    return all(
        _exclude(first, second, root)
        for _, node in subschemas(root)
        if isinstance(node.get("oneOf"), list)
        for first, second in itertools.combinations(node["oneOf"], 2)
    )


def _exclude(first: Any, second: Any, root: Node, depth: int = 0) -> bool:
    """Check whether plainly no value matches both schemas.

    A value has to match all keywords of a schema, so one pair of keywords is enough.
    """
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or depth > _MAX_DEPTH:
        return False
    values, others = _values(first), _values(second)
    if values is not None and others is not None and values.isdisjoint(others):
        return True
    types, other_types = _types(first), _types(second)
    if types is not None and other_types is not None and types.isdisjoint(other_types):
        return True
    is_object = {"object"} in (types, other_types)
    if is_object and any(
        _exclude(_properties(first)[name], _properties(second)[name], root, depth + 1)
        for name in {*_required(first), *_required(second)}
        if name in _properties(first) and name in _properties(second)
    ):
        return True
    return _is_excluded(first, second, root, depth + 1) or _is_excluded(second, first, root, depth + 1)


def _is_excluded(schema: Node, other: Node, root: Node, depth: int) -> bool:
    """Check whether what the schema refers to, or is made of, excludes the other one."""
    path = path_of(schema.get("$ref"), root)
    if path is not None and _exclude(at(root, path), other, root, depth):
        return True
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and all(_exclude(one, other, root, depth) for one in options):
            return True
    parts = schema.get("allOf")
    return isinstance(parts, list) and any(_exclude(part, other, root, depth) for part in parts)


def _values(schema: Node) -> set[Hashable] | None:
    """Collect the values that the schema lists, to compare; None if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return set(map(_comparable, listed)) if isinstance(listed, list) else None


def _comparable(value: Any) -> tuple[str, Hashable]:
    """Tag the value with its type, to compare: 1 and 1.0 are equal, 1 and true aren't."""
    if isinstance(value, dict):
        return "object", frozenset((name, _comparable(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_comparable, value))
    if isinstance(value, bool):
        return "boolean", value
    return {str: "string", type(None): "null"}.get(type(value), "number"), value


def _types(schema: Node) -> set[str] | None:
    """Collect the types that a value may have; None if the schema leaves them open."""
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if isinstance(types, list):
        return {"number" if name == "integer" else str(name) for name in types}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_comparable(value)[0] for value in values} if isinstance(values, list) else None


def _properties(schema: Node) -> Node:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Node) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
