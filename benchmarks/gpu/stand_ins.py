"""What a machine without the server's packages lacks of what the model's code imports."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Values(type):
    """Makes each class a frozen, keyword-only dataclass; of a Struct's own arguments none changes
    what these benchmarks read.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> Any:
        for member, value in namespace.items():
            if isinstance(value, (dict, list, set)) and not member.startswith("__"):
                namespace[member] = dataclasses.field(default_factory=value.copy)
        return dataclasses.dataclass(frozen=True, kw_only=True)(super().__new__(cls, name, bases, namespace))

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> None:
        super().__init__(name, bases, namespace)


class _Unused:
    """Stands for a class that is imported on the way and never made here."""

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __init__(self, *_: object, **__: object) -> None:
        raise ModuleNotFoundError("this takes a package of the server's that isn't installed", name="cachetools")


def install() -> list[str]:
    """Where they are missing, msgspec's `Struct` (for values that don't travel) and cachetools'
    `LRUCache` can be imported. Returns what was replaced.
    """
    replaced = []
    for package, member in (("msgspec", "Struct"), ("cachetools", "LRUCache")):
        if importlib.util.find_spec(package) is not None:
            continue
        # dataclasses look for a class's module there
        module = sys.modules[package] = ModuleType(package)
        setattr(module, member, _Unused if package == "cachetools" else _Values(member, (), {"__module__": package}))
        replaced.append(package)
    return replaced
