"""Load one adapter: from the store's blobs to the packed tensors that kernels read.

The steps: `read_blobs` verifies the digests; `adapters` reads the format and compiles it to an IR;
`loading.lowering` turns that into the kernels' terms; `loading.precision` rounds and measures the
loss; the device packs. All of it runs on a loader's thread and touches no shared state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from adapters_store import BlobStore, read_memory
from loraserve import faults
from loraserve.adapters.compiler import open_adapter
from loraserve.adapters.composition import merged
from loraserve.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterTooLarge,
    AdapterUnavailable,
    AdapterUnservable,
    BlobCorrupt,
    BlobNotFound,
    StorageError,
)
from loraserve.memory.devices.base import DTYPE_NAMES, AdapterDevice, refuse_out_of_range
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.memory.loading.base_weights import BaseWeights, background_compute, dora_delta
from loraserve.memory.loading.composition import Composer
from loraserve.memory.loading.lowering import LoweredAdapter, lower, require_base_weights
from loraserve.memory.loading.precision import EXACT, Precision, loss, refuse_lossy, round_to_held, truncate
from loraserve.types import AdapterRef, BaseSpec, MemoryFile
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora.layout import LoraModule
from loraserve_kernels.errors import TensorMismatch

Take = Callable[[int], object]


def load_adapter(
    store: BlobStore,
    ref: AdapterRef,
    base: BaseSpec,
    device: AdapterDevice,
    base_weights: BaseWeights | None = None,
    precision: Precision = EXACT,
    take: Take = lambda num_bytes: None,
) -> LoadedAdapter:
    """Read the adapter, verify its digests, compile it for `base` and pack it for `device`.

    Apart from the file's bytes and the packed tensors it takes memory for a copy of each part of a
    composition, of what `precision` cuts, and for a few float32 copies of one module.

    Args:
        ref: an adapter, or a composition, each of whose parts is read.
        base_weights: the resident base's; adapters of LoRA alone load without them.
        precision: loss that the adapter may have.
        take: called before memory is taken, with its bytes: of each file, of what it unfolds to, of
            a sum's matrices and of the packed tensors. What it raises ends the load.

    Raises:
        AdapterCorrupt: a blob is gone, or its bytes no longer hash to its digest.
        AdapterTooLarge: it needs more bytes, tiles or slots than the device has.
        AdapterUnservable: it doesn't fit this base or device, was trained on another embedding, or
            loses too much.
        AdapterUnavailable: the store can't be read.
        InvalidRequest: the parts of a composition don't add up.

    Messages name neither tenant nor adapter: the same weights may belong to several tenants, and
    each may see the message.
    """
    started_s = time.perf_counter()
    read = _compose if ref.parts else _read
    uploaded = read(store, ref, base, base_weights, take)
    dtype = device.held_dtype(uploaded.stored)
    with threads.alone(), torch.inference_mode():
        modules: Sequence[LoraModule] = uploaded.modules
        if precision.rank_error is not None:
            modules = [truncate(m, precision.rank_error) for m in modules]
    try:
        footprint = device.footprint(modules, uploaded.stored, uploaded.norms, uploaded.head, uploaded.extra_rows)
        if not footprint.fits(device.limits):
            raise AdapterTooLarge(
                f"This adapter version needs {footprint.excess(device.limits)}.",
                hint="Start the server with a larger memory budget, or a smaller --max-model-len.",
            )
        with threads.alone():
            refuse_out_of_range(modules, uploaded.stored, dtype)
        take(footprint.num_bytes)
        modules, lost = _as_served(uploaded, modules, dtype, base_weights, precision)
        host = device.pack(modules, uploaded.stored, uploaded.norms, uploaded.head, uploaded.extra_rows)
    except TensorMismatch as error:
        raise AdapterUnservable(
            f"This adapter version can't be served on this device: {error}",
            hint="Train it with other settings and push it again.",
        ) from error
    read_s = time.perf_counter() - started_s
    num_extra_rows = 0 if uploaded.extra_rows is None else uploaded.extra_rows.num_rows
    metadata = AdapterMetadata(
        uploaded.invocation_token_ids, lost, DTYPE_NAMES[dtype], host.head, num_extra_rows, read_s
    )
    return LoadedAdapter(host, metadata)


def read_blobs(store: BlobStore, ref: AdapterRef) -> tuple[memoryview, memoryview]:
    """Read the config and the weights of one adapter, each verified against its digest.

    Raises:
        AdapterCorrupt: one is gone, or damaged; the error says which.
        AdapterUnavailable: the store can't be read, or an ephemeral version's memory is gone.
    """
    blob = ref.config_blob
    try:
        faults.hit("pager.load")
        if ref.memory is not None:
            return _read_memory(ref, ref.memory)
        config = store.read(blob)
        blob = ref.weights_blob
        return config, store.read(blob)
    except (BlobCorrupt, BlobNotFound) as error:
        raise AdapterCorrupt(
            "The stored bytes of this adapter version are damaged or missing.",
            digest=ref.digest,
            blob=blob,
            hint="Push the adapter again.",
        ) from error
    except (StorageError, OSError) as error:
        raise AdapterUnavailable(
            "The stored bytes of this adapter version can't be read now.", hint="Try again."
        ) from error


def _read_memory(ref: AdapterRef, memory: MemoryFile) -> tuple[memoryview, memoryview]:
    """Read the config and the weights of an ephemeral version.

    Raises:
        AdapterUnavailable: they are gone. That isn't `AdapterCorrupt`: the store may have the same
            bytes, and they are sound.
    """
    try:
        return read_memory(memory, ref.config_blob, ref.weights_blob)
    except StorageError as error:
        raise AdapterUnavailable(
            "The memory of this ephemeral version was freed.", hint="Load the adapter again."
        ) from error


def _read(
    store: BlobStore, ref: AdapterRef, base: BaseSpec, base_weights: BaseWeights | None, take: Take
) -> LoweredAdapter:
    """Read, verify, compile and lower one adapter."""
    config, weights = read_blobs(store, ref)
    # those of an ephemeral version are in memory that it has anyway
    take(0 if ref.memory is not None else len(weights))
    try:
        ir = open_adapter(config, weights, base, reserve=take)
    except AdapterRejected as error:
        raise AdapterUnservable(
            f"This adapter version can't be served on this base: {error.problems[0]}",
            hint="Train it on this base and push it again.",
        ) from error
    return lower(ir, base, base_weights)


def _compose(
    store: BlobStore, ref: AdapterRef, base: BaseSpec, base_weights: BaseWeights | None, take: Take
) -> LoweredAdapter:
    composer = Composer()
    for part in merged(ref.parts):
        composer.add(part, _read(store, part.adapter, base, base_weights, take))
    take(composer.num_bytes)
    with threads.alone(), torch.inference_mode():
        return composer.compose()


def _as_served(
    uploaded: LoweredAdapter,
    modules: Sequence[LoraModule],
    dtype: torch.dtype,
    weights: BaseWeights | None,
    precision: Precision,
) -> tuple[list[LoraModule], float]:
    """Replace magnitudes by δ and round modules as they are held; add the largest loss of any.

    Raises:
        AdapterUnservable: a module loses more than it may.
    """
    served, lost = [], 0.0
    for before, m in zip(uploaded.modules, modules, strict=True):
        with threads.alone(), torch.inference_mode():
            held = round_to_held(m, dtype)
            loses = loss(before, held, dtype)
        refuse_lossy(m, loses, dtype, precision)
        lost = max(lost, loses)
        magnitude = uploaded.magnitudes.get(m.place)
        if magnitude is None:
            served.append(m)
            continue
        with background_compute(require_base_weights(weights).device):
            served.append(replace(m, dora_delta=dora_delta(held, magnitude, require_base_weights(weights))))
    return served, lost
