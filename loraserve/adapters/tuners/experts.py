"""LoRA on a mixture of experts.

It is of each expert's linears, or of the parameters that have those of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.format.expert_names import (
    PARAMETERS,
    ExpertNames,
    ExpertParameter,
    ExpertPlace,
    is_parameter_targeted,
)
from loraserve.adapters.format.tensor_names import BaseLinear, Contents, LinearTensors
from loraserve.adapters.ir import TensorView, label_of
from loraserve.adapters.problems import Problems
from loraserve.adapters.saved_modules import shape_words
from loraserve.adapters.target_modules import is_name_targeted
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError


class ExpertTensors:
    """Linears of experts in an adapter's file, those of parameters of all experts cut apart.

    Args:
        settings: None where the config is malformed: then targets aren't checked.
    """

    def __init__(
        self, settings: LoraSettings | None, contents: Contents, names: ExpertNames, problems: Problems
    ) -> None:
        self.settings, self.contents, self.names, self.problems = settings, contents, names, problems

    def check_targets(self) -> None:
        """Add a problem for each linear or parameter whose tensors and targeting disagree.

        Linears of experts and the router are meant only where the file has some: in transformers 5
        they are none, and target_modules such as gate_proj leaves them alone.
        """
        settings = self.settings
        if settings is None:
            return
        found = {module for _, module, _ in self.contents.experts}
        has_linears = any(module.startswith("experts.") for module in found)
        meant = [m for m in self.names.experts.modules if m == "shared_gate" or m in found or has_linears]
        for place in self.names.places(meant):
            layer, module, expert = place
            name = self.names.of(place)
            if module == "router" and is_parameter_targeted(settings.target_parameters, self.names.of_router(layer)):
                continue
            is_there, label = place in self.contents.experts, label_of(module, expert)
            is_meant = is_name_targeted(settings, self.names.base, name, layer)
            if is_there and not is_meant:
                self._disagree(
                    f"The file holds tensors for {label} {{layers}}, which the config doesn't target.", layer
                )
            elif is_meant and not is_there:
                self._disagree(f"The config targets {label} {{layers}}, and the file holds no tensors for it.", layer)
        for layer in range(self.names.base.num_layers):
            self._check_parameters(settings, layer)

    def _check_parameters(self, settings: LoraSettings, layer: int) -> None:
        if is_parameter_targeted(settings.target_parameters, self.names.of_router(layer)) and (
            (layer, "router", 0) not in self.contents.experts
        ):
            self._disagree("The config targets the router's weight {layers}, and the file holds no tensors.", layer)
        targeted, path = self._targeted(settings, layer), self.names.experts.parameters_path
        for depth in range(len(PARAMETERS)):
            is_there = (layer, depth) in self.contents.wrappers
            if depth < len(targeted) and not is_there:
                parameter = targeted[-1 - depth].name
                self._disagree(
                    f"The config's target_parameters name {path}.{parameter} {{layers}}, and the file holds no tensors "
                    "for it.",
                    layer,
                )
            elif is_there and depth >= len(targeted):
                self._disagree(
                    f"The file holds tensors for {depth + 1} of the parameters of {path} {{layers}}; the config's "
                    f"target_parameters name {len(targeted)}.",
                    layer,
                )

    def _disagree(self, message: str, layer: int) -> None:
        self.problems.add(AdapterFormatError, message, layer)

    def _targeted(self, settings: LoraSettings, layer: int) -> list[ExpertParameter]:
        """List the parameters that PEFT wraps, in its order: the innermost wrapper's first."""
        return [
            parameter
            for parameter in self.names.parameters
            if is_parameter_targeted(settings.target_parameters, self.names.of_parameter(layer, parameter.name))
        ]

    def linears(self) -> Iterator[tuple[ExpertPlace, BaseLinear, str, LinearTensors]]:
        """Yield each linear's place, itself, its name to patterns, and what the file has of it.

        A parameter of gate and up is one linear of two modules, as the parameter has them. Its
        place is that of the first.
        """
        for place, stored in self.contents.experts.items():
            layer, module, expert = place
            name = self.names.of(place)
            if (
                module == "router"
                and self.settings is not None
                and is_parameter_targeted(self.settings.target_parameters, self.names.of_router(layer))
            ):
                name = self.names.of_router(layer)
            out_features, in_features = self.names.experts.modules[module]
            parts = {module: slice(0, out_features)}
            label = label_of(module, expert)
            yield place, BaseLinear(label, label, out_features, in_features, False, parts), name, stored
        for (layer, depth), stored in self.contents.wrappers.items():
            targeted = [] if self.settings is None else self._targeted(self.settings, layer)
            if depth < len(targeted):
                yield from self._cut(layer, targeted[-1 - depth], stored)

    def _cut(
        self, layer: int, parameter: ExpertParameter, stored: LinearTensors
    ) -> Iterator[tuple[ExpertPlace, BaseLinear, str, LinearTensors]]:
        """Yield the experts' linears in a parameter of all.

        PEFT has A's rows expert by expert, and B's columns rank by rank.
        """
        label = f"{self.names.experts.parameters_path}.{parameter.name}"
        parts, first = {}, 0
        for number, module in enumerate(parameter.modules):
            count = self.names.experts.modules[module][0]
            parts[module] = parameter.outputs_of(number, first, count)
            first += count
        linear = BaseLinear(label, label, parameter.out_features, parameter.in_features, False, parts)
        name, a, b = self.names.of_parameter(layer, parameter.name), stored.lora_a, stored.lora_b
        if a is None or b is None or stored.lora_bias is not None:
            missing = "a bias" if stored.lora_bias is not None else "no lora_A" if a is None else "no lora_B"
            self._disagree(f"{label} has {missing} {{layers}}; PEFT saves lora_A and lora_B of a parameter.", layer)
            return
        ranks = self._num_ranks(linear, a, b, layer)
        if ranks is None:
            return
        of_b = b.array.reshape(parameter.out_features, ranks, parameter.num_experts)
        for expert in range(parameter.num_experts):
            rows = a.array[expert * ranks : (expert + 1) * ranks]
            own = LinearTensors(
                TensorView(a.dtype, rows.shape, rows),
                TensorView(b.dtype, (parameter.out_features, ranks), of_b[:, :, expert]),
            )
            yield (layer, parameter.modules[0], expert), linear, name, own

    def _num_ranks(self, linear: BaseLinear, a: TensorView, b: TensorView, layer: int) -> int | None:
        """Compute the rank that the tensors have of each expert; None and a problem: they don't."""
        count = self.names.experts.num_experts
        ranks, remainder = divmod(a.shape[0], count) if len(a.shape) == 2 else (0, 0)
        expected = (ranks * count, linear.in_features), (linear.out_features, ranks * count)
        if (a.shape, b.shape) == expected and ranks and not remainder:
            return ranks
        self.problems.add(
            AdapterBaseMismatch,
            f"{linear.name}.lora_A is {shape_words(a)} and lora_B {shape_words(b)} {{layers}}; this base's "
            f"{count} experts take ({count} · rank) × {linear.in_features} and {linear.out_features} × "
            f"({count} · rank), as PEFT lays them out since 0.19.",
            layer,
        )
        return None
