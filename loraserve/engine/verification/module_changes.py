"""Change that each of an adapter's modules makes to random inputs, in the engine's kernels.

Whole answers can't show a small mistake where activations are rounded: the next code of a number
moves logits by as much. One module has no such steps behind it, so its change is compared tightly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.memory.loading.lowering import as_tensor
from loraserve.types import BaseSpec
from loraserve_kernels.common.packed import PackedAdapter
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.common.sites import (
    CALLED_SITES,
    EXPERT_SITES,
    EXTRA_MODULES,
    LAYER_MODULES,
    LAYER_SITES,
    SITES,
)
from loraserve_kernels.cpu.lora.experts import LayerExperts
from loraserve_kernels.ops import apply_expert_lora, apply_lora

Place = tuple[int, str, int]
"""Layer, module and expert, as `ModuleIR.place` has them."""

NUM_ROWS = 2
_PLAIN = {"lora_a", "lora_b"}


def expected_changes(terms: Sequence[tuple[AdapterIR, float]], base: BaseSpec) -> dict[Place, Tensor | None]:
    """Compute what layers' modules add to their outputs for `input_of` their site, in float32.

    A module that isn't there adds nothing. None: it is more than a LoRA of the base's weight, and
    isn't compared here.
    """
    found: dict[Place, Tensor | None] = {}
    shapes = base.module_shapes
    for ir, weight in terms:
        for m in ir.modules:
            if m.module not in shapes or m.module in ("lm_head", "embed_tokens"):
                continue
            before = found.get(m.place, torch.zeros(NUM_ROWS, shapes[m.module][0]))
            change = _change(m, base, shapes[m.module][1])
            found[m.place] = None if before is None or change is None else before + weight * change
    return found


def worst_difference(
    handle: PackedAdapter, expected: Mapping[Place, Tensor | None], base: BaseSpec
) -> tuple[float, Place]:
    """Find the largest relative difference of a module's change, and where it is.

    Of a module that should add nothing, all of what it adds is the difference. Uses the caller's
    thread, where that computes alone.
    """
    worst: tuple[float, Place] = (0.0, (0, "q_proj", 0))
    for place, found in _added(handle, expected, base):
        wanted = expected.get(place, torch.zeros(()))
        if wanted is None:
            continue
        size = float(wanted.norm())
        difference = float((found - wanted).norm()) / size if size > 0 else float(found.norm())
        # NaN is no smaller than any number
        if not difference <= worst[0]:
            worst = (difference, place)
    return worst


def _added(handle: PackedAdapter, expected: Iterable[Place], base: BaseSpec) -> Iterator[tuple[Place, Tensor]]:
    """Yield what the engine's kernels add to each module's output, by its place.

    Of experts, those alone that are expected to change or that the adapter has something of.
    """
    plan = make_plan([(handle, 0, NUM_ROWS)], NUM_ROWS)
    if plan is None:
        return
    for layer in range(base.num_layers):
        for site, modules in called_sites(base).items():
            widths = [base.modules[module][0] if module in base.modules else 0 for module in modules]
            if not all(widths):
                continue
            y = torch.zeros(NUM_ROWS, sum(widths))
            apply_lora(input_of(layer, site, base.modules[modules[0]][1]), y, plan, site, layer)
            for module, found in zip(modules, torch.split(y, widths, 1), strict=True):
                yield (layer, module, 0), found
    shapes = {} if base.experts is None else base.experts.modules
    changed = {(layer, expert) for layer, module, expert in expected if module in shapes}
    changed |= set() if handle.experts is None else set(handle.experts.rows)
    for layer, expert in sorted(changed):
        segments = LayerExperts(plan, layer).segments(expert)
        for site, modules in EXPERT_SITES.items():
            if modules[0] not in shapes:
                continue
            widths = [shapes[module][0] for module in modules]
            y = torch.zeros(NUM_ROWS, sum(widths))
            apply_expert_lora(input_of(layer, site, shapes[modules[0]][1]), y, segments, site)
            for module, found in zip(modules, torch.split(y, widths, 1), strict=True):
                yield (layer, module, expert), found


def called_sites(base: BaseSpec) -> dict[str, tuple[str, ...]]:
    """Group a layer's linears into sites as steps compute them: modelling code calls each alone."""
    if base.implementation == "native":
        return {site: SITES[site] for site in LAYER_SITES}
    return {module: (module,) for module in (*LAYER_MODULES, *EXTRA_MODULES)}


def input_of(layer: int, site: str, in_features: int) -> Tensor:
    """Generate a site's random input, [NUM_ROWS, in_features] float32; the same each time."""
    sites = (*CALLED_SITES, *EXPERT_SITES)
    generator = torch.Generator().manual_seed(layer * len(sites) + sites.index(site))
    return torch.randn(NUM_ROWS, in_features, generator=generator)


def _change(m: ModuleIR, base: BaseSpec, in_features: int) -> Tensor | None:
    if not m.tensors.keys() <= _PLAIN or m.lora_a is None or m.lora_b is None:
        return None
    sites = EXPERT_SITES if m.module not in base.modules else called_sites(base)
    site = next(site for site, modules in sites.items() if m.module in modules)
    x = input_of(m.layer, site, in_features)
    return m.scaling * ((x @ _of(m.lora_a).T) @ _of(m.lora_b).T)


def _of(view: TensorView) -> Tensor:
    return as_tensor(view).float()
