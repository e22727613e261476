"""A checkpoint's safetensors files, opened header first: one file or shards with an index.

Tensors are then read one by one, in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.checkpoint.headers import INDEX_FILE as INDEX_FILE
from loraserve.model.checkpoint.headers import SINGLE_FILE as SINGLE_FILE
from loraserve.model.checkpoint.headers import StoredTensor, read_headers

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
"""Dtypes that can be read: those of float weights, and of quantized ones with their scales."""


_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of the checkpoint by name; ordered by file, and in a file by place."""

    tensors: Mapping[str, StoredTensor]

    def read(
        self, names: frozenset[str], tick: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[StoredTensor, Tensor, memoryview]]:
        """Yield these tensors with their raw bytes, each in memory of its own.

        They come file by file and in the order of their bytes.

        Args:
            tick: called after each piece of some MiB, which a slow disk or network may take seconds
                for.

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
                yield _read_tensor(file, stored, tick)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}.") from error
        finally:
            if file is not None:
                file.close()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Read these rows of a tensor, [end - start, ...], into memory of their own.

        Raises:
            ModelError: as `read`.
        """
        stored = self.tensors[name]
        if stored.num_heads:
            # rows of a head lie apart
            (read,) = self.read(frozenset({name}))
            return read[1][start:end].clone()
        num_bytes = (stored.end - stored.begin) // max(1, stored.shape[0])
        begin = stored.begin + start * num_bytes
        part = replace(
            stored, shape=(end - start, *stored.shape[1:]), begin=begin, end=begin + (end - start) * num_bytes
        )
        try:
            with stored.file.open("rb", buffering=0) as file:
                return _read_tensor(file, part, lambda: None)[1]
        except OSError as error:
            raise ModelError(f"{stored.file} can't be read: {error.strerror}.") from error


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Read the headers of the directory's files.

    Raises:
        MissingTensor, ModelError: as `checkpoint_headers.read_headers`.
    """
    return Checkpoint(read_headers(model_dir))


def _read_tensor(
    file: BinaryIO, stored: StoredTensor, tick: Callable[[], None]
) -> tuple[StoredTensor, Tensor, memoryview]:
    if stored.dtype not in DTYPES:
        raise ModelError(f"The tensor {stored.name} is stored as {stored.dtype}; expected one of {', '.join(DTYPES)}.")
    num_bytes = stored.end - stored.begin
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    view = memory.numpy().data
    file.seek(stored.begin)
    position = 0
    while position < num_bytes:
        count = file.readinto(view[position : position + _PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise ModelError(
                f"{stored.file} ends within the tensor {stored.name}.", hint="Fetch it again: it may be truncated."
            )
        position += count
        tick()
    tensor = memory.view(DTYPES[stored.dtype]).view(stored.shape)
    return stored, tensor if not (stored.num_heads or stored.offset) else _put_back(tensor, stored), view


def _put_back(tensor: Tensor, stored: StoredTensor) -> Tensor:
    """Put a tensor's rows back in their order, and its numbers without the offset."""
    if stored.num_heads:
        heads = tensor.view(stored.num_heads, -1, 2, *tensor.shape[1:])
        tensor = heads.transpose(1, 2).reshape(tensor.shape)
    return tensor - stored.offset if stored.offset else tensor
