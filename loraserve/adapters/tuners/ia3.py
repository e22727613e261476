"""IA3: what a module gives is multiplied with a learned vector.

What the feed-forward's last linear takes is multiplied too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.config.peft_fields import FIELDS as LORA
from loraserve.adapters.format.tensor_names import Place
from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.adapters.strict_json import shown
from loraserve.adapters.tuners.compilation import Compilation
from loraserve.adapters.tuners.factors import as_float32, as_view
from loraserve.adapters.tuners.fields import INIT, TRANSPOSED, fields, implemented
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

FIELDS = fields(
    "IA3",
    exclude_modules=LORA["exclude_modules"],
    feedforward_modules=implemented(
        "modules whose input is multiplied; of these only down_proj; it must agree with the tensors"
    ),
    fan_in_fan_out=TRANSPOSED,
    init_ia3_weights=INIT,
)
"""Fields of peft.IA3Config (0.21); a test compares the two."""

_PART = "ia3_l"


def compile_ia3(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """Compile the adapter into the base's terms: modules with an `output_scale` alone.

    The input of down_proj is activation(gate) · up in every base here, so that a vector on it is
    one on the output of up_proj, where it meets the one that up_proj may have itself.

    Raises:
        AdapterRejected: as `compile_adapter`; also AdapterUnsupported for a vector on the input of
            any other module, which is no scaling of an output and of no low rank.
    """
    work = Compilation("IA3", FIELDS, (_PART,), config, tensors, base, limits, rank=None, alpha=None)
    scales: dict[Place, TensorView] = {}
    for place in work.places:
        for target, vector in _targets(work, place).items():
            other = scales.get(target)
            scales[target] = vector if other is None else as_view(as_float32(other) * as_float32(vector))
    return work.finish([ModuleIR(*target, output_scale=scale) for target, scale in scales.items()])


def _targets(work: Compilation, place: Place) -> dict[Place, TensorView]:
    """Find the modules whose outputs the vector multiplies, with their parts of it.

    Add a problem where there are none.
    """
    layer, name = place
    linear, vector = work.linear(place), work.places[place][_PART]
    if vector.shape not in ((linear.out_features, 1), (1, linear.in_features)):
        found = "×".join(map(str, vector.shape))
        work.mismatch(
            f"{name}.{_PART} is {found} {{layers}}; expected {linear.out_features}×1 on this base, "
            f"or 1×{linear.in_features} for a "
            "feed-forward module.",
            place,
        )
        return {}
    is_of_input = vector.shape == (1, linear.in_features)
    meant = _is_feedforward(work, place)
    if meant is not None and meant != is_of_input:
        of = "input" if is_of_input else "output"
        work.malformed(
            f"{name}.{_PART} is a vector for the {of} {{layers}}; the config's feedforward_modules means the "
            "other side.",
            place,
        )
        return {}
    if not is_of_input:
        return {(layer, module): _part(vector, rows) for module, rows in linear.parts.items()}
    up = work.base.modules.get("up_proj")
    is_gated = "gate_proj" in work.base.modules and work.base.implementation == "native"
    if name == "down_proj" and up is not None and up[0] == linear.in_features and is_gated:
        return {(layer, "up_proj"): _part(vector, slice(None))}
    work.unsupported(
        f"feedforward_modules names {name} {{layers}}; IA3 on a module's input is only served for down_proj "
        "of a gated MLP, "
        "where it equals IA3 on the output of up_proj.",
        place,
    )
    return {}


def _part(vector: TensorView, rows: slice) -> TensorView:
    flat = vector.array.reshape(-1)[rows]
    return TensorView(vector.dtype, flat.shape, flat)


def _is_feedforward(work: Compilation, place: Place) -> bool | None:
    """Look up the config's choice; None where it leaves it open.

    It leaves it to PEFT's table of models or to a regex, and the tensors decide.
    """
    listed = work.config.get("feedforward_modules")
    if listed is None or isinstance(listed, str):
        return None
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        work.malformed(f"feedforward_modules is {shown(listed)}; expected a list of module names.")
        return None
    # PEFT compares the end of the name here, not for whole components of it
    return any(work.names.of(place).endswith(name) for name in listed)
