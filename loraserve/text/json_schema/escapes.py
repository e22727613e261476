"""Escapes that strings of an answer may have: none that spells a known name in another way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from loraserve.errors import UnsupportedParameter
from loraserve.text.json_schema.nodes import Node, Path, place, subschemas

SHORT_ESCAPES = 'nrbtf\\"'
"""Escapes of one letter. With them alone, a string can be spelled in one way only."""
_ALL_ESCAPES = f"{SHORT_ESCAPES}u"

_CODED = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_NEEDS_CODE = re.compile(f"[{_CODED}]")
_MAY_NEED_CODE = re.compile(rf"[{_CODED}]|\\[xuUpPcav0]|cntrl")
"""Patterns that may require a character which can only be written as a code."""


def allowed_escapes(root: Node, param: str, *, is_lenient: bool = False) -> str:
    r"""Choose the escapes that a schema's answers may have, as llguidance takes them.

    With ``\u`` an object that takes other properties than those that are listed would take a listed
    one too, in another spelling, with any value. So only a schema that has no such object may have
    characters in its values that can't be written without.

    Args:
        is_lenient: let them be there anyway.

    Raises:
        UnsupportedParameter: they are, in a schema that has such an object.
    """
    path = next(_coded(root), None)
    if path is None:
        return SHORT_ESCAPES
    if not is_lenient and any(map(_is_open_beside_names, (node for _, node in subschemas(root)))):
        where = place(param, path)
        raise UnsupportedParameter(
            f"{where} has a control character, which can't be enforced beside an object with other properties.",
            param=where,
            hint="Set additionalProperties: false in each object.",
        )
    return _ALL_ESCAPES


def _is_open_beside_names(node: Mapping[str, Any]) -> bool:
    names = (node.get("properties"), node.get("required"), node.get("patternProperties"))
    return any(names) and node.get("additionalProperties") is not False


def _coded(root: Node) -> Iterator[Path]:
    r"""Yield the places of values and patterns that need ``\u``. Names of properties need none."""
    for path, node in subschemas(root):
        for key in ("const", "enum"):
            if any(map(_NEEDS_CODE.search, _strings(node.get(key)))):
                yield (*path, key)
        patterns = node.get("patternProperties")
        for key, pattern in [
            ("pattern", node.get("pattern")),
            *(("patternProperties", name) for name in (patterns if isinstance(patterns, dict) else ())),
        ]:
            if isinstance(pattern, str) and _MAY_NEED_CODE.search(pattern) and _is_empty_without_codes(pattern):
                yield (*path, key)


def _strings(value: object) -> Iterator[str]:
    """Yield the strings in a JSON value, without the names of properties."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()


def _is_empty_without_codes(pattern: str) -> bool:
    """Check whether each text of a pattern has a character that can only be written as a code."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern, "allOf": [{"pattern": f"^[^{_CODED}]*$"}]}
    # a pattern that can't be read is reported where the schema is compiled
    return "nsatisfiable" in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
