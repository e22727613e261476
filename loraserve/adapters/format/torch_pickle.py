"""The pickle in a file of torch.save, read without executing it.

A pickle is a program for a machine with a stack, which may call any function. This module is a
machine of its own that has only what torch.save writes for a dictionary of tensors: texts, numbers,
tuples, dictionaries, and two functions, of which it makes a description of each tensor. Everything
else is refused by its name, before anything after it is read.

Source: Python's `pickletools` for the codes; torch's `serialization._save` for what it writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterFormatError

MAX_PICKLE_BYTES = 4 << 20
_MAX_STEPS = 500_000
_MAX_MEMO = 1 << 20
_MAX_TUPLE = 8
_MAX_INT_BYTES = 8
_HINT = "Save again with PEFT's save_pretrained(..., safe_serialization=True)."

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
}
"""torch's classes of stored numbers → safetensors' dtypes."""
_REBUILD, _PARAMETER = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")
_ORDERED = ("collections", "OrderedDict")
_MARK: Final = object()


class PickleIncomplete(Exception):
    """The pickle continues after the bytes that are there."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers of a file that tensors are views of.

    Attributes:
        key: name of the entry that holds them, below ``data/``.
        dtype: "F64", "F32", "F16" or "BF16".
    """

    key: str
    dtype: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """View of a storage: `shape` and `strides` in elements, from `offset` on."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """Function or class that the pickle names, and that isn't looked up anywhere."""

    module: str
    name: str

    @property
    def path(self) -> tuple[str, str]:
        return self.module, self.name


def read_pickle(data: bytes | memoryview, *, file: str) -> dict[str, PickledTensor]:
    """Read the tensors that a pickle describes, by name.

    Args:
        file: name of the pickle's file in messages.

    Raises:
        PickleIncomplete: it ends before its last code.
        AdapterFormatError: it does anything else than describe a dictionary of tensors, or is over
            a bound.
    """
    machine = _Machine(bytes(data[:MAX_PICKLE_BYTES]), file, is_cut=len(data) > MAX_PICKLE_BYTES)
    found = machine.run()
    if not isinstance(found, dict):
        raise machine.refusal(f"holds a {_kind(found)}; expected a dictionary of tensors")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, PickledTensor):
            raise machine.refusal(f"has a {_kind(tensor)} under {shown(name)}; expected tensors by their names")
    return found


