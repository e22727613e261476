"""IA3: what a module gives is multiplied with a learned vector; what the feed-forward's last linear takes, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.adapters.peft_config import FIELDS as LORA
from loraserve.adapters.strict_json import shown
from loraserve.adapters.tuners.compilation import Compilation, Place
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
    modules_to_save=LORA["modules_to_save"],
    init_ia3_weights=INIT,
)
"""Every field of peft.IA3Config (0.21); a test compares the two."""

_PART = "ia3_l"


def compile_ia3(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """The adapter in the base's terms: modules with an `output_scale` alone.

    The input of down_proj is activation(gate) · up in every base here, so that a vector on it is one on the output of up_proj, where it
    meets the one that up_proj may have itself.

    Raises:
        AdapterRejected: as `compile_adapter`; also AdapterUnsupported for a vector on the input of any other module, which is no scaling of
            an output and of no low rank.
    """
    work = Compilation("IA3", FIELDS, (_PART,), config, tensors, base, limits, rank=None, alpha=None)
    scales: dict[Place, TensorView] = {}
    for place in work.places:
        target = _target(work, place)
        if target is None:
            continue
        vector = work.places[place][_PART]
        flat = TensorView(vector.dtype, (vector.array.size,), vector.array.reshape(-1))
        other = scales.get(target)
        scales[target] = flat if other is None else as_view(as_float32(other) * as_float32(flat))
    order = {module: index for index, module in enumerate(base.modules)}
    places = sorted(scales, key=lambda place: (place[0], order[place[1]]))
    return work.finish([ModuleIR(*place, output_scale=scales[place]) for place in places])


def _target(work: Compilation, place: Place) -> Place | None:
    """The module whose output the vector multiplies; None and a problem where there is none."""
    (layer, module), (out_features, in_features) = place, work.base.modules[place[1]]
    shape = work.places[place][_PART].shape
    if shape not in ((out_features, 1), (1, in_features)):
        found = "×".join(map(str, shape))
        work.mismatch(
            f"{module}.{_PART} is {found} {{layers}}; on this base it is {out_features}×1, or 1×{in_features} for a feed-forward module.",
            place,
        )
        return None
    is_of_input = shape == (1, in_features)
    meant = _is_feedforward(work, place)
    if meant is not None and meant != is_of_input:
        of = "input" if is_of_input else "output"
        work.malformed(
            f"{module}.{_PART} is a vector for the {of} {{layers}}; the config's feedforward_modules says otherwise.",
            place,
        )
        return None
    if not is_of_input:
        return place
    up = work.base.modules.get("up_proj")
    if module == "down_proj" and up is not None and up[0] == in_features and "gate_proj" in work.base.modules:
        return layer, "up_proj"
    work.unsupported(
        f"feedforward_modules has {module}, whose input IA3 multiplies {{layers}}: only down_proj's is served, where it is the same as "
        "multiplying the output of up_proj.",
        place,
    )
    return None


def _is_feedforward(work: Compilation, place: Place) -> bool | None:
    """What the config says; None where it leaves it to PEFT's table of models or to a regex, and the tensors decide."""
    listed = work.config.get("feedforward_modules")
    if listed is None or isinstance(listed, str):
        return None
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        work.malformed(f"feedforward_modules is {shown(listed)}; expected a list of module names.")
        return None
    # PEFT asks for the end of the name here, not for whole components of it
    return any(work.name(place).endswith(name) for name in listed)
