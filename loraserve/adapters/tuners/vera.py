"""VeRA: ΔW = diag(b) B · diag(d) A, with one B and A for all modules.

Each module takes as many of their rows and columns as it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loraserve.adapters.config.peft_fields import FIELDS as LORA
from loraserve.adapters.format.tensor_names import Place
from loraserve.adapters.ir import TensorView
from loraserve.adapters.tuners.compilation import Compilation, FoldedAdapter, FoldedModule
from loraserve.adapters.tuners.factors import Factors, Matrix, as_float32, split
from loraserve.adapters.tuners.fields import DROPOUT, INIT, TRANSPOSED, fields, ignored, implemented
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

FIELDS = fields(
    "VeRA",
    r=implemented("the rank of vera_A and vera_B; it must agree with the tensors"),
    save_projection=implemented("vera_A and vera_B must be in the file; without them the adapter is refused"),
    projection_prng_key=ignored("vera_A and vera_B are read from the file"),
    layers_to_transform=LORA["layers_to_transform"],
    layers_pattern=LORA["layers_pattern"],
    fan_in_fan_out=TRANSPOSED,
    bias=LORA["bias"],
    vera_dropout=DROPOUT,
    d_initial=INIT,
    init_weights=INIT,
)
"""Fields of peft.VeraConfig (0.21); a test compares the two."""

_PARTS = ("vera_lambda_b", "vera_lambda_d")
_A, _B = "base_model.vera_A", "base_model.vera_B"


def compile_vera(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> FoldedAdapter:
    """Compile the adapter into the base's terms, each module with factors of its own.

    The factors are float32. The rank is r, or the smaller side of a module where that
    is less.

    Raises:
        AdapterRejected: as `compile_adapter`; also AdapterUnsupported where the file lacks vera_A
            and vera_B, or with the bytes that the factors would take.
    """
    work = Compilation("VERA", FIELDS, _PARTS, config, tensors, base, limits, alpha=None, shared=(_A, _B))
    projections = _projections(work)
    return work.finish_folded([_compile(work, place, projections) for place in work.places])


def _projections(work: Compilation) -> tuple[Matrix, Matrix] | None:
    """Read vera_A and vera_B, of the sizes that PEFT gives them on this base.

    Return None and add a problem if they aren't there.
    """
    is_saved = work.config.get("save_projection", True)
    missing = [name for name in (_A, _B) if name not in work.shared]
    if is_saved is not True or missing:
        said = (
            f"save_projection is {str(is_saved).lower()}"
            if is_saved is not True
            else f"the file has no {' and '.join(missing)}"
        )
        work.unsupported(
            f"{said}: PEFT would then draw vera_A and vera_B from projection_prng_key again, "
            "and its generator's numbers depend on the "
            "machine. Save the adapter with save_projection=True."
        )
        return None
    if not work.places or work.settings is None:
        return None
    a, b = work.shared[_A], work.shared[_B]
    linears = [work.linear(place) for place in work.places]
    largest_in, largest_out = max(x.in_features for x in linears), max(x.out_features for x in linears)
    expected = ((work.settings.r, largest_in), (largest_out, work.settings.r))
    if (a.shape, b.shape) != expected:
        found = " and ".join("×".join(map(str, shape)) for shape in (a.shape, b.shape))
        meant = " and ".join("×".join(map(str, shape)) for shape in expected)
        work.mismatch(
            f"vera_A and vera_B are {found}; for r = {work.settings.r} and this base's modules, expected {meant}."
        )
        return None
    return as_float32(a), as_float32(b)


def _compile(work: Compilation, place: Place, projections: tuple[Matrix, Matrix] | None) -> FoldedModule | None:
    linear, r = work.linear(place), work.rank(place)
    out_features, in_features = linear.out_features, linear.in_features
    if not work.has_all(place, _PARTS) or work.settings is None:
        return None
    fits = [
        work.has_shape(place, "vera_lambda_b", (out_features,), "its output size"),
        work.has_shape(place, "vera_lambda_d", (r,), f"r = {r}"),
    ]
    rank = min(r, out_features, in_features)
    if not all(fits) or not work.has_room(place, rank, f"r = {r}") or projections is None:
        return None

    def make() -> Factors:
        lambda_b, lambda_d = (as_float32(work.places[place][part]) for part in _PARTS)
        with np.errstate(over="ignore", invalid="ignore"):
            a = lambda_d[:, None] * projections[0][:, :in_features]
            b = lambda_b[:, None] * projections[1][:out_features]
            return split(b @ a) if rank < r else (b, a)

    return FoldedModule(place, 1.0, make)
