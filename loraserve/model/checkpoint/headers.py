"""The headers of a checkpoint's safetensors files: which tensors there are, and where.

Reads no weight and imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from loraserve.errors import MissingTensor, ModelError
from loraserve.model.config.gguf_types import FLOAT_TYPES
from loraserve.model.config.wrappers import decoder_name
from loraserve.model.gguf.gguf_file import Gguf, read_gguf
from loraserve.model.gguf.gguf_folder import source_files
from loraserve.model.gguf.gguf_layout import PlacedTensor, place_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOATS = ("F32", "F16", "BF16")
"""Dtypes that float weights are stored in."""

ITEM_SIZES: Mapping[str, int] = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}
"""Bytes of a number, in what float weights, and quantized ones with their scales, are stored in."""

# the format's own bound on the header
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a file; its bytes are ``[begin, end)`` of the file.

    `dtype` is the format's name and may be one that isn't in `ITEM_SIZES`: what is never read may
    be stored in anything.

    Attributes:
        num_heads: whose rows lie so that neighbours are turned together, and are put back when they
            are read; 0: they lie as they are multiplied.
        offset: what was added to the numbers, and is taken off them when they are read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path
    num_heads: int = 0
    offset: float = 0.0


def read_headers(model_dir: Path) -> dict[str, StoredTensor]:
    """Read the header of every tensor by name, ordered by file and in a file by place.

    They are those of ``model.safetensors``, of the shards that ``model.safetensors.index.json``
    names, of the directory's only file of this kind, or of the GGUF file that the directory was
    made of.

    Raises:
        MissingTensor: a shard lacks a tensor that the index places in it.
        ModelError: no weights in this format, or a file that isn't what it claims to be.
    """
    if (files := source_files(model_dir)) is not None:
        return _of_gguf(read_gguf(files[0]))
    return decoder_tensors(_read_safetensors(model_dir))


def decoder_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename a checkpoint's tensors to the names that they have in a model of text alone.

    Those of the parts of a wrapper that read images or sound are left out.

    Raises:
        ModelError: two tensors have one name then.
    """
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        plain = decoder_name(name)
        if plain is None:
            continue
        if plain in found:
            raise ModelError(f"The checkpoint has the tensor {plain} twice, once as {name}.")
        found[plain] = stored if plain == name else replace(stored, name=plain)
    return found


def _read_safetensors(model_dir: Path) -> dict[str, StoredTensor]:
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _read_shards(model_dir, index)
    single = model_dir / SINGLE_FILE
    if single.is_file():
        return {stored.name: stored for stored in _read_header(single)}
    named = sorted(model_dir.glob("*.safetensors"))
    if len(named) == 1:
        # AutoGPTQ names the file by its settings
        return {stored.name: stored for stored in _read_header(named[0])}
    others = sorted(path.name for path in model_dir.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"; it has {', '.join(others[:3])}, which isn't read" if others else ""
    raise ModelError(
        f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}.",
        hint="Save the model with save_pretrained, which writes safetensors.",
    )


def _of_gguf(gguf: Gguf) -> dict[str, StoredTensor]:
    """List the tensors of a GGUF file; quantized ones as rows of bytes."""
    placed = (_of_placed(one) for one in place_tensors(gguf))
    return {stored.name: stored for stored in placed}


def _of_placed(placed: PlacedTensor) -> StoredTensor:
    tensor, type_ = placed.tensor, placed.tensor.type
    shape, begin, end = tensor.shape, tensor.begin, tensor.end
    if placed.expert is not None:
        size = (end - begin) // shape[0]
        shape, begin = shape[1:], begin + placed.expert * size
        end = begin + size
    dtype = type_.name
    if dtype not in FLOAT_TYPES:
        dtype, shape = "U8", (*shape[:-1], shape[-1] // type_.block * type_.num_bytes)
    return StoredTensor(placed.name, dtype, shape, begin, end, tensor.file, placed.num_heads, placed.offset)


def _read_shards(model_dir: Path, index: Path) -> dict[str, StoredTensor]:
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
                raise ModelError(
                    f"The tensor {stored.name} is in both {tensors[stored.name].file.name} and {file}; "
                    "expected it once."
                )
            tensors[stored.name] = stored
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise MissingTensor(f"{index.name} says that the tensor {name} is in {file}, which doesn't have it.")
    return tensors


def _read_header(path: Path) -> list[StoredTensor]:
    """Read the file's tensors in the order of their bytes.

    They tile what follows the header exactly.
    """
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
        raise ModelError(f"{path} isn't a safetensors file: its header can't be parsed.") from error
    tensors.sort(key=lambda stored: (stored.begin, stored.end))
    position = 8 + length
    for stored in tensors:
        if stored.begin != position or stored.end < position:
            raise ModelError(f"{path}: the bytes of {stored.name} overlap others, or leave a gap.")
        position = stored.end
    if position != size:
        raise ModelError(
            f"{path} has {size:,} bytes; its header describes {position:,}.",
            hint="Fetch it again: it may be truncated.",
        )
    return tensors


def _stored(name: str, entry: Mapping[str, Any], body: int, path: Path) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if min(shape, default=0) < 0 or (dtype in ITEM_SIZES and prod(shape) * ITEM_SIZES[dtype] != end - begin):
        raise ModelError(f"{path}: {name} of shape {list(shape)} and dtype {dtype} can't have {end - begin:,} bytes.")
    return StoredTensor(name, dtype, shape, body + begin, body + end, path)
