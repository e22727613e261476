"""Tensors that PEFT trains along with those of any kind, or saves of the base.

They are whole modules, biases, and the base's head.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.format.tensor_names import BaseTensorNames, LinearTensors, Place, group_tensors
from loraserve.adapters.ir import ModuleIR, NormIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.saved_modules import check_saved, norms_of
from loraserve.adapters.tuners.factors import slice_rows

_ANY = TensorView("F32", (0,), np.zeros(0, np.float32))
_NAME = re.compile(r".+\.(?:(?:base_layer|original_module|modules_to_save)\.)?(?:weight|bias)")


def is_auxiliary(name: str) -> bool:
    """Check whether a tensor of that name is no kind's own; LoRA's end like these."""
    return _NAME.fullmatch(name) is not None and ".lora_" not in name


class AuxiliaryTensors:
    """Tensors of a file that are no kind's own, by linear and norm.

    Attributes:
        norms: those that were trained.
        saved_base: as `AdapterIR` has it.
    """

    def __init__(
        self, tensors: Mapping[str, TensorView], places: Collection[Place], names: BaseTensorNames, problems: Problems
    ) -> None:
        """Take the tensors.

        PEFT's names of them depend on the linears that the kind acts on, `places`.
        """
        auxiliary = {name: tensor for name, tensor in tensors.items() if is_auxiliary(name)}
        self._names = names
        self._problems = problems
        self._contents = group_tensors(auxiliary, names, problems)
        for place in places:
            # `has_lora` is all that is read of it
            self._contents.linears.setdefault(place, LinearTensors()).lora_a = _ANY
        self.norms: tuple[NormIR, ...] = norms_of(self._contents)
        self.saved_base: dict[str, TensorView] = {
            name: stored.saved_base
            for (_, name), stored in self._contents.linears.items()
            if stored.saved_base is not None
        }

    def check(self, settings: LoraSettings) -> None:
        """Add a problem for each weight and bias that is missing or wrong.

        One is wrong that isn't the config's, or doesn't fit the base.
        """
        check_saved(settings, self._contents, self._names, self._problems)

    def join(self, modules: Sequence[ModuleIR]) -> list[ModuleIR]:
        """Add the weights and biases that were trained with the modules to them.

        They are in order of layer, then of the base's modules.
        """
        by_place = {(m.layer, m.module): m for m in modules}
        for (layer, name), stored in self._contents.linears.items():
            bias = stored.bias if stored.base_bias is None else stored.base_bias
            if stored.weight is None and bias is None:
                continue
            parts = self._names.linears[name].parts
            for module, part in parts.items():
                rows = None if len(parts) == 1 else part
                found = by_place.get((layer, module), ModuleIR(layer, module))
                by_place[layer, module] = dataclasses.replace(
                    found, weight=slice_rows(stored.weight, rows), bias=slice_rows(bias, rows)
                )
        order = {module: index for index, module in enumerate(self._names.base.modules)}
        return sorted(by_place.values(), key=lambda m: (m.layer, order[m.module]))
