"""The schemas in a schema: their paths, and the one at fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str | int, ...]
Node = dict[str, Any]

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"})
"""Keywords whose values hold schemas: by name, in a list, or one."""

_MAX_TRIALS = 64
"""Parts of a schema that are compiled by themselves to find the one at fault."""
_PLAIN = re.compile(r"[A-Za-z0-9_$.@-]{1,64}")
_MAX_PARAM = 256


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
    """Format the dotted path of a part of the schema. Names that aren't plain words are stars."""
    parts = [str(part) if _PLAIN.fullmatch(str(part)) else "*" for part in path]
    dotted = ".".join([param, *parts])
    return dotted if len(dotted) <= _MAX_PARAM else f"{dotted[:_MAX_PARAM]}…"


def find_fault(schema: Node, is_compilable: Callable[[Node], bool]) -> Path:
    """Find the path of the innermost part that can't be compiled even by itself.

    Args:
        schema: as `prepare` made it; it can't be compiled.
    """
    shared: Node = {key: schema[key] for key in ("$defs", "definitions", "$schema", "x-guidance") if key in schema}
    path: Path = ()
    num_trials = 0
    seen: set[Path] = {path}
    while True:
        inner = [child for child, _ in subschemas(at(schema, path), path) if child != path and _is_child(child, path)]
        referred = path_of(at(schema, path).get("$ref"), schema)
        if referred is not None:
            inner.insert(0, referred)
        for child in inner:
            num_trials += 1
            if num_trials > _MAX_TRIALS:
                return path
            if child not in seen and not is_compilable({**shared, **at(schema, child)}):
                seen.add(child)
                path = child
                break
        else:
            return path


def _is_child(path: Path, parent: Path) -> bool:
    """Check whether no other schema lies between the two."""
    rest = path[len(parent) :]
    return len(rest) == 1 or (len(rest) == 2 and (rest[0] in _MAPS or rest[0] in _LISTS))


def at(schema: Any, path: Path) -> Any:
    for part in path:
        schema = schema[part]
    return schema


def path_of(reference: object, root: Node) -> Path | None:
    """Find the path of the object that a reference leads to; None if there is none here."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))
    node: Any = root
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return path if isinstance(node, dict) else None
