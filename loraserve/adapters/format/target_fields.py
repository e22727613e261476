"""Fields of PEFT's config that name the modules of an adapter that came without one."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from loraserve.types import BaseSpec

LAYER_PATH = re.compile(r"(?P<prefix>.*\blayers)\.(?P<layer>\d{1,6})\.(?P<inner>.+)")
"""Path of a module inside a layer."""


def target_fields(modules: Collection[str], base: BaseSpec) -> dict[str, Any]:
    """Choose the fields of PEFT's config that mean these modules, given by their whole names."""
    inner: dict[str, set[int]] = {}
    outside: list[str] = []
    for module in modules:
        match = LAYER_PATH.fullmatch(module)
        if match is None:
            outside.append(module)
        else:
            inner.setdefault(match["inner"], set()).add(int(match["layer"]))
    layers = sorted(set().union(*inner.values()))
    if any(found != set(layers) for found in inner.values()) or (outside and len(layers) < base.num_layers):
        return {"target_modules": sorted(modules)}
    targets = {"target_modules": sorted([*inner, *outside])}
    return targets if len(layers) == base.num_layers else {**targets, "layers_to_transform": layers}
