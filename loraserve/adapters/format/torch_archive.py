"""Weights in a file of torch.save, ``adapter_model.bin``: a zip archive of a pickle and of numbers.

The archive is read by its directory, in the strict form in which torch writes it: every entry is
stored as it is, so that nothing unfolds, and lies inside of the file. The pickle is read by
`torch_pickle`, which executes nothing. It is the archive's first entry, so that a file is judged as
soon as its beginning is there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod

import numpy as np

from loraserve.adapters.format.peft_format import STORED_DTYPES, STORED_SIZES, Buffer, check_name, stored_view
from loraserve.adapters.format.torch_pickle import MAX_PICKLE_BYTES, PickledTensor, PickleIncomplete, read_pickle
from loraserve.adapters.ir import TensorView
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS, Limits

ARCHIVE_FILE = "adapter_model.bin"
MAGIC = b"PK\x03\x04"
_HINT = "Save again with PEFT's save_pretrained(..., safe_serialization=True)."
_LOCAL, _ENTRY, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_MAX_NAME = 256
_MAX_OTHERS = 16
"""Entries apart from the storages': the pickle, and some of a few bytes."""
_MAX_OTHER_BYTES = 64
"""Bytes of each of these in a file that torch has written."""
_FRAME_BYTES = 1024
"""Bytes of headers, names and padding that an entry takes apart from its own."""
_MAX_TIMES = 4
"""Tensors take at most this many times the file's bytes: several may be views of one storage."""
_DATA = "data/"


