"""Lower an adapter's IR (`adapters.ir`) to what kernels compute (`LoraModule`, `ReplacedNorm`).

It runs on a loader's thread.

An IR states what stands in the place of what is the base's; kernels add to what the base computes
anyway. So a bias becomes its difference from the base's, IA3's factor the part of the output that
it adds, and of a weight that training saved whole only the rows are kept that are no longer the
base's: an embedding of which few tokens were trained costs few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loraserve.adapters.ir import OUTSIDE_LAYERS, AdapterIR, ModuleIR, TensorView
from loraserve.errors import InvariantViolation
from loraserve.memory.loading.base_weights import BaseWeights, background_compute, changed_rows, is_base_copy
from loraserve.types import BaseSpec
from loraserve_kernels.cpu.lora.layout import ExtraRows, LoraModule, ReplacedNorm, ReplacedRows

FILE_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Names of the dtypes that adapters are stored in, with torch's dtypes."""

_QUANTIZED_TOLERANCE = 0.25
"""Distance that rounding to four bits may move a row of a head by, relative to its length."""


@dataclass(frozen=True, slots=True, eq=False)
class LoweredAdapter:
    """An adapter in the kernels' terms, except for DoRA.

    Attributes:
        modules: modules, with a magnitude in the place of `dora_delta` where there is one, for
            the room that it takes.
        stored: narrowest dtype that holds its matrices and rows exactly.
        magnitudes: (layer, module, expert) → [out_features], from which `base_weights.dora_delta`
            computes δ: last, because it costs most and depends on how the update is held; see
            `loading.precision`.
        invocation_token_ids: tokens that activate an aLoRA.
        head: classification head, [num_labels, hidden_size].
        extra_rows: rows of embedding and head beyond the base's.
    """

    modules: tuple[LoraModule, ...]
    norms: tuple[ReplacedNorm, ...]
    stored: torch.dtype
    magnitudes: Mapping[tuple[int, str, int], Tensor]
    invocation_token_ids: tuple[int, ...] = ()
    head: Tensor | None = None
    extra_rows: ExtraRows | None = None


def lower(ir: AdapterIR, base: BaseSpec, weights: BaseWeights | None) -> LoweredAdapter:
    """Translate the adapter into the kernels' terms.

    Its matrices share memory with the file's bytes wherever these are aligned.

    What the file has of the base along with LoRA on the head or the embedding stands in the base's
    place, as in PEFT: of the base's own, that is nothing.

    Args:
        weights: the resident base's; an adapter of LoRA alone needs none, with magnitudes or
            without.

    Raises:
        InvariantViolation: it needs the base's weights, and there are none.
    """
    with background_compute(require_base_weights(weights).device if _takes_base(ir) else torch.device("cpu")):
        if ir.saved_base:
            ir = with_saved_base(ir, base, require_base_weights(weights))
        stored = FILE_DTYPES[ir.dtype]
        shapes = base.module_shapes
        modules = [_lower(m, shapes[m.module], stored, weights) for m in ir.modules]
        magnitudes = {
            m.place: lowered.dora_delta
            for m, lowered in zip(ir.modules, modules, strict=True)
            if m.magnitude is not None and lowered.dora_delta is not None
        }
        # a weight that was saved as the base has it changes nothing
        changing = tuple(
            m
            for m in modules
            if m.lora_a.shape[0] or (m.dora_delta, m.bias_delta, m.row_overrides) != (None, None, None)
        )
        norms = tuple(ReplacedNorm(n.layer, n.norm, as_tensor(n.weight).float() + base.norm_offset) for n in ir.norms)
    head = None if ir.head is None else as_tensor(ir.head)
    own = ir.extra_rows
    # copies: the file's bytes are given back
    extra_rows = None if own is None else ExtraRows(as_tensor(own.embedding).clone(), as_tensor(own.head).clone())
    return LoweredAdapter(changing, norms, stored, magnitudes, ir.invocation_token_ids, head, extra_rows)


