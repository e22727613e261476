"""Checks on an adapter's numbers, made once at upload.

All are finite, and no update is so large that half precision can't hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from loraserve.adapters.ir import OUTSIDE_LAYERS, SCORE, AdapterIR, ModuleIR, NormIR, TensorView
from loraserve.errors import AdapterNotFinite
from loraserve.limits import LIMITS, Limits

_MAX_PROBLEMS = 32

# dtype → (unsigned integer of its size, all bits but the sign, smallest pattern that isn't finite)
_BITS: dict[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
}
_CHUNK = 1 << 18

_SAVED_AS = {
    "lora_a": "lora_A",
    "lora_b": "lora_B",
    "lora_bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector",
    "output_scale": "ia3_l",
    "token_rows": "token_adapter.trainable_tokens_delta",
}
"""Names in PEFT's files of tensors that `ModuleIR` calls otherwise."""

_EMBEDDINGS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_WHOLE = ("bias", "output_scale", "weight", "token_rows")
"""Tensors that replace or multiply something of the base's: half precision must hold each of their
numbers.
"""


def check_finite(
    adapter: AdapterIR,
    limits: Limits = LIMITS,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    pause: Callable[[], object] = lambda: None,
) -> None:
    """Raise an error unless every weight is finite and small enough.

    No element of any ``scaling · B A`` or ``scaling · lora_bias`` can pass `limits.max_delta`, and
    none of what stands in the base's place does. The first is judged by the bound
    ``|scaling| · rank · max|A| · max|B|``, without making the product.

    Args:
        names: names of modules that messages call otherwise.
        pause: called between modules.

    Raises:
        AdapterNotFinite: with the module, the layer and the place of the first offending weight of
            each tensor.
    """
    problems: list[str] = []
    for m in adapter.modules:
        label = names.get(m.module, m.label)
        largest = {name: _largest(tensor) for name, tensor in m.tensors.items()}
        for name, tensor in m.tensors.items():
            if not math.isfinite(largest[name]):
                problems.append(_where(_name(m, label, name), tensor))
            elif name in _WHOLE and largest[name] > limits.max_delta:
                problems.append(_too_large(_name(m, label, name), largest[name], limits))
        bound = abs(m.scaling) * m.rank * largest.get("lora_a", 0.0) * largest.get("lora_b", 0.0)
        if math.isfinite(bound) and bound > limits.max_delta:
            problems.append(
                f"The update of {_name(m, label)} may reach {bound:.3g}; at most {limits.max_delta:g} is allowed."
            )
        shift = abs(m.scaling) * largest.get("lora_bias", 0.0)
        if math.isfinite(shift) and shift > limits.max_delta:
            problems.append(_too_large(_name(m, label, "lora_bias"), shift, limits))
        pause()
    others = [(_norm_name(norm), norm.weight) for norm in adapter.norms]
    if adapter.head is not None:
        others.append((f"{SCORE}.weight", adapter.head))
    if adapter.extra_rows is not None:
        others.append(("The embedding's rows beyond the base's", adapter.extra_rows.embedding))
        others.append(("The head's rows beyond the base's", adapter.extra_rows.head))
    for name, weight in others:
        greatest = _largest(weight)
        if not math.isfinite(greatest):
            problems.append(_where(name, weight))
        elif greatest > limits.max_delta:
            problems.append(_too_large(name, greatest, limits))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + ([f"… and {more} more."] if more > 0 else [])
        raise AdapterNotFinite(
            f"The adapter's weights can't be served: {problems[0]}",
            problems=shown,
            hint="Check whether its training diverged.",
        )


def _largest(tensor: TensorView) -> float:
    """Find the largest magnitude; infinite if some weight isn't finite.

    One pass over the bits, a chunk at a time.
    """
    integer, mask, limit = _BITS[tensor.dtype]
    bits = tensor.array.reshape(-1).view(integer)
    largest = 0
    for start in range(0, bits.size, _CHUNK):
        # magnitudes of one dtype are ordered as their bits are
        largest = max(largest, int((bits[start : start + _CHUNK] & mask).max()))
    if largest >= limit:
        return math.inf
    return _as_float(largest, tensor.dtype)


def _as_float(bits: int, dtype: str) -> float:
    if dtype == "F16":
        return float(np.array(bits, dtype=np.uint16).view(np.float16))
    return float(np.array(bits << 16 if dtype == "BF16" else bits, dtype=np.uint32).view(np.float32))


def _where(name: str, tensor: TensorView) -> str:
    integer, mask, limit = _BITS[tensor.dtype]
    bad = np.flatnonzero((tensor.array.reshape(-1).view(integer) & mask) >= limit)
    place = ", ".join(str(int(i)) for i in np.unravel_index(int(bad[0]), tensor.shape))
    of = f"{bad.size:,} of {tensor.array.size:,} weights"
    return f"{name} has {of} that are NaN or infinite, the first at [{place}]."


def _too_large(name: str, largest: float, limits: Limits) -> str:
    return f"{name} reaches {largest:.3g}; at most {limits.max_delta:g} is allowed."


def _name(m: ModuleIR, label: str, tensor: str = "") -> str:
    saved_as = _SAVED_AS.get(tensor, tensor)
    if m.module == "embed_tokens":
        saved_as = _EMBEDDINGS.get(tensor, saved_as)
    name = f"{label}.{saved_as}" if tensor else label
    return name + ("" if m.module in OUTSIDE_LAYERS else f" in layer {m.layer}")


def _norm_name(norm: NormIR) -> str:
    return f"The weight of {norm.norm}" + ("" if norm.norm == "norm" else f" in layer {norm.layer}")
