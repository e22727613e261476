"""JSON schemas as llguidance takes them: bounded, with unenforceable parts found and named."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from loraserve.errors import InvalidRequest, UnsupportedParameter

Path = tuple[str | int, ...]
Node = dict[str, Any]

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"})
"""Keywords whose values hold schemas: by name, in a list, or one."""

_UNENFORCED: Mapping[str, tuple[object, ...]] = {
    "not": (),
    "if": (),
    "contains": (),
    "minContains": (0,),
    "maxContains": (),
    "propertyNames": (True,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that a grammar can't enforce, and their values that ask for nothing."""

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_UNENFORCED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
"""Formats that JSON Schema knows and llguidance doesn't. Others say nothing about an answer."""

_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
"""Look-around and back-references, which pydantic writes for a Decimal. No grammar has them."""

_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_MAX_DEPTH = 16
"""References and parts of alternatives that are compared."""
_MAX_TRIALS = 64
"""Parts of a schema that are compiled by themselves to find the one at fault."""
_PLAIN = re.compile(r"[A-Za-z0-9_$.@-]{1,64}")
_MAX_PARAM = 256


def prepare(schema: object, param: str, *, is_lenient: bool = False, has_no_more_properties: bool = False) -> Node:
    """Return the schema as llguidance takes it.

    Args:
        param: the field that it came in.
        is_lenient: leave out what can't be enforced.
        has_no_more_properties: objects have the properties that are listed, where they don't say
            otherwise.

    Raises:
        InvalidRequest: it is no schema, or over a bound; `param` names the place.
        UnsupportedParameter: a part of it can't be enforced.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} should be a JSON schema: an object.", param=param)
    root: Node = copy.deepcopy(schema)
    for path, node in list(subschemas(root)):
        _check_references(node, path, param)
        _leave_out(node, path, param, is_lenient=is_lenient)
        for key in _COUNTS:
            value = node.get(key)
            if isinstance(value, float) and value.is_integer():
                node[key] = int(value)
        if has_no_more_properties and "properties" in node:
            node.setdefault("additionalProperties", False)
    return root


def has_exclusive_alternatives(root: Node) -> bool:
    """Return whether no value can match two alternatives of any ``oneOf``, as far as is plain.

    ``oneOf`` then means the same as ``anyOf``, which a grammar can enforce.
    """
    return all(
        _exclude(first, second, root)
        for _, node in subschemas(root)
        if isinstance(node.get("oneOf"), list)
        for first, second in itertools.combinations(node["oneOf"], 2)
    )


def subschemas(root: object, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield every schema that is an object, with its path, outer ones first."""
    todo: list[tuple[Path, object]] = [(path, root)]
    while todo:
        path, node = todo.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        children: list[tuple[Path, object]] = []
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                children += [((*path, key, name), child) for name, child in value.items()]
            elif key in _LISTS and isinstance(value, list):
                children += [((*path, key, index), child) for index, child in enumerate(value)]
            elif key in _SINGLE:
                children.append(((*path, key), value))
        todo += reversed(children)


def place(param: str, path: Path) -> str:
    """Return the dotted path of a part of the schema. Names that aren't plain words are stars."""
    parts = [str(part) if _PLAIN.fullmatch(str(part)) else "*" for part in path]
    dotted = ".".join([param, *parts])
    return dotted if len(dotted) <= _MAX_PARAM else f"{dotted[:_MAX_PARAM]}…"


def find_fault(schema: Node, is_compilable: Callable[[Node], bool]) -> Path:
    """Return the path of the innermost part that can't be compiled even by itself.

    Args:
        schema: as `prepare` made it; it can't be compiled.
    """
    shared: Node = {key: schema[key] for key in ("$defs", "definitions", "$schema", "x-guidance") if key in schema}
    path: Path = ()
    num_trials = 0
    seen: set[Path] = {path}
    while True:
        inner = [child for child, _ in subschemas(_at(schema, path), path) if child != path and _is_child(child, path)]
        referred = _path_of(_at(schema, path).get("$ref"), schema)
        if referred is not None:
            inner.insert(0, referred)
        for child in inner:
            num_trials += 1
            if num_trials > _MAX_TRIALS:
                return path
            if child not in seen and not is_compilable({**shared, **_at(schema, child)}):
                seen.add(child)
                path = child
                break
        else:
            return path


def _is_child(path: Path, parent: Path) -> bool:
    """Return whether no other schema lies between the two."""
    rest = path[len(parent) :]
    return len(rest) == 1 or (len(rest) == 2 and (rest[0] in _MAPS or rest[0] in _LISTS))


def _at(schema: Any, path: Path) -> Any:
    for part in path:
        schema = schema[part]
    return schema


def _check_references(node: Node, path: Path, param: str) -> None:
    reference = node.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        where = place(param, (*path, "$ref"))
        raise UnsupportedParameter(
            f"{where} refers to another document; none is fetched.", param=where, hint="Put the schema into $defs."
        )


def _leave_out(node: Node, path: Path, param: str, *, is_lenient: bool) -> None:
    """Remove what asks for nothing, and with `is_lenient` what can't be enforced."""
    for key, neutral in _UNENFORCED.items():
        if key not in node:
            continue
        if not is_lenient and not any(node[key] is value or node[key] == value for value in neutral):
            where = place(param, (*path, key))
            raise UnsupportedParameter(f"{where}: {key} can't be enforced.", param=where, hint=_LENIENT_HINT)
        del node[key]
    if "if" not in node:
        # they say nothing without it
        node.pop("then", None)
        node.pop("else", None)
    name = node.get("format")
    if isinstance(name, str) and name not in _FORMATS:
        if name in _UNENFORCED_FORMATS and not is_lenient:
            where = place(param, (*path, "format"))
            raise UnsupportedParameter(f"{where}: {name} can't be enforced.", param=where, hint=_LENIENT_HINT)
        del node["format"]
    pattern = node.get("pattern")
    if is_lenient and isinstance(pattern, str) and _NOT_REGULAR.search(pattern):
        del node["pattern"]


_LENIENT_HINT = "Leave it out, or let it be ignored with strict: false."


def _exclude(first: Any, second: Any, root: Node, depth: int = 0) -> bool:
    """Return whether plainly no value matches both schemas.

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
    """Return whether what the schema refers to, or is made of, excludes the other one."""
    path = _path_of(schema.get("$ref"), root)
    if path is not None and _exclude(_at(root, path), other, root, depth):
        return True
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and all(_exclude(one, other, root, depth) for one in options):
            return True
    parts = schema.get("allOf")
    return isinstance(parts, list) and any(_exclude(part, other, root, depth) for part in parts)


def _values(schema: Node) -> set[Hashable] | None:
    """Return the values that the schema lists, to compare; None if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return set(map(_comparable, listed)) if isinstance(listed, list) else None


def _comparable(value: Any) -> tuple[str, Hashable]:
    """Return the value's type and the value: 1 and 1.0 are equal, 1 and true aren't."""
    if isinstance(value, dict):
        return "object", frozenset((name, _comparable(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_comparable, value))
    if isinstance(value, bool):
        return "boolean", value
    return {str: "string", type(None): "null"}.get(type(value), "number"), value


def _types(schema: Node) -> set[str] | None:
    """Return the types that a value may have; None if the schema doesn't say."""
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


def _path_of(reference: object, root: Node) -> Path | None:
    """Return the path of the object that a reference leads to; None if there is none here."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))
    node: Any = root
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return path if isinstance(node, dict) else None
