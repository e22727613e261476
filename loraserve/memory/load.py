"""One adapter, from the store's blobs to what the kernels read. Runs on a worker thread and touches no shared state."""

from __future__ import annotations

import numpy as np
import torch

from adapters_store import BlobStore
from loraserve import faults
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.ir import TensorView
from loraserve.adapters.peft_format import read_adapter
from loraserve.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterTooLarge,
    AdapterUnavailable,
    BlobCorrupt,
    BlobNotFound,
    StorageError,
)
from loraserve.types import AdapterRef, BaseSpec
from loraserve_kernels.layout import LoraModule, PackedAdapter, pack_adapter, packed_num_bytes

_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_adapter(
    store: BlobStore, ref: AdapterRef, base: BaseSpec, dtype: torch.dtype | None, max_bytes: int
) -> PackedAdapter:
    """The adapter's weights, read, verified against their digests, compiled for `base` and packed.

    Args:
        dtype: what to pack in; None: as stored.
        max_bytes: what the device can take at all.

    Raises:
        AdapterCorrupt: a blob is gone, or its bytes no longer hash to its digest.
        AdapterTooLarge: it needs more than `max_bytes`.
        AdapterUnavailable: the store can't be read, or the adapter doesn't fit this base.

    Messages name neither tenant nor adapter: the same weights may belong to several tenants, and each may see the message.
    """
    try:
        faults.hit("pager.load")
        config = store.read(ref.config_blob)
        weights = store.read(ref.weights_blob)
    except (BlobCorrupt, BlobNotFound) as error:
        raise AdapterCorrupt(
            "The stored bytes of this adapter version are damaged or gone.", hint="Push the adapter again."
        ) from error
    except (StorageError, OSError) as error:
        raise AdapterUnavailable(
            "The stored bytes of this adapter version can't be read now.", hint="Try again."
        ) from error
    try:
        adapter = read_adapter(config, weights)
        ir = compile_adapter(adapter.config, adapter.tensors, base)
    except AdapterRejected as error:
        raise AdapterUnavailable(
            f"This adapter version can't be served on this base: {error.problems[0]}",
            hint="Push it again for this base.",
        ) from error
    packed_dtype = dtype if dtype is not None else _DTYPES[ir.dtype]
    num_bytes = packed_num_bytes(
        ((m.layer, m.module, m.rank) for m in ir.modules),
        num_layers=base.num_layers,
        module_shapes=base.modules,
        dtype=packed_dtype,
    )
    if num_bytes > max_bytes:
        raise AdapterTooLarge(
            f"This adapter version takes {num_bytes:,} bytes; the memory for adapters has {max_bytes:,}.",
            hint="Start the server with a larger memory budget or adapter share.",
        )
    modules = [LoraModule(m.layer, m.module, _as_tensor(m.lora_a), _as_tensor(m.lora_b), m.scaling) for m in ir.modules]
    return pack_adapter(modules, num_layers=base.num_layers, module_shapes=base.modules, dtype=packed_dtype)


def _as_tensor(view: TensorView) -> torch.Tensor:
    """The same memory as a torch tensor; a copy only where the file left it unaligned."""
    array = np.require(view.array, requirements="A")
    if view.dtype == "BF16":
        # torch has no bfloat16 in numpy; int16 has the same bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
