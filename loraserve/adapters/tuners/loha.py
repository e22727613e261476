"""LoHa: ΔW = alpha / r · (w1_a w1_b) ⊙ (w2_a w2_b), of rank r² at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.config.peft_fields import FIELDS as LORA
from loraserve.adapters.format.tensor_names import Place
from loraserve.adapters.ir import TensorView
from loraserve.adapters.tuners.compilation import Compilation, FoldedAdapter, FoldedModule
from loraserve.adapters.tuners.factors import Factors, as_float32, hadamard, hadamard_dense
from loraserve.adapters.tuners.fields import DROPOUT, INIT, fields, ignored, implemented
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

FIELDS = fields(
    "LoHa",
    r=implemented("the rank of both factors; it must agree with the tensors"),
    alpha=implemented("scaling = alpha / r"),
    rank_pattern=LORA["rank_pattern"],
    alpha_pattern=LORA["alpha_pattern"],
    exclude_modules=LORA["exclude_modules"],
    layers_to_transform=LORA["layers_to_transform"],
    layers_pattern=LORA["layers_pattern"],
    rank_dropout=DROPOUT,
    module_dropout=DROPOUT,
    use_effective_conv2d=ignored("it is about convolutions, and no base has any"),
    init_weights=INIT,
)
"""Fields of peft.LoHaConfig (0.21); a test compares the two."""

_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def compile_loha(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> FoldedAdapter:
    """Compile the adapter into the base's terms; its factors are float32.

    The rank is r², or the smaller side of a module where that is less.

    Raises:
        AdapterRejected: as `compile_adapter`; also AdapterUnsupported with the rank or the bytes
            that it would take.
    """
    work = Compilation("LOHA", FIELDS, _PARTS, config, tensors, base, limits)
    return work.finish_folded([_compile(work, place) for place in work.places])


def _compile(work: Compilation, place: Place) -> FoldedModule | None:
    if not work.has_all(place, _PARTS):
        return None
    linear, r = work.linear(place), work.rank(place)
    out_features, in_features = linear.out_features, linear.in_features
    # look at all tensors, so that all problems are reported together
    has_ranks = [work.has_rank(place, part, axis) for part, axis in zip(_PARTS, (1, 0, 1, 0), strict=True)]
    if not all(has_ranks):
        return None
    shapes = ((out_features, r), (r, in_features)) * 2
    has_shapes = [work.has_shape(place, part, shape, f"r = {r}") for part, shape in zip(_PARTS, shapes, strict=True)]
    scaling = work.scaling(place)
    rank = min(r * r, out_features, in_features)
    if not all(has_shapes) or not work.has_room(place, rank, f"r² for r = {r}"):
        return None

    def make() -> Factors:
        w1_a, w1_b, w2_a, w2_b = (as_float32(work.places[place][part]) for part in _PARTS)
        product = hadamard if rank == r * r else hadamard_dense
        return product((w1_a, w1_b), (w2_a, w2_b))

    return FoldedModule(place, scaling, make)
