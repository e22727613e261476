"""A checkpoint's safetensors files, opened header first: one file or shards with an index. Tensors are then read one by one, in the order of their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from loraserve.errors import MissingTensor, ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOATS = ("F32", "F16", "BF16")
"""What float weights are stored in."""

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""What can be read: what float weights, and quantized ones with their scales, are stored in."""

# the format's own bound on the header
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; its bytes are ``[begin, end)`` of the file.

    `dtype` is the format's name and may be one that isn't in `DTYPES`: what is never read may be stored in anything.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor of the checkpoint, by name; ordered by file, and in a file by place."""

    tensors: Mapping[str, StoredTensor]

    def read(self, names: frozenset[str]) -> Iterator[tuple[StoredTensor, Tensor, memoryview]]:
        """Yield these tensors, file by file and in the order of their bytes, each in memory of its own, with its raw bytes.

        Raises:
            ModelError: a file ends early or can't be read, or a tensor's dtype isn't in `DTYPES`.
        """
        file: BinaryIO | None = None
        path: Path | None = None
        try:
            for stored in self.tensors.values():
                if stored.name not in names:
                    continue
                if file is None or stored.file != path:
                    if file is not None:
                        file.close()
                    path = stored.file
                    # unbuffered: tensors are read straight into their memory
                    file = path.open("rb", buffering=0)
                yield _read_tensor(file, stored)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}.") from error
        finally:
            if file is not None:
                file.close()


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Read the headers of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises:
        MissingTensor: a shard lacks a tensor that the index places in it.
        ModelError: no weights in this format, or a file that isn't what it claims to be.
    """
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _open_shards(model_dir, index)
    single = model_dir / SINGLE_FILE
    if single.is_file():
        return Checkpoint({stored.name: stored for stored in _read_header(single)})
    others = sorted(path.name for path in model_dir.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"; it has {', '.join(others[:3])}, which isn't read" if others else ""
    raise ModelError(
        f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}.",
        hint="Save the model with save_pretrained, which writes safetensors.",
    )


def _open_shards(model_dir: Path, index: Path) -> Checkpoint:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError(f"{index} has {index.stat().st_size:,} bytes; at most {_MAX_INDEX_BYTES:,} are read.")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        places = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} isn't an index of shards: expected an object with weight_map.") from error
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        # an index can't reach out of its directory
        if Path(file).name != file or not (model_dir / file).is_file():
            raise ModelError(f"{index.name} names the shard {file[:200]!r}, which isn't in {model_dir}.")
        for stored in _read_header(model_dir / file):
            if stored.name in tensors:
                raise ModelError(f"The tensor {stored.name} is in {tensors[stored.name].file.name} and in {file}.")
            tensors[stored.name] = stored
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise MissingTensor(f"{index.name} says that the tensor {name} is in {file}; it isn't there.")
    return Checkpoint(tensors)


def _read_header(path: Path) -> list[StoredTensor]:
    """The file's tensors in the order of their bytes; they tile what follows the header exactly."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path} isn't a safetensors file: {size:,} bytes can't hold a header of {length:,}.")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [_stored(name, entry, 8 + length, path) for name, entry in header.items()]
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} isn't a safetensors file: its header makes no sense.") from error
    tensors.sort(key=lambda stored: (stored.begin, stored.end))
    position = 8 + length
    for stored in tensors:
        if stored.begin != position or stored.end < position:
            raise ModelError(f"{path}: the bytes of {stored.name} overlap others, or leave a gap.")
        position = stored.end
    if position != size:
        raise ModelError(
            f"{path} has {size:,} bytes; its header describes {position:,}.", hint="Fetch it again: it may be cut off."
        )
    return tensors


def _stored(name: str, entry: Mapping[str, Any], body: int, path: Path) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if min(shape, default=0) < 0 or (dtype in DTYPES and prod(shape) * DTYPES[dtype].itemsize != end - begin):
        raise ModelError(f"{path}: {name} of shape {list(shape)} and dtype {dtype} can't have {end - begin:,} bytes.")
    return StoredTensor(name, dtype, shape, body + begin, body + end, path)


def _read_tensor(file: BinaryIO, stored: StoredTensor) -> tuple[StoredTensor, Tensor, memoryview]:
    if stored.dtype not in DTYPES:
        raise ModelError(f"The tensor {stored.name} is stored as {stored.dtype}; expected one of {', '.join(DTYPES)}.")
    num_bytes = stored.end - stored.begin
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    view = memory.numpy().data
    file.seek(stored.begin)
    position = 0
    while position < num_bytes:
        count = file.readinto(view[position:])  # type: ignore[attr-defined]
        if not count:
            raise ModelError(f"{stored.file} ended within {stored.name}.", hint="Fetch it again: it may be cut off.")
        position += count
    return stored, memory.view(DTYPES[stored.dtype]).view(stored.shape), view
