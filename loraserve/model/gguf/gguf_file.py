"""The header of a GGUF file: its metadata, and where each tensor lies.

Reads no weight and imports no torch. Source: the format's description
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.gguf_types import TYPES, TensorType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_HEADER_BYTES = 512 << 20
_MAX_DIMS = 4
_MAX_NESTING = 2
_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Struct code of a metadata value's type."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor of a file; its bytes are ``[begin, end)`` of the file.

    Attributes:
        shape: as torch has it: the last dimension's numbers are neighbours.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path


@dataclass(frozen=True, slots=True)
class Gguf:
    """A base's file, or its shards together.

    Attributes:
        metadata: values by key; of the first shard.
        tensors: by name, ordered by file and place.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of its architecture, with which the keys of its base begin."""
        return str(self.metadata.get("general.architecture"))

    def value(self, name: str) -> Any:
        """Look up the base's value under this name; None: there is none."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """Read a number above 0, the same for each layer.

        Raises:
            ModelError: it is missing and has no default, or is something else.
        """
        value = self.value(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(name, "a number above 0, the same in each layer,")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number; one of float32 as the shortest decimal that means it.

        Raises:
            ModelError: as `count`.
        """
        value = self.value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refusal(name, "a finite number")
        return _shortest(value)

    def refusal(self, name: str, expected: str) -> ModelError:
        """Build the error of a value that isn't implemented."""
        found = str(self.value(name))[:200]
        return ModelError(
            f"{self.files[0]}: {self.architecture}.{name} is {found}; only {expected} is implemented.",
            hint="Give the Hugging Face directory of the base, or another file.",
        )


def _shortest(value: float) -> float:
    """Find the number of the fewest digits that float32 rounds to this one."""
    for digits in range(1, 10):
        near = float(f"{value:.{digits}g}")
        if struct.pack("<f", near) == struct.pack("<f", value):
            return near
    return value


