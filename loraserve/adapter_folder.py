"""Files of an adapter in its folder, by the names that PEFT and trainers give them.

The client reads them to send them, the server where it fetches an adapter itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from loraserve.errors import AdapterFormatError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
"""PEFT's index of weights in several files, its shards."""
WEIGHTS_FILES = (WEIGHTS_FILE, INDEX_FILE, "adapter_model.bin", "adapters.safetensors")
"""Names of the weights, or of their index, the preferred one first; the last one is mlx-lm's."""
MAX_INDEX_BYTES = 1 << 20
MAX_SHARDS = 256
CONFIG_HOLDER = b"GGUF"
"""First bytes of a file of weights that holds its config too."""
_WHOLE_MODEL = "a whole model: serve it as a base (loraserve serve --model DIR)"
_FOREIGN_FILES = {
    "pytorch_lora_weights.safetensors": "diffusers' LoRA of an image model, which isn't served",
    "model.safetensors": _WHOLE_MODEL,
    "model.safetensors.index.json": _WHOLE_MODEL,
    "pytorch_model.bin": _WHOLE_MODEL,
    "pytorch_model.bin.index.json": _WHOLE_MODEL,
}
_WEIGHTS_SHARD = re.compile(r"adapter_model-\d{1,8}-of-\d{1,8}\.safetensors")
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")


def find_weights(names: Collection[str]) -> str | None:
    """Return the name of the weights, or of their index, among those of a folder's files.

    A GGUF file counts where there are none of `WEIGHTS_FILES`. None: there are none.

    Raises:
        AdapterFormatError: there are several GGUF files.
    """
    found = next((name for name in WEIGHTS_FILES if name in names), None)
    if found is not None:
        return found
    ggufs = sorted(name for name in names if holds_config(name))
    if len(ggufs) > 1:
        raise AdapterFormatError(
            f"The folder holds {len(ggufs)} GGUF files ({', '.join(ggufs[:3])}); expected one adapter.",
            hint="Name the file, or put it into a folder of its own.",
        )
    return ggufs[0] if ggufs else None


def is_weights(name: str) -> bool:
    """Return whether a file's name is that of an adapter's weights, their index or one shard."""
    return name in WEIGHTS_FILES or _WEIGHTS_SHARD.fullmatch(name) is not None


def foreign_files(names: Collection[str]) -> str | None:
    """Return what a folder holds in an adapter's place, and what to do; None: it isn't known."""
    return next((words for name, words in _FOREIGN_FILES.items() if name in names), None)


def is_base(names: Collection[str]) -> bool:
    """Return whether a folder holds a whole model, and no adapter, by the names of its files."""
    return CONFIG_FILE not in names and any(_FOREIGN_FILES.get(name) is _WHOLE_MODEL for name in names)


def holds_config(name: str) -> bool:
    """Return whether a file of weights holds its config too, by its name."""
    return name.endswith(".gguf")


def shard_names(index: bytes) -> tuple[str, ...]:
    """Return the names of the shards that an index lists, in order.

    Raises:
        AdapterFormatError: it isn't an index, lists too many, or names a file outside of its
            folder.
    """
    return tuple(sorted(set(read_index(index).values())))


def read_index(index: bytes) -> dict[str, str]:
    """Return an index's shards by the names of their tensors.

    Raises:
        AdapterFormatError: as `shard_names`.
    """
    try:
        if len(index) > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES:,} bytes")
        found = json.loads(index.decode())
        shards = found["weight_map"] if isinstance(found, dict) else None
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError("its weight_map isn't an object of names")
    except (ValueError, KeyError, RecursionError) as error:
        reason = "it has no weight_map" if isinstance(error, KeyError) else str(error)[:120]
        raise AdapterFormatError(
            f"{INDEX_FILE} isn't an index of weights: {reason}.", hint="Save the adapter again."
        ) from None
    names = set(shards.values())
    outside = next((name for name in sorted(names) if not _SHARD.fullmatch(name)), None)
    if outside is not None:
        raise AdapterFormatError(
            f"{INDEX_FILE} names the file {ascii(outside)[:200]}; expected the name of a .safetensors file in the "
            "same folder.",
            hint="Put all shards next to the index, and save it again.",
        )
    if len(names) > MAX_SHARDS:
        raise AdapterFormatError(f"{INDEX_FILE} names {len(names)} files; at most {MAX_SHARDS} are read.")
    return shards
