"""LoKr: ΔW = alpha / r · w1 ⊗ w2, where either may itself be a product of rank r."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.config.peft_fields import FIELDS as LORA
from loraserve.adapters.format.tensor_names import Place
from loraserve.adapters.ir import TensorView
from loraserve.adapters.tuners.compilation import Compilation, FoldedAdapter, FoldedModule
from loraserve.adapters.tuners.factors import Factors, as_float32, kronecker, split
from loraserve.adapters.tuners.fields import DROPOUT, INIT, fields, ignored, implemented
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

FIELDS = fields(
    "LoKr",
    r=implemented("scaling = alpha / r, and the rank of what is a product; it must agree with the tensors"),
    alpha=implemented("scaling = alpha / r"),
    rank_pattern=LORA["rank_pattern"],
    alpha_pattern=LORA["alpha_pattern"],
    decompose_both=implemented("whether w1 may be a product too; it must agree with the tensors"),
    decompose_factor=implemented(
        "how the sides of a module are split between w1 and w2; it must agree with the tensors"
    ),
    exclude_modules=LORA["exclude_modules"],
    layers_to_transform=LORA["layers_to_transform"],
    layers_pattern=LORA["layers_pattern"],
    rank_dropout=DROPOUT,
    rank_dropout_scale=DROPOUT,
    module_dropout=DROPOUT,
    use_effective_conv2d=ignored("it is about convolutions, and no base has any"),
    init_weights=INIT,
)
"""Fields of peft.LoKrConfig (0.21); a test compares the two."""

_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def compile_lokr(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> FoldedAdapter:
    """Compile the adapter into the base's terms; its factors are float32.

    The rank is the product of those of w1 and w2, where that of either is r or its smaller side,
    whichever is less.

    Raises:
        AdapterRejected: as `compile_adapter`; also AdapterUnsupported with the rank or the bytes
            that it would take.
    """
    work = Compilation("LOKR", FIELDS, _PARTS, config, tensors, base, limits)
    factor = _factor(work)
    return work.finish_folded([_compile(work, place, factor) for place in work.places])


def factorization(size: int, factor: int) -> tuple[int, int]:
    """Split a side of a module between w1 and w2 as PEFT does.

    It is two numbers whose product is `size`, the first not over `factor` (-1: as near to each
    other as they can be).
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = size if factor == -1 else factor
    first, second = 1, size
    for divisor in range(2, size + 1):
        if first >= second or divisor > limit:
            break
        if size % divisor == 0:
            first, second = divisor, size // divisor
    return min(first, second), max(first, second)


def _factor(work: Compilation) -> int:
    factor = work.config.get("decompose_factor", -1)
    if type(factor) is not int:
        work.malformed("decompose_factor isn't a whole number.")
        return -1
    if not isinstance(work.config.get("decompose_both", False), bool):
        work.malformed("decompose_both isn't true or false.")
    return factor


def _compile(work: Compilation, place: Place, factor: int) -> FoldedModule | None:
    linear, r = work.linear(place), work.rank(place)
    out_features, in_features = linear.out_features, linear.in_features
    (out_1, out_2), (in_1, in_2) = factorization(out_features, factor), factorization(in_features, factor)
    is_whole_1 = not (work.config.get("decompose_both") is True and r < max(out_1, in_1) / 2)
    is_whole_2 = not r < max(out_2, in_2) / 2
    fits_1 = _fits(work, place, "lokr_w1", (out_1, in_1), is_whole_1)
    fits_2 = _fits(work, place, "lokr_w2", (out_2, in_2), is_whole_2)
    scaling = work.scaling(place)
    rank_1 = min(out_1, in_1) if is_whole_1 else min(r, out_1, in_1)
    rank_2 = min(out_2, in_2) if is_whole_2 else min(r, out_2, in_2)
    rank = rank_1 * rank_2
    if not (fits_1 and fits_2) or not work.has_room(place, rank, f"{rank_1} of w1 times {rank_2} of w2"):
        return None

    def make() -> Factors:
        return kronecker(_factors(work, place, "lokr_w1", rank_1), _factors(work, place, "lokr_w2", rank_2))

    return FoldedModule(place, scaling, make)


def _fits(work: Compilation, place: Place, name: str, shape: tuple[int, int], is_whole: bool) -> bool:
    """Check whether the module has just the tensors that PEFT makes of it for w1, or w2.

    PEFT makes them of its sides, r and the config.
    """
    parts, r = work.places[place], work.rank(place)
    if work.settings is None:
        return False
    expected = (name,) if is_whole else (f"{name}_a", f"{name}_b")
    others = [part for part in (name, f"{name}_a", f"{name}_b") if part in parts and part not in expected]
    if others:
        work.malformed(
            f"{place[1]} has {', '.join(others)} {{layers}}; with r = {r} and the config's decompose_both "
            "and decompose_factor "
            f"it has {' and '.join(expected)} on this base.",
            place,
        )
    if not work.has_all(place, expected):
        return False
    because = f"r = {r}, decompose_factor = {work.config.get('decompose_factor', -1)}"
    if is_whole:
        return work.has_shape(place, name, shape, because) and not others
    fits = [
        work.has_shape(place, f"{name}_a", (shape[0], r), because),
        work.has_shape(place, f"{name}_b", (r, shape[1]), because),
    ]
    return all(fits) and not others


def _factors(work: Compilation, place: Place, name: str, rank: int) -> Factors:
    parts = work.places[place]
    if name in parts:
        return split(as_float32(parts[name]))
    a, b = as_float32(parts[f"{name}_a"]), as_float32(parts[f"{name}_b"])
    return (a, b) if a.shape[1] == rank else split(a @ b)
