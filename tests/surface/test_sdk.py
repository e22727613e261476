"""The Python client: public names, signatures, and fields of what its calls return."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

from pydantic import BaseModel

import loraserve
from loraserve import contract, errors, sdk

from .describing import type_text, value_text

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ATTRIBUTE = re.compile(r"self\.([a-z]\w*)(?::| =)")
SPECIAL = frozenset({"__iter__", "__aiter__", "__next__", "__anext__", "__enter__", "__aenter__"})
PYDANTIC = frozenset({"model_post_init"})
MEMBERS = (property, classmethod, staticmethod, FunctionType)
PACKAGES = (sdk.__name__, contract.__name__)


class Surface:
    """Follows signatures from the clients to every class and alias that they name."""

    def __init__(self) -> None:
        # the clients have lines of their own
        self.paragraphs: dict[str, list[str]] = {sdk.Client.__name__: [], sdk.AsyncClient.__name__: []}
        self._todo: list[Any] = []

    def run(self) -> list[str]:
        while self._todo:
            cls = self._todo.pop()
            if cls.__name__ not in self.paragraphs:
                self.paragraphs[cls.__name__] = []
                self.paragraphs[cls.__name__] = list(self._class(cls))
        return [line for _, lines in sorted(self.paragraphs.items()) if lines for line in (*lines, "")]

    def client(self, title: str, thing: Any) -> Iterator[str]:
        """Yield a line for each public member of a client, and of the resources that it holds."""
        for name in sorted(name for name in dir(thing) if not name.startswith("_")):
            member = inspect.getattr_static(thing, name)
            if type(member).__module__.startswith(PACKAGES):
                yield from self.client(f"{title}.{name}", member)
            else:
                yield from self._member(f"{title}.{name}", member)

    def _class(self, cls: Any) -> Iterator[str]:
        parents = ", ".join(parent.__name__ for parent in cls.__bases__ if parent not in (object, BaseModel))
        yield f"class {cls.__name__}({parents})"
        if issubclass(cls, BaseModel):
            for name in cls.model_fields:
                if name in cls.__annotations__:
                    field = cls.model_fields[name]
                    self._note_classes(field.annotation)
                    yield f"    {name}: {type_text(field.annotation)}{_default(field)}"
        elif typing.is_typeddict(cls):
            for name, hint in cls.__annotations__.items():
                text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
                # of annotations that are texts, the class doesn't know which are NotRequired
                need = "" if "Required[" in text else " (required)" if cls.__total__ else " (optional)"
                yield f"    {name}: {self._annotation(text, cls)}{need}"
        else:
            yield from self._member("    __init__", cls.__init__)
            if not is_dataclass(cls):
                names = ATTRIBUTE.findall(inspect.getsource(cls.__init__))
                yield from (f"    {name} (attribute)" for name in sorted(names))
        for name, member in sorted(vars(cls).items()):
            is_public = name in SPECIAL or not name.startswith("_")
            if is_public and name not in PYDANTIC and isinstance(member, MEMBERS):
                yield from self._member(f"    {name}", member)
        for parent in cls.__bases__:
            if parent.__module__.startswith(PACKAGES):
                self._todo.append(parent)

    def _member(self, title: str, member: Any) -> Iterator[str]:
        if isinstance(member, property):
            assert member.fget is not None
            returned = self._annotation(member.fget.__annotations__.get("return", ""), member.fget)
            yield f"{title} -> {returned} (property)"
            return
        function = getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            yield f"{title} = {value_text(member)}"
            return
        kind = "async " if inspect.iscoroutinefunction(function) else ""
        for overload in typing.get_overloads(function) or [function]:
            yield f"{title}{self._signature(overload)}{f' ({kind.strip()})' * bool(kind)}"

    def _signature(self, function: Any) -> str:
        parts, has_star = [], False
        for param in inspect.signature(function).parameters.values():
            if param.name == "self":
                continue
            star = {param.VAR_POSITIONAL: "*", param.VAR_KEYWORD: "**"}.get(param.kind, "")
            if param.kind is param.KEYWORD_ONLY and not has_star:
                parts.append("*")
            has_star = has_star or param.kind in (param.KEYWORD_ONLY, param.VAR_POSITIONAL)
            hint = "" if param.annotation is param.empty else f": {self._annotation(param.annotation, function)}"
            default = "" if param.default is param.empty else f" = {value_text(param.default)}"
            parts.append(f"{star}{param.name}{hint}{default}")
        returned = inspect.signature(function).return_annotation
        return f"({', '.join(parts)}) -> {self._annotation(returned, function)}"

    def _note_classes(self, hint: Any) -> None:
        """Note the classes of the SDK in a type."""
        for part in typing.get_args(hint):
            self._note_classes(part)
        if isinstance(hint, type) and hint.__module__.startswith(PACKAGES):
            self._todo.append(hint)

    def _annotation(self, text: Any, owner: Any) -> str:
        """Return an annotation as it is written; note what it names of the SDK,
        aliases by what they stand for.
        """
        text = text if isinstance(text, str) else getattr(text, "__name__", str(text))
        module = sys.modules[owner.__module__]
        for word in WORD.findall(text):
            named = getattr(module, word, None)
            if isinstance(named, type) and named.__module__.startswith(PACKAGES):
                self._todo.append(named)
            elif named is not None and not isinstance(named, type) and word not in vars(typing):
                source = _alias(module, word)
                if source is not None and word not in self.paragraphs:
                    self.paragraphs[word] = []
                    self.paragraphs[word] = [f"{word} = {self._annotation(source, owner)}"]
        return text


def _alias(module: Any, name: str) -> str | None:
    """Return what stands right of `name =` in the module,
    or in the one of the SDK that it comes from.
    """
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.unparse(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            names = [alias.asname or alias.name for alias in node.names]
            if name in names:
                return _alias(sys.modules[str(node.module)], name)
    return None


def _default(field: Any) -> str:
    if field.is_required():
        return ""
    return f" = {value_text(field.get_default(call_default_factory=True))}"


def test_sdk(golden: Callable[..., None]) -> None:
    surface = Surface()
    lines = [
        f"loraserve: {' '.join(sorted(loraserve.__all__))}",
        f"loraserve.sdk: {' '.join(sorted(sdk.__all__))}",
        "",
    ]
    for cls in (sdk.Client, sdk.AsyncClient):
        lines += surface._member(cls.__name__, cls.__init__)
        lines += surface.client(cls.__name__, cls("http://server", api_key="key"))
        lines.append("")
    for name in sorted(set(sdk.__all__) - {"Client", "AsyncClient"}):
        surface._todo.append(getattr(sdk, name))
    golden("sdk.txt", lines + surface.run())


def test_error_classes(golden: Callable[..., None]) -> None:
    """Constructors and public attributes of `loraserve.errors`."""
    surface = Surface()
    lines = []
    for name, cls in sorted(vars(errors).items()):
        if isinstance(cls, type) and issubclass(cls, errors.LoraserveError):
            lines += surface._member(name, cls.__init__)
            attributes = sorted(name for name in vars(cls("MESSAGE")) if not name.startswith("_"))
            lines.append(f"    {' '.join(attributes)}")
    golden("sdk_errors.txt", lines)
