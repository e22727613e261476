"""Files → config and tensors.

Our own check of the safetensors header decides everything before a tensor is looked at.

A safetensors file is: the header's length (8 bytes, little-endian), the header (JSON: tensor name →
dtype, shape, data_offsets), the body. We take a strict subset of it: the header at most 1 MiB,
plain ASCII names, F64, F32, F16 or BF16, at most 2 dims, and offsets that tile the body exactly, so
that every byte of the file belongs to one tensor. Pickles and archives are refused by their first
bytes. Of F64, float32 is made as it is read, as PEFT does when it loads one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraserve.adapter_folder import CONFIG_FILE as CONFIG_FILE
from loraserve.adapter_folder import WEIGHTS_FILE as WEIGHTS_FILE
from loraserve.adapters.config.kinds import check_kind
from loraserve.adapters.ir import ITEM_SIZES, NUMPY_DTYPES, Array, TensorView
from loraserve.adapters.strict_json import parse_object, shown
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS, Limits

Buffer = bytes | bytearray | memoryview
"""A file's bytes in memory."""


STORED_SIZES = {**ITEM_SIZES, "F64": 8}
"""Bytes of a number by the dtypes that a file may have."""
STORED_DTYPES = {**NUMPY_DTYPES, "F64": "<f8"}
"""NumPy's dtypes of these."""
_MAX_PROBLEMS = 32
_MAX_SIZE = 1 << 48
_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}
# AdaLoRA's, of a module in which training has left no rank; LoRA's have ".weight" behind them
_MAY_BE_EMPTY = (".lora_A", ".lora_B", ".lora_E")

_OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (torch.save writes these, with a pickle inside)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file it points to (run: git lfs pull)"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<html", "an HTML page"),
    *((bytes([0x80, protocol]), "a pickle") for protocol in range(1, 6)),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Checked entry of the header.

    Its bytes are ``begin:end`` of the body and as many as dtype and shape need.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    `tensors` are in the order of their bytes and tile the body without gap or overlap.
    """

    tensors: tuple[TensorInfo, ...]
    body_offset: int
    body_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PeftAdapter:
    """The two files of a PEFT adapter, read and not yet understood.

    `tensors` are views into the weights' buffer.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorView]


def read_adapter(config_bytes: Buffer, weights: Buffer, limits: Limits = LIMITS) -> PeftAdapter:
    """Config and zero-copy tensors of ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        AdapterFormatError: one of the files isn't what it claims to be; every reason is in
            `problems`.
        AdapterUnsupported: it's a kind of adapter that isn't served: then nothing else is looked
            at.
    """
    problems: list[str] = []
    config: dict[str, Any] = {}
    tensors: dict[str, TensorView] = {}
    try:
        config = read_config(config_bytes, limits)
    except AdapterFormatError as error:
        problems.extend(error.problems)
    else:
        check_kind(config)
    try:
        tensors = read_tensors(weights, limits)
    except AdapterFormatError as error:
        problems.extend(error.problems)
    if problems:
        raise AdapterFormatError(" ".join(problems[:3]), problems=problems)
    return PeftAdapter(config, tensors)


def read_config(data: Buffer, limits: Limits = LIMITS) -> dict[str, Any]:
    """Parse the JSON object in ``adapter_config.json``.

    Raises:
        AdapterFormatError: too long, or not strict JSON.
    """
    if len(data) > limits.max_adapter_config_bytes:
        raise AdapterFormatError(
            f"{CONFIG_FILE} has {len(data):,} bytes; at most {limits.max_adapter_config_bytes:,} are allowed."
        )
    return parse_object(bytes(data), what=CONFIG_FILE, max_depth=limits.max_json_depth)


