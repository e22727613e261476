"""Stand in for the packages that the engine imports and a bare machine lacks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class _Values(type):
    """Makes each class a frozen, keyword-only dataclass; of a Struct's own arguments none changes
    what these benchmarks read.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> Any:
        for member, value in namespace.items():
            if isinstance(value, (dict, list, set)) and not member.startswith("__"):
                namespace[member] = dataclasses.field(default_factory=value.copy)
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True, init=False)(
            super().__new__(cls, name, bases, namespace)
        )
        made.__init__ = _fast_init(made)
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: object) -> None:
        super().__init__(name, bases, namespace)


def _fast_init(made: Any) -> Callable[..., None]:
    """A dataclass that is frozen sets its fields one call each; a step makes hundreds of values."""
    scope: dict[str, Any] = {}
    arguments, lines = [], []
    for field in dataclasses.fields(made):
        if field.default is not dataclasses.MISSING:
            scope[f"_{field.name}"] = field.default
            arguments.append(f"{field.name}=_{field.name}")
        elif field.default_factory is not dataclasses.MISSING:
            scope[f"_{field.name}"] = field.default_factory
            arguments.append(f"{field.name}=None")
            lines.append(f" if {field.name} is None: {field.name} = _{field.name}()")
        else:
            arguments.append(field.name)
    pairs = ", ".join(f"{field.name!r}: {field.name}" for field in dataclasses.fields(made))
    head = f"def __init__(self{', *, ' if arguments else ''}{', '.join(arguments)}):"
    exec("\n".join([head, *lines, f" self.__dict__.update({{{pairs}}})"]), scope)
    return scope["__init__"]  # type: ignore[no-any-return]


class Cache(MutableMapping[Key, Value], Generic[Key, Value]):
    """A mapping within a size, which pops items until the next one fits."""

    def __init__(self, maxsize: float, getsizeof: Callable[[Value], float] = lambda _: 1) -> None:
        self.maxsize, self.getsizeof, self.currsize = maxsize, getsizeof, 0.0
        self._items: dict[Key, Value] = {}

    def __getitem__(self, key: Key) -> Value:
        return self._items[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        size = self.getsizeof(value)
        if size > self.maxsize:
            raise ValueError("value too large")
        if key in self._items:
            self.currsize -= self.getsizeof(self._items.pop(key))
        while self.currsize + size > self.maxsize:
            self.popitem()
        self._items[key] = value
        self.currsize += size

    def __delitem__(self, key: Key) -> None:
        self.currsize -= self.getsizeof(self._items.pop(key))

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def popitem(self) -> tuple[Key, Value]:
        """The one that was put first."""
        key = next(iter(self._items))
        return key, self.pop(key)


class LRUCache(Cache[Key, Value]):
    """A look at an item is a use of it."""

    def __getitem__(self, key: Key) -> Value:
        value = self._items[key] = self._items.pop(key)
        return value


class _Coder:
    """Stands for a coder of messages: none is sent here."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def _refuse(self, *_: object) -> Any:
        raise ModuleNotFoundError("messages between processes take msgspec, which isn't installed", name="msgspec")

    encode = decode = _refuse


def _msgspec() -> ModuleType:
    module = ModuleType("msgspec")
    # dataclasses look for a class's module there
    sys.modules["msgspec"] = module
    module.Struct = _Values("Struct", (), {"__module__": "msgspec"})  # type: ignore[attr-defined]
    for name, members in (
        ("structs", {"replace": dataclasses.replace}),
        ("msgpack", {"Encoder": _Coder, "Decoder": _Coder}),
        ("json", {"Encoder": _Coder, "Decoder": _Coder}),
    ):
        inner = sys.modules[f"msgspec.{name}"] = ModuleType(f"msgspec.{name}")
        inner.__dict__.update(members)
        setattr(module, name, inner)
    return module


def _cachetools() -> ModuleType:
    module = ModuleType("cachetools")
    module.__dict__.update({"Cache": Cache, "LRUCache": LRUCache})
    return module


def install() -> list[str]:
    """Put msgspec's `Struct` (for values that don't travel) and cachetools'
    caches in the place of packages that are missing; return the names of those.
    """
    replaced = []
    for package, make in (("msgspec", _msgspec), ("cachetools", _cachetools)):
        try:
            # one for another Python can be found, and not imported
            importlib.import_module(package)
        except ImportError:
            sys.modules[package] = make()
            replaced.append(package)
    return replaced


def leave_out_broken(package: str) -> bool:
    """Hide a package that is installed and can't be imported, since it was built for another numpy,
    say; return whether it was one.

    Call it before what looks for the package.
    """
    try:
        importlib.import_module(package)
    except Exception as error:
        # an extension that was built for other versions raises anything
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return False
        sys.modules[package] = None  # type: ignore[assignment]
        return True
    return False