def with_saved_base(ir: AdapterIR, base: BaseSpec, weights: BaseWeights) -> AdapterIR:
    """Turn what the adapter's file has of the base into weights of its modules.

    PEFT loads it in the base's place. What is this base's own is left out.

    Of a base whose head is tied to its embedding, PEFT loads it into both, but for one that the
    adapter has a weight of its own for. Of a head that was quantized, a copy that is near to it is
    one of what it was before, and left out: the base is served as it is.
    """
    tables = dict(ir.saved_base)
    if base.is_head_tied and tables:
        [first, *_] = tables.values()
        tables |= {module: tables.get(module, first) for module in OUTSIDE_LAYERS if module in base.modules}
    modules = {m.place: m for m in ir.modules}
    dtype, held = ir.dtype, getattr(torch, base.dtype, torch.float32)
    for module, saved in tables.items():
        m = modules.get((0, module, 0), ModuleIR(0, module))
        is_rounded = module == "lm_head" and base.is_head_quantized
        tolerance = _QUANTIZED_TOLERANCE if is_rounded else None
        if m.weight is None and not is_base_copy(module, as_tensor(saved), weights, held, tolerance):
            modules[0, module, 0] = replace(m, weight=saved)
            dtype = dtype if dtype == saved.dtype else "F32"
    order = {module: index for index, module in enumerate(base.module_shapes)}
    ordered = sorted(modules.values(), key=lambda m: (m.layer, order[m.module], m.expert))
    return replace(ir, modules=tuple(ordered), dtype=dtype, saved_base={})


def require_base_weights(weights: BaseWeights | None) -> BaseWeights:
    """Check that there are base weights.

    Raises:
        InvariantViolation: there are none.
    """
    if weights is None:
        raise InvariantViolation("An adapter that needs the base's weights was loaded without them.")
    return weights


def _takes_base(ir: AdapterIR) -> bool:
    taking = ("bias", "output_scale", "weight")
    return bool(ir.saved_base) or any(m.tensors.keys() & taking for m in ir.modules)


def as_tensor(view: TensorView) -> Tensor:
    """Wrap the same memory as a torch tensor; copy it only where the file left it unaligned."""
    array = np.require(view.array, requirements="A")
    if view.dtype == "BF16":
        # torch has no bfloat16 in numpy; int16 has the same bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _lower(m: ModuleIR, shape: tuple[int, int], stored: torch.dtype, weights: BaseWeights | None) -> LoraModule:
    """Translate the module of (out_features, in_features) into the kernels' terms.

    In its IR's terms, with l for output_scale::

    l · ((magnitude / ‖…‖) · (W' x + scaling · B A x) + b' + scaling · lora_bias)
        = (1 + δ) · (W' x + scaling · B A x) + b + shift
    """
    out_features, in_features = shape
    scale = None if m.output_scale is None else as_tensor(m.output_scale).float()
    delta = None if scale is None else scale - 1
    if m.magnitude is not None:
        magnitude = as_tensor(m.magnitude).float()
        delta = magnitude if scale is None else scale * magnitude
    return LoraModule(
        m.layer,
        m.module,
        torch.empty(0, in_features, dtype=stored) if m.lora_a is None else as_tensor(m.lora_a),
        torch.empty(out_features, 0, dtype=stored) if m.lora_b is None else as_tensor(m.lora_b),
        m.scaling,
        delta,
        _shift(m, scale, weights),
        _rows(m, weights),
        m.expert,
    )


def _shift(m: ModuleIR, scale: Tensor | None, weights: BaseWeights | None) -> Tensor | None:
    added = None if m.lora_bias is None else m.scaling * as_tensor(m.lora_bias).float()
    if m.bias is None and scale is None:
        return added
    in_base = require_base_weights(weights).bias(m.layer, m.module)
    in_base = None if in_base is None else in_base.cpu()
    terms = [term for term in (in_base if m.bias is None else as_tensor(m.bias).float(), added) if term is not None]
    if not terms:
        return None
    bias = torch.stack(terms).sum(0) * (1 if scale is None else scale)
    return bias if in_base is None else bias - in_base


def _rows(m: ModuleIR, weights: BaseWeights | None) -> ReplacedRows | None:
    tokens = None
    if m.token_rows is not None:
        tokens = ReplacedRows(torch.tensor(m.token_ids, dtype=torch.int32), as_tensor(m.token_rows))
    if m.weight is None:
        return tokens
    weight = as_tensor(m.weight)
    if tokens is not None:
        # where both have a row, the trained one counts
        weight = weight.to(torch.promote_types(weight.dtype, tokens.weight.dtype), copy=True)
        weight[tokens.ids.long()] = tokens.weight.to(weight.dtype)
    changed = changed_rows(m.layer, m.module, weight, require_base_weights(weights))
    if not changed.shape[0]:
        return None
    # all of them need no copy
    return ReplacedRows(changed.int(), weight if changed.shape[0] == weight.shape[0] else weight[changed])