def read_tensors(weights: Buffer, limits: Limits = LIMITS) -> dict[str, TensorView]:
    """Map every tensor in a safetensors file to a view that shares its memory.

    They are writable exactly if the buffer is. A tensor of F64 is a float32 copy, rounded to
    nearest.

    Raises:
        AdapterFormatError: as `read_header`.
    """
    header = read_header(weights, limits)
    tensors: dict[str, TensorView] = {}
    for info in header.tensors:
        dtype = np.dtype(STORED_DTYPES[info.dtype])
        count = (info.end - info.begin) // dtype.itemsize
        flat = np.frombuffer(weights, dtype=dtype, count=count, offset=header.body_offset + info.begin)
        tensors[info.name] = stored_view(info.dtype, info.shape, flat.reshape(info.shape))
    return tensors


def stored_view(dtype: str, shape: tuple[int, ...], array: Array) -> TensorView:
    """Wrap a tensor as its file holds it; of F64, a float32 copy, rounded to nearest."""
    if dtype == "F64":
        # what float32 doesn't hold is infinite then, and refused as such
        with np.errstate(over="ignore", invalid="ignore"):
            dtype, array = "F32", array.astype("<f4")
    return TensorView(dtype, shape, array)


def read_header(weights: Buffer, limits: Limits = LIMITS) -> Header:
    """Read the header of a safetensors file, entirely checked.

    This costs no more than the header's own length.

    Raises:
        AdapterFormatError: it isn't a safetensors file in the strict form above; every reason is in
            `problems`.
    """
    total = len(weights)
    if total < 8:
        raise AdapterFormatError(f"{WEIGHTS_FILE} has {total} bytes; a safetensors file has at least 8.")
    length = _header_length(weights, limits)
    if 8 + length > total:
        raise AdapterFormatError(
            f"{WEIGHTS_FILE} gives its header's length as {length:,} bytes; "
            f"the whole file has {total:,}. It may be truncated."
        )
    return _parse_header(weights, length, total - 8 - length, limits)


def read_beginning(beginning: Buffer, limits: Limits = LIMITS) -> Header | None:
    """Read the header of a file of which these are the first bytes, as `read_header` checks it.

    Its body has as many bytes as its tensors. None: the header isn't complete yet.

    Raises:
        AdapterFormatError: no file that begins so is accepted.
    """
    if len(beginning) < 9:
        return None
    length = _header_length(beginning, limits)
    return None if len(beginning) < 8 + length else _parse_header(beginning, length, None, limits)


def _header_length(weights: Buffer, limits: Limits) -> int:
    """Read the header's length from the first nine bytes, or from those that there are."""
    length = int.from_bytes(weights[:8], "little")
    # A length such as 0x0280 looks like a pickle's first bytes; nothing but safetensors has a brace
    # after eight bytes.
    if length > limits.max_adapter_header_bytes or bytes(weights[8:9]) != b"{":
        _refuse_other_format(bytes(weights[:32]))
    if length > limits.max_adapter_header_bytes:
        raise AdapterFormatError(
            f"{WEIGHTS_FILE} gives its header's length as {length:,} bytes; "
            f"at most {limits.max_adapter_header_bytes:,} are allowed.",
            hint="Check that it is a safetensors file, as PEFT's save_pretrained writes it.",
        )
    return length


def _parse_header(weights: Buffer, length: int, body_bytes: int | None, limits: Limits) -> Header:
    # depth 3 is what a header has: the object, an entry, its lists
    entries = parse_object(bytes(weights[8 : 8 + length]), what=f"{WEIGHTS_FILE}'s header", max_depth=4)
    return _check_entries(entries, 8 + length, body_bytes, limits)


def _refuse_other_format(first: bytes) -> None:
    for magic, name in _OTHER_FORMATS:
        if first.startswith(magic):
            raise AdapterFormatError(
                f"{WEIGHTS_FILE} is {name}; only safetensors files are accepted, and no other format is ever opened.",
                hint="Save again with PEFT's save_pretrained(..., safe_serialization=True).",
            )


