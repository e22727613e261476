"""One adapter, from the store's blobs to what the kernels read. Runs on a worker thread and touches no shared state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from adapters_store import BlobStore
from loraserve import faults
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.adapters.peft_format import read_adapter
from loraserve.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterTooLarge,
    AdapterUnavailable,
    BlobCorrupt,
    BlobNotFound,
    InvariantViolation,
    StorageError,
)
from loraserve.memory.base_weights import BaseWeights, beside_steps, check_saved_base, dora_delta
from loraserve.memory.device import AdapterDevice
from loraserve.memory.facts import AdapterFacts, Loaded
from loraserve.types import AdapterRef, BaseSpec
from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.layout import LoraModule

_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_QUANTIZED_TOLERANCE = 0.25
"""How far a row of a head that is rounded to as few as four bits may be from what it was, relative to its length."""


def load_adapter(
    store: BlobStore, ref: AdapterRef, base: BaseSpec, device: AdapterDevice, base_weights: BaseWeights | None = None
) -> Loaded:
    """The adapter's weights, read, verified against their digests, compiled for `base` and packed as `device` wants them.

    Args:
        base_weights: the resident base's. Adapters with DoRA or with a saved embedding can't be loaded without.

    Raises:
        AdapterCorrupt: a blob is gone, or its bytes no longer hash to its digest.
        AdapterTooLarge: it needs more than the device has, of whatever.
        AdapterUnavailable: the store can't be read, the adapter fits neither this base nor what the device holds, or it was trained on another embedding.

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
    stored = _DTYPES[ir.dtype]
    modules = [
        LoraModule(
            m.layer,
            m.module,
            _as_tensor(m.lora_a),
            _as_tensor(m.lora_b),
            m.scaling,
            # of the right shape; its δ comes once it's known that the adapter fits
            None if m.magnitude is None else _as_tensor(m.magnitude),
        )
        for m in ir.modules
        if m.lora_a is not None and m.lora_b is not None
    ]
    try:
        footprint = device.footprint(modules, stored)
        if not footprint.fits(device.limits):
            raise AdapterTooLarge(
                f"This adapter version takes {footprint.excess(device.limits)}.",
                hint="Start the server with a larger memory budget or adapter share.",
            )
        host = device.pack(_compared_with_base(modules, ir, base, base_weights), stored)
        return Loaded(host, AdapterFacts(ir.invocation_token_ids))
    except ShapeMismatch as error:
        raise AdapterUnavailable(
            f"This adapter version can't be served on this device: {error}", hint="Push it again with other settings."
        ) from error


def _compared_with_base(
    modules: Sequence[LoraModule], ir: AdapterIR, base: BaseSpec, weights: BaseWeights | None
) -> Sequence[LoraModule]:
    """The modules with δ in the place of magnitudes, once the weights that the file holds of the base are found to be the base's."""
    if not ir.saved_base and all(m.delta is None for m in modules):
        return modules
    if weights is None:
        raise InvariantViolation("An adapter whose load takes the base's weights was loaded without them.")
    with beside_steps(weights.device):
        for module, saved in ir.saved_base.items():
            is_rounded = module == "lm_head" and base.quantization != "none"
            check_saved_base(module, _as_tensor(saved), weights, _QUANTIZED_TOLERANCE if is_rounded else None)
        return [m if m.delta is None else replace(m, delta=dora_delta(m, m.delta, weights)) for m in modules]


def _as_tensor(view: TensorView) -> torch.Tensor:
    """The same memory as a torch tensor; a copy only where the file left it unaligned."""
    array = np.require(view.array, requirements="A")
    if view.dtype == "BF16":
        # torch has no bfloat16 in numpy; int16 has the same bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