def _kind(value: object) -> str:
    if isinstance(value, _Global):
        return f"{value.module}.{value.name}"
    return {PickledTensor: "tensor", Storage: "storage", dict: "dictionary"}.get(type(value), type(value).__name__)


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(self, data: bytes, file: str, *, is_cut: bool) -> None:
        self._data, self._file, self._is_cut = data, file, is_cut
        self._position = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def refusal(self, what: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self._file}'s pickle {what}.", hint=_HINT)

    def run(self) -> Any:
        for _ in range(_MAX_STEPS):
            code = self._take(1)
            if code == b".":
                return self._pop()
            step = _CODES.get(code)
            if step is None:
                raise self.refusal(f"has the code {code!r}, which a dictionary of tensors doesn't need")
            step(self)
        raise self.refusal(f"takes more than {_MAX_STEPS:,} steps")

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            if self._is_cut or end > MAX_PICKLE_BYTES:
                raise self.refusal(f"has more than {MAX_PICKLE_BYTES:,} bytes")
            raise PickleIncomplete
        taken, self._position = self._data[self._position : end], end
        return taken

    def _number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _text(self, code: str) -> None:
        data = self._take(self._number(code))
        try:
            self._stack.append(data.decode())
        except UnicodeDecodeError:
            raise self.refusal("has a text that isn't UTF-8") from None

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position, self._position + 256)
        if end < 0:
            if len(self._data) - self._position < 256 and not self._is_cut:
                raise PickleIncomplete
            raise self.refusal("has a name of more than 255 bytes")
        line = self._data[self._position : end]
        self._position = end + 1
        return line.decode("ascii", errors="backslashreplace")

    def _pop(self) -> Any:
        if not self._stack:
            raise self.refusal("takes a value from an empty stack")
        value = self._stack.pop()
        if value is _MARK:
            raise self.refusal("takes a value from behind a mark")
        return value

    def _marked(self) -> list[Any]:
        """Pop the last mark and the values after it."""
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self.refusal("has no mark where one is needed")

    def proto(self) -> None:
        if (version := self._number("B")) > 5:
            raise self.refusal(f"has the protocol {version}; expected at most 5")

    def skip_frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._stack.append(_MARK)

    def integer(self) -> None:
        size = self._number("B")
        if size > _MAX_INT_BYTES:
            raise self.refusal(f"has an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def tuple_of(self, count: int | None) -> None:
        values = self._marked() if count is None else [self._pop() for _ in range(count)][::-1]
        inner = [value for value in values if isinstance(value, tuple)]
        # bounded, since a value that is recalled twice would otherwise double with each tuple
        if len(values) > _MAX_TUPLE or any(isinstance(value, tuple) for values in inner for value in values):
            raise self.refusal(f"has a tuple of more than {_MAX_TUPLE} values or of tuples of tuples")
        self._stack.append(tuple(values))

    def name(self) -> None:
        self._named(self._line(), self._line())

    def stacked_name(self) -> None:
        name, module = self._pop(), self._pop()
        self._named(module, name)

    def _named(self, module: object, name: object) -> None:
        found = _Global(str(module), str(name))
        if found.module == "torch" and found.name.endswith("Storage"):
            if found.name not in _STORAGES:
                raise self.refusal(f"has numbers of {shown(f'torch.{found.name}', 60)}; expected floats")
        elif found.path not in (_REBUILD, _PARAMETER, _ORDERED):
            raise self.refusal(
                f"names {shown(f'{found.module}.{found.name}', 120)}, which isn't a part of a dictionary of tensors: "
                "loading it could run any code"
            )
        self._stack.append(found)

    def store(self, code: str | None) -> None:
        index = len(self._memo) if code is None else self._number(code)
        if len(self._memo) >= _MAX_MEMO:
            raise self.refusal(f"remembers more than {_MAX_MEMO:,} values")
        value = self._pop()
        self._memo[index] = value
        self._stack.append(value)

    def recall(self, code: str) -> None:
        index = self._number(code)
        if index not in self._memo:
            raise self.refusal("recalls a value that it hasn't stored")
        self._stack.append(self._memo[index])

    def set_items(self, *, is_marked: bool) -> None:
        values = self._marked() if is_marked else [self._pop(), self._pop()][::-1]
        target = self._pop()
        if not isinstance(target, dict) or len(values) % 2:
            raise self.refusal("sets items of something that isn't a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise self.refusal(f"has a {_kind(key)} for the name of a tensor")
            if key in target:
                raise self.refusal(f"has {shown(key, 200)} twice")
            target[key] = value
        self._stack.append(target)

    def storage(self) -> None:
        """Turn ``("storage", class, key, device, count)`` into a `Storage`."""
        match self._pop():
            case ("storage", _Global(module="torch", name=kind), str(key), str(), int(count)) if (
                kind in _STORAGES and 0 <= count < 1 << 40
            ):
                self._stack.append(Storage(key, _STORAGES[kind], count))
            case other:
                raise self.refusal(f"refers to a {_kind(other)} outside of it; expected a storage of floats")

    def call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise self.refusal("calls something that isn't a function")
        if function.path == _ORDERED and not arguments:
            self._stack.append({})
        elif function.path == _REBUILD:
            self._stack.append(self._tensor(arguments))
        elif function.path == _PARAMETER and arguments and isinstance(arguments[0], PickledTensor):
            self._stack.append(arguments[0])
        else:
            raise self.refusal(f"calls {function.module}.{function.name} with unexpected arguments")

    def build(self) -> None:
        """Drop the attributes of an OrderedDict, such as a state dictionary's ``_metadata``."""
        self._pop()
        target = self._pop()
        if not isinstance(target, dict):
            raise self.refusal("sets attributes of something that isn't a dictionary")
        self._stack.append(target)

    def _tensor(self, arguments: tuple[Any, ...]) -> PickledTensor:
        match arguments[:4]:
            case (Storage() as storage, int(offset), tuple(shape), tuple(strides)) if (
                len(shape) == len(strides)
                and len(shape) <= 4
                and all(type(n) is int and 0 <= n < 1 << 40 for n in (offset, *shape, *strides))
            ):
                last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
                if 0 not in shape and last >= storage.num_elements:
                    raise self.refusal(f"has a tensor of shape {list(shape)} that ends outside of its storage")
                return PickledTensor(storage, offset, shape, strides)
        raise self.refusal("has a tensor whose shape or strides can't be read")


_CODES: Mapping[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.proto,
    b"\x95": _Machine.skip_frame,
    b"(": _Machine.mark,
    b"}": lambda m: m._stack.append({}),
    b")": lambda m: m._stack.append(()),
    b"t": lambda m: m.tuple_of(None),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"X": lambda m: m._text("I"),
    b"\x8c": lambda m: m._text("B"),
    b"K": lambda m: m._stack.append(m._number("B")),
    b"M": lambda m: m._stack.append(m._number("H")),
    b"J": lambda m: m._stack.append(m._number("i")),
    b"\x8a": _Machine.integer,
    b"\x88": lambda m: m._stack.append(True),
    b"\x89": lambda m: m._stack.append(False),
    b"N": lambda m: m._stack.append(None),
    b"c": _Machine.name,
    b"\x93": _Machine.stacked_name,
    b"q": lambda m: m.store("B"),
    b"r": lambda m: m.store("I"),
    b"\x94": lambda m: m.store(None),
    b"h": lambda m: m.recall("B"),
    b"j": lambda m: m.recall("I"),
    b"s": lambda m: m.set_items(is_marked=False),
    b"u": lambda m: m.set_items(is_marked=True),
    b"Q": _Machine.storage,
    b"R": _Machine.call,
    b"b": _Machine.build,
}
"""Steps by pickle's codes: PROTO, FRAME, MARK, EMPTY_DICT, EMPTY_TUPLE, TUPLE, TUPLE1 to TUPLE3,
BINUNICODE, SHORT_BINUNICODE, BININT1, BININT2, BININT, LONG1, NEWTRUE, NEWFALSE, NONE, GLOBAL,
STACK_GLOBAL, BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET, SETITEM, SETITEMS, BINPERSID,
REDUCE, BUILD.
"""