def _check_entries(entries: Mapping[str, Any], body_offset: int, body_bytes: int | None, limits: Limits) -> Header:
    """Check the header's entries.

    Args:
        body_bytes: bytes after it; None: as many as its tensors have.
    """
    problems: list[str] = []
    # mlx writes null where it has none
    metadata = entries.get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append("__metadata__ must be an object of strings.")
    num_tensors = len(entries) - ("__metadata__" in entries)
    if num_tensors == 0:
        problems.append("The file holds no tensors.")
    if num_tensors > limits.max_adapter_tensors:
        raise AdapterFormatError(
            f"{WEIGHTS_FILE} holds {num_tensors:,} tensors; at most {limits.max_adapter_tensors:,} are allowed."
        )
    tensors: list[TensorInfo] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        problem = check_name(name, limits)
        info = None if problem else _read_entry(name, entry)
        if isinstance(info, TensorInfo):
            tensors.append(info)
        else:
            problems.append(problem or info or "")
    if not problems:
        tensors.sort(key=lambda t: (t.begin, t.end))
        body_bytes = max((t.end for t in tensors), default=0) if body_bytes is None else body_bytes
        problems.extend(_tiling_problems(tensors, body_bytes))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        problems = problems[:_MAX_PROBLEMS] + ([f"… and {more} more."] if more > 0 else [])
        raise AdapterFormatError(f"{WEIGHTS_FILE}'s header is invalid: {problems[0]}", problems=problems)
    return Header(tuple(tensors), body_offset, body_bytes or 0)


def check_name(name: str, limits: Limits) -> str | None:
    """Explain why a tensor can't have this name; None: it can."""
    if len(name) > limits.max_tensor_name_bytes:
        return f"A tensor's name has {len(name):,} characters; at most {limits.max_tensor_name_bytes} are allowed."
    if not (name and name.isascii() and name.isprintable() and " " not in name):
        return f"The tensor name {shown(name)} isn't plain ASCII without spaces."
    return None


def _read_entry(name: str, entry: object) -> TensorInfo | str:
    """Check the entry by itself; return it, or what's wrong with it."""
    if not isinstance(entry, dict) or set(entry) != _TENSOR_KEYS:
        return f"{name}: expected exactly dtype, shape and data_offsets."
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_SIZES:
        return f"{name} has dtype {shown(dtype, 24)}; expected F64, F32, F16 or BF16."
    if not _is_sizes(shape):
        return f"{name} has shape {shown(shape, 48)}; expected whole numbers."
    if len(shape) > 2:
        return f"{name} has {len(shape)} dims; expected at most 2."
    if 0 in shape and not name.endswith(_MAY_BE_EMPTY):
        return f"{name} is empty (shape {shown(shape, 48)}). Gather ZeRO-3 or FSDP shards before saving."
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{name} has data_offsets {shown(offsets, 48)}; expected [begin, end]."
    num_bytes = STORED_SIZES[dtype]
    for size in shape:
        num_bytes *= size
    if num_bytes != offsets[1] - offsets[0]:
        return (
            f"{name} is {dtype} {shown(shape, 48)}, which takes {shown(num_bytes, 24)} bytes; "
            f"its data_offsets span {shown(offsets[1] - offsets[0], 24)}."
        )
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _MAX_SIZE for v in value)


def _tiling_problems(tensors: list[TensorInfo], body_bytes: int) -> list[str]:
    problems: list[str] = []
    position = 0
    for info in tensors:
        if info.begin != position:
            kind = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
            problems.append(f"{info.name} begins at {info.begin:,} and {kind}, which ends at {position:,}.")
        position = max(position, info.end)
    if position > body_bytes:
        problems.append(
            f"The tensors end at {position:,}; the body has {body_bytes:,} bytes. The file may be truncated."
        )
    elif position < body_bytes:
        problems.append(f"{body_bytes - position:,} bytes after the last tensor belong to no tensor.")
    return problems
