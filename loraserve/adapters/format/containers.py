"""Adapters in other containers than PEFT's two files, read as these.

A version is stored as PEFT writes it, whatever it came in: everything after an upload, from the
engine to a download, handles one form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loraserve.adapter_folder import INDEX_FILE, shard_names
from loraserve.adapters.format.mlx_format import is_mlx_config, read_mlx
from loraserve.adapters.format.peft_format import CONFIG_FILE, Buffer, read_config
from loraserve.adapters.format.shards import read_shards
from loraserve.adapters.format.torch_archive import ARCHIVE_FILE, MAGIC, read_archive, read_archive_beginning
from loraserve.adapters.ir import TensorView
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedFiles:
    """An adapter's files as PEFT would have written them.

    Attributes:
        config: contents of ``adapter_config.json``, as bytes of JSON.
        notes: what was read as what, for people.
    """

    config: bytes
    tensors: Mapping[str, TensorView]
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.array.nbytes for tensor in self.tensors.values())


class Container(Protocol):
    """Format of an adapter's weights that has another beginning than safetensors."""

    magic: bytes
    """First bytes of its files."""
    has_config: bool
    """Whether it needs no ``adapter_config.json``."""

    def read_beginning(self, beginning: Buffer, limits: Limits) -> int | None:
        """Bound the bytes of a file from its beginning; None: it isn't known yet.

        Raises:
            AdapterFormatError: no file that begins so is accepted.
        """
        ...

    def read(self, config: bytes, weights: Buffer, base: BaseSpec, limits: Limits) -> ConvertedFiles:
        """Read the adapter's files.

        Raises:
            AdapterRejected: it can't be read.
        """
        ...


class TorchArchive:
    """PEFT's older ``adapter_model.bin``, as torch.save writes it."""

    magic = MAGIC
    has_config = False

    def read_beginning(self, beginning: Buffer, limits: Limits) -> int | None:
        return read_archive_beginning(beginning, limits)

    def read(self, config: bytes, weights: Buffer, base: BaseSpec, limits: Limits) -> ConvertedFiles:
        note = f"{ARCHIVE_FILE} (torch.save's archive) was read without unpickling it"
        return ConvertedFiles(config, read_archive(weights, limits), (note,))


CONTAINERS: tuple[Container, ...] = (TorchArchive(),)


def find_container(first: Buffer, containers: Sequence[Container]) -> Container | None:
    """Find the container whose files begin with these bytes; None: they are safetensors."""
    return next((one for one in containers if bytes(first[: len(one.magic)]) == one.magic), None)


def needs_conversion(config: bytes, first: Buffer, index: bytes | None, containers: Sequence[Container]) -> bool:
    """Check whether an upload isn't PEFT's two files yet.

    Args:
        config: contents of ``adapter_config.json``; empty: there is none.
        first: the first bytes of the weights.
        index: as for `convert_files`.
    """
    return index is not None or find_container(first, containers) is not None or _is_mlx(config)


def _is_mlx(config: bytes) -> bool:
    try:
        return bool(config) and is_mlx_config(read_config(config))
    except AdapterFormatError:
        # refused with PEFT's own, where all of its problems are reported
        return False


def convert_files(
    config: bytes,
    weights: Buffer,
    base: BaseSpec,
    index: bytes | None = None,
    containers: Sequence[Container] = CONTAINERS,
    limits: Limits = LIMITS,
) -> ConvertedFiles:
    """Convert the files of an upload into those that PEFT writes.

    Args:
        index: contents of the index of several shards, which `weights` are, one after the other.

    Raises:
        AdapterRejected: its container can't be read.
    """
    container = find_container(weights, containers)
    if container is not None:
        if not config and not container.has_config:
            raise AdapterFormatError(f"The upload has no {CONFIG_FILE}.", hint="Send it with the weights.")
        return container.read(config, weights, base, limits)
    if index is None and _is_mlx(config):
        return ConvertedFiles(*read_mlx(config, weights, base, limits))
    if index is None:
        raise AdapterFormatError("The weights are in no format that is read.")
    tensors = read_shards(weights, index, limits)
    count = len(shard_names(index))
    return ConvertedFiles(config, tensors, (f"{count} files of weights with {INDEX_FILE} were read as one",))


def write_safetensors(tensors: Mapping[str, TensorView]) -> Iterator[bytes]:
    """Yield the pieces of a safetensors file of these tensors, in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        end = position + tensor.array.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in sorted(tensors):
        yield tensors[name].array.tobytes()
