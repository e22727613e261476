"""Linears of a base that an adapter may change, by shared input.

Imports no torch: plans are made without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from loraserve_kernels.errors import TensorMismatch

SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "lm_head": ("lm_head",),
    "embed": ("embed_tokens",),
}
"""Linears that share an input: their outputs are slices of one tensor, in this order.

The embedding is a linear whose input is a one-hot row.
"""

LAYER_SITES: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
"""The sites that every decoder layer has."""

EXTRA_MODULES: tuple[str, ...] = tuple(f"extra_{number}" for number in range(5))
"""Other linears of a layer, each a site of its own, on CPUs alone.

Code of transformers has them, where some layers attend and others are recurrent.
"""

MODULES: tuple[str, ...] = tuple(module for site in SITES.values() for module in site)
"""Modules of a base of this package's own code that can carry LoRA."""

COLUMNS: tuple[str, ...] = (*MODULES, *EXTRA_MODULES)
"""Modules of any base that can carry LoRA; a module's place here is its column in the tables."""

MODULE_INDEX: dict[str, int] = {module: index for index, module in enumerate(COLUMNS)}

LAYER_MODULES: tuple[str, ...] = tuple(module for site in LAYER_SITES for module in SITES[site])
"""Modules of the decoder layers: the first of `COLUMNS`."""

STORED_SITES: dict[str, tuple[str, ...]] = {**SITES, **{module: (module,) for module in EXTRA_MODULES}}
"""The sites as an adapter lies in a CPU's memory."""

CALLED_SITES: dict[str, tuple[str, ...]] = {
    **SITES,
    **{module: (module,) for module in (*LAYER_MODULES, *EXTRA_MODULES)},
}
"""The sites, and each linear of a layer as one of its own.

Modelling code that isn't ours multiplies linear by linear, also where they share an input.
"""

EXPERT_SITES: dict[str, tuple[str, ...]] = {
    "experts.gate_up": ("experts.gate_proj", "experts.up_proj"),
    "experts.down": ("experts.down_proj",),
    "router": ("router",),
    "shared_gate": ("shared_gate",),
}
"""Sites of a mixture of experts: an expert's two, what chooses experts, and what weighs the shared
expert, whose own linears are a layer's ``gate_up`` and ``down``.
"""

EXPERT_MODULES: tuple[str, ...] = tuple(module for site in EXPERT_SITES.values() for module in site)
"""Modules of a mixture that can carry LoRA; those of experts in each of them."""

EXPERT_INDEX: dict[str, int] = {module: index for index, module in enumerate(EXPERT_MODULES)}


ModuleShapes = Mapping[str, tuple[int, int]]
"""Module → (out_features, in_features) of the base."""


def label_of(module: str, expert: int) -> str:
    """Format a module's name for people: ``q_proj``, ``experts.3.gate_proj``."""
    return module.replace("experts.", f"experts.{expert}.")


def check_place(layer: int, module: str, num_layers: int, module_shapes: ModuleShapes, expert: int = 0) -> None:
    """Check that the base has such a module there.

    Args:
        expert: number of the expert; 0 for a module that isn't an expert's.

    Raises:
        TensorMismatch: it has none.
    """
    if not 0 <= layer < num_layers:
        raise TensorMismatch(f"LoRA on layer {layer}; this base has layers 0 to {num_layers - 1}")
    if (module not in MODULE_INDEX and module not in EXPERT_INDEX) or module not in module_shapes:
        raise TensorMismatch(f"layer {layer} has LoRA on {module}; this base has {', '.join(module_shapes)}")
    if module in EXPERT_INDEX:
        # the router has a score for each expert
        num_experts = module_shapes["router"][0] if module.startswith("experts.") else 1
        if not 0 <= expert < num_experts:
            raise TensorMismatch(
                f"layer {layer} has LoRA on {module} of expert {expert}; this base has 0 to {num_experts - 1}"
            )
        return
    if layer and module not in LAYER_MODULES and module not in EXTRA_MODULES:
        raise TensorMismatch(f"layer {layer} has LoRA on {module}, which is outside the layers: pass layer 0")
