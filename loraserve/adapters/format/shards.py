"""Weights in several safetensors files with an index, read as one file.

An upload holds the files one after the other. Each has in its header where it ends.
"""

from __future__ import annotations

from loraserve.adapter_folder import INDEX_FILE, read_index
from loraserve.adapters.format.peft_format import WEIGHTS_FILE, Buffer, read_beginning, read_tensors
from loraserve.adapters.ir import TensorView
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS, Limits

_HINT = f"Send every file that {INDEX_FILE} names, once."


def read_shards(weights: Buffer, index: bytes, limits: Limits = LIMITS) -> dict[str, TensorView]:
    """Read the tensors of all shards, sharing their memory.

    Args:
        weights: the shards, in any order.

    Raises:
        AdapterFormatError: the index isn't one, shards are missing or hold other tensors than it
            lists, or a tensor is in two of them.
    """
    places = read_index(index)
    data = memoryview(weights)
    tensors: dict[str, TensorView] = {}
    seen: dict[str, str] = {}
    while len(data):
        header = read_beginning(data, limits)
        size = None if header is None else header.body_offset + header.body_bytes
        if size is None or size > len(data):
            raise AdapterFormatError(f"The last of the weights' files ends after {len(data):,} bytes.", hint=_HINT)
        found = read_tensors(data[:size], limits)
        data = data[size:]
        name = _shard_of(found, places)
        twice = next((tensor for tensor in found if tensor in seen), None)
        if twice is not None:
            raise AdapterFormatError(
                f"The tensor {shown(twice, 200)} is in two of the weights' files, {seen[twice]} and {name}.", hint=_HINT
            )
        seen.update(dict.fromkeys(found, name))
        tensors.update(found)
        if len(tensors) > limits.max_adapter_tensors:
            raise AdapterFormatError(
                f"The weights' files hold more than {limits.max_adapter_tensors:,} tensors together."
            )
    missing = sorted(set(places.values()) - set(seen.values()))
    if missing:
        raise AdapterFormatError(
            f"{INDEX_FILE} names {shown(missing[0], 120)}, which isn't among the weights' files.", hint=_HINT
        )
    absent = next((tensor for tensor in places if tensor not in tensors), None)
    if absent is not None:
        raise AdapterFormatError(
            f"{INDEX_FILE} places {shown(absent, 200)} in {places[absent]}, which doesn't hold it.", hint=_HINT
        )
    return tensors


def _shard_of(tensors: dict[str, TensorView], places: dict[str, str]) -> str:
    """Look up the name that the index has for the file of these tensors.

    Raises:
        AdapterFormatError: a tensor is in another file than in the index, or not in the index.
    """
    names: dict[str, str] = {}
    for tensor in tensors:
        if tensor not in places:
            raise AdapterFormatError(
                f"{WEIGHTS_FILE}'s shards hold the tensor {shown(tensor, 200)}, which {INDEX_FILE} doesn't list.",
                hint="Save the adapter again.",
            )
        names.setdefault(places[tensor], tensor)
    if len(names) > 1:
        first, second = list(names)[:2]
        raise AdapterFormatError(
            f"One of the weights' files holds {shown(names[first], 200)} and {shown(names[second], 200)}; {INDEX_FILE} "
            f"places them in {first} and {second}.",
            hint=_HINT,
        )
    return next(iter(names))
