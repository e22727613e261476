"""What a machine without the server's packages lacks of what the model's code imports."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Values(type):
    """Makes each class a frozen, keyword-only dataclass; of a Struct's own arguments none changes what these benchmarks read."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> Any:
        for field in namespace.get("__annotations__", {}):
            if isinstance(namespace.get(field), (dict, list, set)):
                namespace[field] = dataclasses.field(default_factory=namespace[field].copy)
        return dataclasses.dataclass(frozen=True, kw_only=True)(super().__new__(cls, name, bases, namespace))

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> None:
        super().__init__(name, bases, namespace)


def install() -> list[str]:
    """Where msgspec is missing, its `Struct` can be imported: enough for values that don't travel. Returns what was replaced."""
    if importlib.util.find_spec("msgspec") is not None:
        return []
    module = ModuleType("msgspec")
    module.Struct = _Values("Struct", (), {"__module__": "msgspec"})  # type: ignore[attr-defined]
    sys.modules["msgspec"] = module
    return ["msgspec"]
