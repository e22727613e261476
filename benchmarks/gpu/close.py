"""Comparisons of what a kernel made with what float64 says, as rows of a check's table."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from benchmarks.gpu.parts import Row

IN_ANOTHER_ORDER = 6
"""Epsilons of the dtype that a model's sums may differ by, added in another order."""


def against_float64(name: str, result: Tensor, expected: Tensor, *, factor: float = 1.0, note: str = "") -> Row:
    """The largest difference, by the largest number of what was expected; it may be `factor` times
    the result's dtype's epsilon (twice the rounding of one number).

    NaN or infinity anywhere in the result fails, save where it was expected.
    """
    expected = expected.double()
    is_number = expected.isfinite()
    size = expected[is_number].abs().max().clamp_min(1e-30) if bool(is_number.any()) else expected.new_ones(())
    difference = (result.double() - expected).abs()[is_number]
    error = float(difference.nan_to_num(nan=float("inf")).max() / size) if difference.numel() else 0.0
    bound = factor * float(torch.finfo(result.dtype).eps)
    is_ok = error <= bound and torch.equal(result.isfinite(), is_number)
    return {"check": name, "error": error, "bound": bound, "ok": is_ok, "note": note}


def same_bits(
    name: str, result: Tensor, expected: Tensor, *, note: str = "", products_in: torch.dtype | None = None
) -> Row:
    """Every bit is the same, NaN's too.

    Args:
        products_in: the dtype of products whose rows are computed among others in the two. Triton's
            interpreter has NumPy multiply, whose library may add in another order for another
            number of rows; there, and there alone, a bound holds that the row then states.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return {
            "check": name,
            "ok": False,
            "note": f"{result.dtype} {tuple(result.shape)} beside {tuple(expected.shape)}",
        }
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}[result.element_size()]
    differing = int((result.contiguous().view(bits) != expected.contiguous().view(bits)).sum()) if result.numel() else 0
    if differing and products_in is not None and os.environ.get("TRITON_INTERPRET") == "1":
        factor = IN_ANOTHER_ORDER * float(torch.finfo(products_in).eps) / float(torch.finfo(result.dtype).eps)
        bound = "within a bound: this CPU's products in the interpreter depend on the number of rows"
        return against_float64(name, result, expected, factor=factor, note=f"{note}; {bound}")
    return {
        "check": name,
        "ok": differing == 0,
        "note": note if not differing else f"{differing} of {result.numel()} numbers differ",
    }


def holds(name: str, is_ok: bool, note: str = "") -> Row:
    return {"check": name, "ok": is_ok, "note": note}


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "int8"}[dtype]
