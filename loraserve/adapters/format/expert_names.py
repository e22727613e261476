"""Names of LoRA on a mixture of experts, in an adapter's file and in its config's patterns.

Before transformers 5 each expert had linears of its own (``mlp.experts.3.gate_proj``), as its
checkpoints still do. Transformers 5 has all experts' weights in two parameters of one module
(``mlp.experts.gate_up_proj`` and ``mlp.experts.down_proj``), which PEFT's target_parameters names.
PEFT wraps the module once for each parameter: what it saves of the outermost wrapper is called
``mlp.experts.lora_A``, of the one inside it ``mlp.experts.base_layer.lora_A``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraserve.types import BaseSpec, ExpertsSpec

ExpertPlace = tuple[int, str, int]
"""(layer, module of a mixture, number of the expert; 0 for what isn't an expert's)."""

PARAMETERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gate_up_proj", ("experts.gate_proj", "experts.up_proj")),
    ("down_proj", ("experts.down_proj",)),
)
"""Parameters of all experts in the order in which PEFT wraps them → modules, whose rows of an
expert's output follow each other.
"""

_WRAPPED = ".base_layer"


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """Parameter that has a weight for each expert.

    Attributes:
        name: ``gate_up_proj`` or ``down_proj``.
        modules: modules of an expert that it has the weights of.
        is_interleaved: whether their outputs take turns; else those of a module come together.
    """

    name: str
    modules: tuple[str, ...]
    out_features: int
    in_features: int
    num_experts: int
    is_interleaved: bool = False

    def outputs_of(self, number: int, first: int, count: int) -> slice:
        """Select the outputs of a module among the parameter's.

        Args:
            number: the module's place in `modules`.
            first, count: its first output and their number, where modules follow each other.
        """
        return slice(number, None, len(self.modules)) if self.is_interleaved else slice(first, first + count)


class ExpertNames:
    """A base's names of its mixtures of experts."""

    def __init__(self, base: BaseSpec, experts: ExpertsSpec) -> None:
        self.base, self.experts = base, experts
        self._linears = {path: module for module, path in experts.module_paths.items() if "{}" not in path}
        # where transformers 5 has the router, which may not be where checkpoints have it
        self._block = experts.parameters_path.rpartition(".")[0]
        if "router" in experts.module_paths:
            self._linears.setdefault(f"{self._block}.gate", "router")
        self._each = {tuple(path.split("{}")): module for module, path in experts.module_paths.items() if "{}" in path}
        self.parameters = tuple(
            ExpertParameter(
                name,
                modules,
                sum(experts.modules[module][0] for module in modules),
                experts.modules[modules[0]][1],
                experts.num_experts,
                experts.is_interleaved,
            )
            for name, modules in PARAMETERS
        )

    def linear(self, path: str) -> tuple[str, int] | None:
        """Parse a path inside a layer into (module, number of the expert); None: it is no such.

        The number may be one that the base doesn't have.
        """
        if path in self._linears:
            return self._linears[path], 0
        for (before, after), module in self._each.items():
            number = path.removeprefix(before).removesuffix(after)
            if path == before + number + after and number.isdecimal() and str(int(number[:9])) == number:
                return module, int(number)
        return None

    def wrapper(self, path: str) -> int | None:
        """Count the wrappers around the one of this path inside a layer.

        None: it isn't a wrapper of all experts' module.
        """
        inner = path.removeprefix(self.experts.parameters_path)
        depth = len(inner) // len(_WRAPPED)
        is_one = path.startswith(self.experts.parameters_path) and inner == depth * _WRAPPED
        return depth if is_one and depth < len(PARAMETERS) else None

    def of(self, place: ExpertPlace) -> str:
        """Format the whole name of a linear, as PEFT's patterns see it."""
        layer, module, expert = place
        path = self.experts.module_paths[module].replace("{}", str(expert))
        return f"{self.base.layers_path}.{layer}.{path}"

    def of_parameter(self, layer: int, name: str) -> str:
        """Format the whole name of a parameter of all experts."""
        return f"{self.base.layers_path}.{layer}.{self.experts.parameters_path}.{name}"

    @property
    def parameter_paths(self) -> list[str]:
        """Paths of the parameters of all experts inside a layer."""
        return [f"{self.experts.parameters_path}.{parameter.name}" for parameter in self.parameters]

    def of_router(self, layer: int) -> str:
        """Format the whole name of the router's weight in transformers 5."""
        return f"{self.base.layers_path}.{layer}.{self._block}.gate.weight"

    def places(self, modules: Iterable[str]) -> list[ExpertPlace]:
        """List the linears of these modules in all layers, by layer, module and expert."""
        return [
            (layer, module, expert)
            for layer in range(self.base.num_layers)
            for module in modules
            for expert in range(self.experts.num_experts if module.startswith("experts.") else 1)
        ]


def is_parameter_targeted(targets: Sequence[str], name: str) -> bool:
    """Check whether a config's target_parameters name a parameter of this whole name."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
