"""Linears of a modelling code's layers, placed among the modules that adapters know.

A layer has seven modules (`LAYER_MODULES`) and five further ones (`EXTRA_MODULES`): a linear whose
name is one of them has its place, and the others take places that are left. Which place that is
changes nothing: kernels and formulas treat all alike, and `BaseSpec.module_paths` has the names.
`gate_proj` alone is kept for a linear of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from loraserve.model.modelling.skeleton import Skeleton
from loraserve_kernels.common.sites import COLUMNS, EXTRA_MODULES, LAYER_MODULES

_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linears that choose experts, or weigh the shared one: they stay transformers' own, in
float32, and no adapter changes them.
"""
_LEFT_OVER = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", *EXTRA_MODULES)


@dataclass(frozen=True, slots=True)
class Placed:
    """A linear of a layer.

    Attributes:
        path: inside the layer.
        slot: the module as adapters know it; None: none changes it.
    """

    layer: int
    path: str
    out_features: int
    in_features: int
    has_bias: bool
    slot: str | None


def place_linears(skeleton: Skeleton) -> list[Placed]:
    """Return the linears of the layers, in order; routers aren't among them.

    Those of one shape in all layers that have them are placed: adapters may change them. Linears
    that every layer has go first, should there be more than places.
    """
    found = [
        (layer, path, module)
        for layer, path, module in skeleton.layer_modules()
        # subclasses compute otherwise
        if type(module) is nn.Linear and path.rpartition(".")[2] not in _ROUTERS
    ]
    shapes: dict[str, list[tuple[int, int, bool]]] = {}
    for _, path, module in found:
        shapes.setdefault(path, []).append((module.out_features, module.in_features, module.bias is not None))
    equal = [path for path, every in shapes.items() if len(set(every)) == 1 and not _is_expert(path)]
    slots = _slots(sorted(equal, key=lambda path: len(shapes[path]) < skeleton.num_layers))
    return [
        Placed(
            layer,
            path,
            module.out_features,
            module.in_features,
            module.bias is not None,
            slots.get(path),
        )
        for layer, path, module in found
    ]


def _slots(paths: list[str]) -> Mapping[str, str]:
    """Return path → module of those that have one."""
    slots: dict[str, str] = {}
    for path in paths:
        name = path.rpartition(".")[2]
        if name in LAYER_MODULES and name not in slots.values():
            slots[path] = name
    for path in paths:
        left = next((slot for slot in _LEFT_OVER if slot not in slots.values()), None)
        if path not in slots and left is not None:
            slots[path] = left
    # in the order of the modules, which adapters are read in
    return dict(sorted(slots.items(), key=lambda item: COLUMNS.index(item[1])))


def _is_expert(path: str) -> bool:
    return ".experts." in f".{path}"