def read_archive(weights: Buffer, limits: Limits = LIMITS) -> dict[str, TensorView]:
    """Read every tensor of an archive, sharing its memory where the numbers lie in order.

    float64 is read as float32, as it is in safetensors.

    Raises:
        AdapterFormatError: it isn't an archive in the form above, holds something else than
            tensors of floats, or is over a bound.
    """
    data = memoryview(weights)
    entries = _read_directory(data, limits)
    pickled = next((name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if pickled is None:
        raise _refusal("holds no data.pkl: torch.save hasn't written it")
    folder = pickled.removesuffix("data.pkl")
    begin, end = entries[pickled]
    try:
        found = read_pickle(data[begin:end], file=ARCHIVE_FILE)
    except PickleIncomplete:
        raise _refusal("ends within its pickle") from None
    order = entries.get(f"{folder}byteorder")
    if order is not None and bytes(data[order[0] : order[1]]) != b"little":
        raise _refusal("has numbers in another byte order than little")
    _check_tensors(found, len(data), limits)
    return {name: _view(name, tensor, data, entries, folder) for name, tensor in found.items()}


def read_archive_beginning(beginning: Buffer, limits: Limits = LIMITS) -> int | None:
    """Bound the bytes of a file from its beginning; None: its pickle isn't complete yet.

    Raises:
        AdapterFormatError: no archive that begins so is accepted.
    """
    if len(beginning) < _LOCAL.size:
        return None
    fields: tuple[int, ...] = _LOCAL.unpack_from(beginning)
    method, name_length, extra_length = fields[3], fields[9], fields[10]
    start = _LOCAL.size + name_length + extra_length
    if len(beginning) < start:
        return None
    name = bytes(beginning[_LOCAL.size : _LOCAL.size + min(name_length, _MAX_NAME)])
    if not name.endswith(b"/data.pkl") or method != 0:
        raise _refusal(f"begins with the entry {shown(name, 120)}; expected a stored data.pkl, as torch.save writes it")
    try:
        found = read_pickle(memoryview(beginning)[start : start + MAX_PICKLE_BYTES + 1], file=ARCHIVE_FILE)
    except PickleIncomplete:
        return None
    _check_tensors(found, None, limits)
    storages = {tensor.storage.key: tensor.storage for tensor in found.values()}
    num_bytes: int = sum(storage.num_elements * STORED_SIZES[storage.dtype] for storage in storages.values())
    return start + MAX_PICKLE_BYTES + num_bytes + (len(storages) + _MAX_OTHERS) * (_FRAME_BYTES + _MAX_OTHER_BYTES)


def _refusal(what: str) -> AdapterFormatError:
    return AdapterFormatError(f"{ARCHIVE_FILE} {what}.", hint=_HINT)


def _check_tensors(found: Mapping[str, PickledTensor], file_bytes: int | None, limits: Limits) -> None:
    if not found:
        raise _refusal("holds no tensors")
    if len(found) > limits.max_adapter_tensors:
        raise _refusal(f"holds {len(found):,} tensors; at most {limits.max_adapter_tensors:,} are allowed")
    problems = [problem for name, tensor in found.items() if (problem := _tensor_problem(name, tensor, limits))]
    if problems:
        raise AdapterFormatError(f"{ARCHIVE_FILE} can't be read: {problems[0]}", problems=problems[:32])
    num_bytes = sum(prod(tensor.shape) * STORED_SIZES[tensor.storage.dtype] for tensor in found.values())
    most = limits.max_upload_bytes if file_bytes is None else min(limits.max_upload_bytes, _MAX_TIMES * file_bytes)
    if num_bytes > most:
        raise _refusal(
            f"has tensors of {num_bytes:,} bytes that are views of fewer numbers; at most {most:,} bytes are allowed"
        )


def _tensor_problem(name: str, tensor: PickledTensor, limits: Limits) -> str | None:
    if (problem := check_name(name, limits)) is not None:
        return problem
    if len(tensor.shape) > 2:
        return f"{name} has {len(tensor.shape)} dims; expected at most 2."
    return None


def _view(
    name: str, tensor: PickledTensor, data: memoryview, entries: Mapping[str, tuple[int, int]], folder: str
) -> TensorView:
    storage = tensor.storage
    place = entries.get(f"{folder}{_DATA}{storage.key}")
    size = STORED_SIZES[storage.dtype]
    if place is None:
        raise _refusal(f"has no numbers for {name} (no entry {shown(_DATA + storage.key, 80)})")
    if place[1] - place[0] != storage.num_elements * size:
        raise _refusal(
            f"has {place[1] - place[0]:,} bytes of numbers for {name}; its pickle says {storage.num_elements * size:,}"
        )
    flat = np.frombuffer(data, STORED_DTYPES[storage.dtype], storage.num_elements, place[0])
    strides = tuple(stride * size for stride in tensor.strides)
    array = np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
    return stored_view(storage.dtype, tensor.shape, np.ascontiguousarray(array).reshape(tensor.shape))


def _read_directory(data: memoryview, limits: Limits) -> dict[str, tuple[int, int]]:
    """Find where each entry's bytes lie, by name."""
    count, position, end = _directory_place(data)
    if count > limits.max_adapter_tensors + _MAX_OTHERS:
        raise _refusal(f"holds {count:,} entries; at most {limits.max_adapter_tensors + _MAX_OTHERS:,} are allowed")
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        if position + _ENTRY.size > end:
            raise _refusal("has a broken directory: it may be truncated")
        fields = _ENTRY.unpack_from(data, position)
        magic, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_length, extra_length, comment_length, offset = fields[10], fields[11], fields[12], fields[16]
        begin = position + _ENTRY.size
        name = bytes(data[begin : begin + name_length]).decode("ascii", errors="backslashreplace")
        extra = bytes(data[begin + name_length : begin + name_length + extra_length])
        position = begin + name_length + extra_length + comment_length
        if magic != b"PK\x01\x02" or position > end or name_length > _MAX_NAME or name in entries:
            raise _refusal("has a broken directory: it may be truncated")
        if method != 0 or flags & 1:
            how = "is encrypted" if flags & 1 else f"is compressed (method {method})"
            raise _refusal(f"has the entry {shown(name, 120)}, which {how}: torch.save stores entries as they are")
        size, packed, offset = _wide(extra, size, packed, offset)
        if size != packed:
            raise _refusal(f"has the entry {shown(name, 120)} of {size:,} bytes in {packed:,}")
        entries[name] = _entry_place(data, name, offset, size)
    return entries


def _directory_place(data: memoryview) -> tuple[int, int, int]:
    """Find the directory: the number of its entries, its start and its end."""
    tail = len(data) - _END.size
    if tail < 0 or bytes(data[tail : tail + 4]) != b"PK\x05\x06":
        raise _refusal("has no directory at its end: it may be truncated")
    _, _, _, _, count, size, offset, _ = _END.unpack_from(data, tail)
    locator = tail - _LOCATOR.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\x06\x07":
        place = _LOCATOR.unpack_from(data, locator)[2]
        if place + _END64.size > len(data) or bytes(data[place : place + 4]) != b"PK\x06\x06":
            raise _refusal("has a broken directory: it may be truncated")
        fields = _END64.unpack_from(data, place)
        count, size, offset = fields[7], fields[8], fields[9]
    if offset + size > len(data):
        raise _refusal("has a broken directory: it may be truncated")
    return count, offset, offset + size


def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Read the numbers of an entry, of which those that need it are in the extra field."""
    values, position = [size, packed, offset], 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            field, at = extra[position + 4 : position + 4 + length], 0
            for i, value in enumerate(values):
                if value == 0xFFFFFFFF and at + 8 <= len(field):
                    values[i] = int.from_bytes(field[at : at + 8], "little")
                    at += 8
        position += 4 + length
    return values[0], values[1], values[2]


def _entry_place(data: memoryview, name: str, offset: int, size: int) -> tuple[int, int]:
    if offset + _LOCAL.size > len(data) or bytes(data[offset : offset + 4]) != MAGIC:
        raise _refusal(f"has no entry where its directory places {shown(name, 120)}")
    name_length, extra_length = _LOCAL.unpack_from(data, offset)[9:11]
    begin = offset + _LOCAL.size + name_length + extra_length
    if begin + size > len(data):
        raise _refusal(f"ends within the entry {shown(name, 120)}")
    return begin, begin + size
