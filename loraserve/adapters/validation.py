"""Checks on an adapter's numbers, made once at upload: all finite, and no update so large that half precision can't hold it."""

from __future__ import annotations

import math

import numpy as np

from loraserve.adapters.ir import OUTSIDE_LAYERS, AdapterIR, ModuleIR, TensorView
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

_SAVED_AS = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}
"""Where PEFT's files have another name for a tensor of `ModuleIR`."""


def check_finite(adapter: AdapterIR, limits: Limits = LIMITS) -> None:
    """Return if every weight is finite and no element of any ``scaling · B A`` can pass `limits.max_delta`.

    The second is judged by the bound ``|scaling| · rank · max|A| · max|B|``, without making the product.

    Raises:
        AdapterNotFinite: with the module, the layer and the place of the first offending weight of each tensor.
    """
    problems: list[str] = []
    for m in adapter.modules:
        largest = {name: _largest(tensor) for name, tensor in m.tensors.items()}
        for name, tensor in m.tensors.items():
            if not math.isfinite(largest[name]):
                problems.append(_where(m, _SAVED_AS.get(name, name), tensor))
        bound = abs(m.scaling) * m.rank * largest.get("lora_a", 0.0) * largest.get("lora_b", 0.0)
        if math.isfinite(bound) and bound > limits.max_delta:
            problems.append(f"The update of {_name(m)} may reach {bound:.3g}; at most {limits.max_delta:g} is taken.")
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + ([f"… and {more} more."] if more > 0 else [])
        raise AdapterNotFinite(
            f"The adapter's weights can't be served: {problems[0]}", problems=shown, hint="Did its training diverge?"
        )


def _largest(tensor: TensorView) -> float:
    """The largest magnitude; infinite if some weight isn't finite. One pass over the bits, a chunk at a time."""
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


def _where(m: ModuleIR, side: str, tensor: TensorView) -> str:
    integer, mask, limit = _BITS[tensor.dtype]
    bad = np.flatnonzero((tensor.array.reshape(-1).view(integer) & mask) >= limit)
    place = ", ".join(str(int(i)) for i in np.unravel_index(int(bad[0]), tensor.shape))
    of = f"{bad.size:,} of {tensor.array.size:,} weights"
    return f"{_name(m, f'.{side}')} has {of} that are NaN or infinite, the first at [{place}]."


def _name(m: ModuleIR, tensor: str = "") -> str:
    return f"{m.module}{tensor}" + ("" if m.module in OUTSIDE_LAYERS else f" in layer {m.layer}")
