"""Bytes between processes and on disk: messages to and from the engine, its configuration,
and the usage journal.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from loraserve.config import EngineConfig
from loraserve.engine_client.messages import EngineInput, EngineOutput
from loraserve.tenancy.billing.journal import Entry
from loraserve.types import RoundingCost

from .describing import type_text, value_text


def test_wire(golden: Callable[..., None]) -> None:
    """A message's name is its tag; a struct inside a message has its class's name.

    Fields stand in their order.
    """
    lines, inner = [], []
    for direction, union in (("to the engine", EngineInput), ("from the engine", EngineOutput)):
        messages = sorted(typing.get_args(union), key=lambda cls: str(cls.__struct_config__.tag))
        for cls in messages:
            lines += describe(f'{direction} "{cls.__struct_config__.tag}"', cls)
            inner.append(cls)
    for title, cls in (
        ("the engine's configuration", EngineConfig),
        ("the answer of the rounding process", RoundingCost),
        ("an entry of the usage journal", Entry),
    ):
        lines += describe(title, cls)
        inner.append(cls)
    named = reachable(inner) - set(inner)
    for cls in sorted(named, key=lambda cls: cls.__name__):
        lines += describe(cls.__name__, cls)
    golden("wire.txt", lines)


def describe(title: str, cls: Any) -> Iterator[str]:
    config = cls.__struct_config__
    marks = ("array_like", "forbid_unknown_fields", "omit_defaults")
    facts = [mark for mark in marks if getattr(config, mark)]
    if config.tag is not None:
        facts.append(f"tag field {config.tag_field}")
    yield f"{title} ({', '.join(facts)})"
    hints = typing.get_type_hints(cls)
    for field in msgspec.structs.fields(cls):
        default = ""
        if not field.required:
            made = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            default = " = default" if isinstance(made, msgspec.Struct) else f" = {value_text(made)}"
        name = field.name if field.name == field.encode_name else f"{field.name} as {field.encode_name}"
        yield f"    {name}: {type_text(hints[field.name])}{default}"


def reachable(roots: list[Any]) -> set[Any]:
    """Return the structs, and those of their fields' types."""
    found: set[Any] = set()
    todo = list(roots)
    while todo:
        hint = todo.pop()
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            if hint not in found:
                found.add(hint)
                todo += typing.get_type_hints(hint).values()
        else:
            todo += typing.get_args(hint)
    return found