def is_gguf(path: Path) -> bool:
    """Check whether a path is a file of this format, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> Gguf:
    """Read the headers of a file, and of its other shards where its name counts them.

    Raises:
        ModelError: a shard is missing, or a file isn't what it claims to be.
    """
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    files = _shards(path)
    for number, file in enumerate(files):
        found, of_file = _read_header(file)
        if number == 0:
            metadata = found
        for tensor in of_file:
            if tensor.name in tensors:
                raise ModelError(f"The tensor {tensor.name} is in {file.name} and in a shard before it.")
            tensors[tensor.name] = tensor
    return Gguf(files, metadata, tensors)


def _shards(path: Path) -> tuple[Path, ...]:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    files = tuple(path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path.name} is one of {count} shards, and {file.name} isn't beside it.")
    return files


def _read_header(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, len(data), _MAX_HEADER_BYTES)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        # an empty file can't be mapped
        raise _no_header(path) from error


def parse_gguf(
    name: str, data: bytes | bytearray | memoryview, *, file_bytes: int | None, max_header_bytes: int
) -> Gguf:
    """Parse the header of a file whose bytes are in memory, all or the first ones.

    Args:
        name: name of the file in messages.
        file_bytes: size of the file; None: it isn't known.

    Raises:
        HeaderIncomplete: the header continues after these bytes.
        ModelError: it isn't what it claims to be.
    """
    path = Path(name)
    metadata, tensors = _parse(path, data, file_bytes, max_header_bytes)
    found: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ModelError(f"{name} has the tensor {tensor.name[:200]} twice.")
        found[tensor.name] = tensor
    return Gguf((path,), metadata, found)


def _parse(
    path: Path, data: mmap.mmap | bytes | bytearray | memoryview, file_bytes: int | None, max_bytes: int
) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        return _Header(path, data, file_bytes, max_bytes).read()
    except (struct.error, ValueError, UnicodeDecodeError, OverflowError) as error:
        raise _no_header(path) from error


def _no_header(path: Path) -> ModelError:
    return ModelError(
        f"{path} isn't a GGUF file: its header can't be parsed.", hint="Fetch it again: it may be truncated."
    )


class HeaderIncomplete(ModelError):
    """The header continues after the bytes that are there."""


class _Header:
    """Cursor over a file's header.

    Args:
        path: name of the file in messages.
        file_bytes: size of the file, of which `data` may be the beginning; None: it isn't known.
    """

    def __init__(
        self, path: Path, data: mmap.mmap | bytes | bytearray | memoryview, file_bytes: int | None, max_bytes: int
    ) -> None:
        self._path, self._data, self._position = path, data, 0
        self._file_bytes, self._max_bytes = file_bytes, max_bytes

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        if self._take(len(MAGIC)) != MAGIC:
            raise ModelError(f"{self._path} isn't a GGUF file: it doesn't begin with {MAGIC.decode()}.")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} has version {version} of GGUF; expected {' or '.join(map(str, _VERSIONS))}.",
                hint="Convert the model again with a current llama.cpp.",
            )
        num_tensors, num_values = self._count(8 + 4 + 4 + 8), self._count(8 + 4 + 1)
        metadata = dict(self._entry() for _ in range(num_values))
        rows = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}; expected a power of 2.")
        body = -(-self._position // alignment) * alignment
        return metadata, [self._placed(body, *row) for row in rows]

    def _placed(self, body: int, name: str, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        type_ = TYPES.get(number)
        if type_ is None:
            raise ModelError(f"{self._path}: the tensor {name} has the type {number}, which no format here has.")
        if shape[-1] % type_.block:
            raise ModelError(
                f"{self._path}: rows of {name} have {shape[-1]} numbers; {type_.name} has blocks of {type_.block}."
            )
        begin, num_bytes = body + offset, prod(shape) // type_.block * type_.num_bytes
        if self._file_bytes is not None and begin + num_bytes > self._file_bytes:
            raise ModelError(
                f"{self._path} ends within the tensor {name}.", hint="Fetch it again: it may be truncated."
            )
        return GgufTensor(name, type_, shape, begin, begin + num_bytes, self._path)

    def _entry(self) -> tuple[str, Any]:
        key, kind = self._string(), self._number("I")
        return key, self._value(kind, 0)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dims = self._string(), self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelError(f"{self._path}: the tensor {name} has {num_dims} dimensions.")
        # the file names the dimension of neighbours first
        shape = tuple(reversed(self._numbers("Q", num_dims)))
        return name, self._number("I"), shape, self._number("Q")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS.get(kind) or self._refuse(kind))
        item, count = self._number("I"), self._number("Q")
        if item in _NUMBERS:
            return list(self._numbers(_NUMBERS[item], count))
        if depth == _MAX_NESTING:
            self._refuse(item)
        read: Callable[[], Any] = self._string if item == _STRING else lambda: self._value(item, depth + 1)
        self._check(count)
        return [read() for _ in range(count)]

    def _refuse(self, kind: int) -> str:
        raise ModelError(f"{self._path}: a metadata value has the type {kind}, which GGUF doesn't define.")

    def _count(self, least_bytes: int) -> int:
        """Read a number of entries, each of which takes some bytes at least."""
        count: int = self._number("Q")
        self._check(count * least_bytes)
        return count

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", errors="surrogateescape")

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._check(size)
        return struct.unpack(f"<{count}{code}", self._take(size))

    def _take(self, size: int) -> bytes:
        self._check(size)
        self._position += size
        return bytes(self._data[self._position - size : self._position])

    def _check(self, size: int) -> None:
        if size > self._max_bytes - self._position:
            raise ModelError(
                f"The header of {self._path} has more than {self._max_bytes:,} bytes.",
                hint="Fetch it again: it may be damaged.",
            )
        if size > len(self._data) - self._position:
            raise HeaderIncomplete(f"{self._path} ends within its header.", hint="Fetch it again: it may be truncated.")
