"""Import a library's module when something of it is first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@contextmanager
def deferred(name: str) -> Iterator[None]:
    """Within the block, let imports of module `name` only note it.

    Its first attribute that is used, then or later, imports it. The standard library's `LazyLoader`
    doesn't do here: the import system itself reads a module's ``__spec__``.
    """
    finder = _Finder(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred

    def execute(self, module: ModuleType) -> None:
        module.__class__ = ModuleType
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if self.__spec__ is not None and isinstance(self.__spec__.loader, _Loader):
            self.__spec__.loader.execute(self)
            return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
