"""Types, values and source as plain text: without module paths, and the same on every machine."""

from __future__ import annotations

import ast
import enum
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("loraserve", "adapters_store", "kernels/loraserve_kernels", "migrations/loraserve_migrations")


def type_text(hint: Any) -> str:
    """Return a type as it would be written, with the bare names of its classes."""
    if hint is None or hint is type(None):
        return "None"
    if hint is ...:
        return "..."
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join(map(type_text, arguments))}]"
    if isinstance(hint, typing.NewType):
        return type_text(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(repr(member.value) for member in hint)
    return getattr(hint, "__name__", str(hint))


def value_text(value: Any) -> str:
    """Return a default as it would be written; an enum's member as its value."""
    return repr(value.value if isinstance(value, enum.Enum) else value)


def sources(containing: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the path, from the root, and the tree of each module of the product whose text matches
    a pattern.
    """
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if re.search(containing, text):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)
