"""A schema as llguidance takes it: bounded, with unenforceable parts found and named."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.text.json_schema.nodes import Node, Path, place, subschemas
from loraserve.text.json_schema.number_bounds import move_exclusive_bounds
from loraserve.text.json_schema.string_formats import LLGUIDANCE_FORMATS, PATTERNS, write_out_format

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
"""Keywords that a grammar can't enforce, and their values that have no effect."""

_FORMATS = LLGUIDANCE_FORMATS | PATTERNS.keys()
_UNENFORCED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
"""Formats of JSON Schema that no grammar here has. Others don't restrict an answer."""

_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
"""Look-around and back-references, which pydantic writes for a Decimal. No grammar has them."""

_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")


def prepare(schema: object, param: str, *, is_lenient: bool = False, has_no_more_properties: bool = False) -> Node:
    """Prepare the schema for llguidance.

    Args:
        param: the field that it came in.
        is_lenient: leave out what can't be enforced.
        has_no_more_properties: objects have the properties that are listed, where they don't set it
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
        write_out_format(node)
        _give_pattern_to_names(node)
        for key in _COUNTS:
            value = node.get(key)
            if isinstance(value, float) and value.is_integer():
                node[key] = int(value)
        if has_no_more_properties and "properties" in node:
            node.setdefault("additionalProperties", False)
    move_exclusive_bounds(root, param)
    return root


def _give_pattern_to_names(node: Node) -> None:
    """Move a pattern of property names that are all listed to the properties themselves.

    llguidance would let an answer begin another property of the pattern, and find no name for it.
    """
    properties, patterns = node.get("properties"), node.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return
    for pattern, schema in list(patterns.items()):
        found = _LISTED_NAMES.fullmatch(pattern)
        names = (found[1] or found[2]).split("|") if found is not None else ()
        if names and all(name in properties for name in names):
            del patterns[pattern]
            for name in names:
                properties[name] = {"allOf": [properties[name], schema]}
    if not patterns:
        del node["patternProperties"]


_LISTED_NAMES = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$", re.ASCII)


def _check_references(node: Node, path: Path, param: str) -> None:
    reference = node.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        where = place(param, (*path, "$ref"))
        raise UnsupportedParameter(
            f"{where} refers to another document; none is fetched.", param=where, hint="Put the schema into $defs."
        )


def _leave_out(node: Node, path: Path, param: str, *, is_lenient: bool) -> None:
    """Remove what has no effect, and with `is_lenient` what can't be enforced."""
    for key, neutral in _UNENFORCED.items():
        if key not in node:
            continue
        if not is_lenient and not any(node[key] is value or node[key] == value for value in neutral):
            where = place(param, (*path, key))
            raise UnsupportedParameter(f"{where}: {key} can't be enforced.", param=where, hint=_LENIENT_HINT)
        del node[key]
    if "if" not in node:
        # they have no effect without it
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
