"""Rounding of a base's linears, layer by layer, each on what the rounded ones before it give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.model.checkpoint.blueprint import Blueprint, ModulePlan, SiteKind, SitePlan
from loraserve.model.checkpoint.original import OriginalBase, StreamedLinear
from loraserve.model.compensation.gptq import compensate, inverse_factor
from loraserve.model.layers.linears import Linear, quantize_weight
from loraserve.model.reference_model import run_products
from loraserve_kernels.common.formats import rotation_block
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.rotation import rotate

LayerWeights = Callable[[int, Mapping[str, QuantizedWeight]], None]
"""Takes the rounded weights of a layer's linears, by path, once all of them are there."""

_MIN_ROWS = 32
"""Rows of an expert's calibration: fewer prove nothing."""


def calibrate(
    base: OriginalBase,
    blueprint: Blueprint,
    sequences: Sequence[Sequence[int]],
    keep: LayerWeights,
    progress: Callable[[int, int], None],
    int8_paths: Collection[str] = (),
) -> None:
    """Round every linear of the layers to int4, rotated, and hand each layer to `keep`.

    Memory holds one site's weight, the matrix of its inputs and the sequences' activations.

    Args:
        sequences: token ids of calibration text.
        int8_paths: linears that are rounded to int8 instead, by output channel.
        progress: notified of the sites that are done, and of all.

    Raises:
        ModelError: a weight can't be rounded.
    """
    products = _Products(base, blueprint, keep, progress, frozenset(int8_paths))
    with torch.inference_mode():
        run_products(base, sequences, products)
        products.finish()


class _Products:
    """Products of the layers' linears, whose weights are rounded when their input is there."""

    def __init__(
        self,
        base: OriginalBase,
        blueprint: Blueprint,
        keep: LayerWeights,
        progress: Callable[[int, int], None],
        int8_paths: frozenset[str],
    ) -> None:
        self._base, self._keep, self._progress = base, keep, progress
        self._int8_paths = int8_paths
        self._plans = [plan for plan in blueprint.sites if plan.kind in (SiteKind.LAYER, SiteKind.EXPERT)]
        self._sites = {
            (plan.layer, module): plan
            for plan in self._plans
            if plan.kind is SiteKind.LAYER
            for module in base.modules_of(plan)
        }
        self._layer, self._num_done = 0, 0
        self._weights: dict[str, QuantizedWeight] = {}

    def multiply(self, x: Tensor, layer: int, modules: Sequence[str]) -> Tensor | None:
        """Compute the product with a site's modules; None of the head, which isn't rounded here."""
        plan = self._sites.get((layer, modules[0]))
        if plan is None:
            return None
        if tuple(modules) != self._base.modules_of(plan):
            raise InvariantViolation(f"{modules} of layer {layer} aren't a whole site")
        return self._product(x, plan, self._base.weight_rows(layer, *modules))

    def multiply_by(self, x: Tensor, linear: Linear) -> Tensor | None:
        """Compute the product with an expert's linear; None of a router."""
        if not isinstance(linear, StreamedLinear) or linear.plan.kind is not SiteKind.EXPERT:
            return None
        return self._product(x, linear.plan, linear.rows(0, linear.out_features))

    def _product(self, x: Tensor, plan: SitePlan, rows: Iterator[Tensor]) -> Tensor:
        if plan.layer != self._layer:
            self._finish_layer()
        self._round(plan, torch.cat(list(rows)), x)
        parts = [x @ self._weights[module.path].dequantize(torch.float32).t() for module in plan.modules]
        return torch.cat(parts, dim=1)

    def finish(self) -> None:
        """Hand over the last layer."""
        self._finish_layer()

    def _round(self, plan: SitePlan, weight: Tensor, x: Tensor | None) -> None:
        """Round a site's weight on its inputs; too few of them, or None: for itself."""
        rotation, first = rotation_block(plan.in_features), 0
        is_int4 = any(self._format_of(module) == "int4" for module in plan.modules)
        is_weighed = is_int4 and x is not None and x.shape[0] >= _MIN_ROWS
        inverse = inverse_factor(rotate(x, rotation)) if x is not None and is_weighed else None
        # neighbours of a format have the same inputs, and are rounded together
        for format, group in groupby(plan.modules, key=self._format_of):
            modules = list(group)
            rows = weight[first : first + sum(module.out_features for module in modules)]
            first += rows.shape[0]
            if inverse is None or format != "int4":
                rounded = quantize_weight(rows, format, rotation)
            else:
                rounded = compensate(rows, inverse, rotation)
            start = 0
            for module in modules:
                self._weights[module.path] = rounded.rows(start, start + module.out_features)
                start += module.out_features
        self._num_done += 1
        self._progress(self._num_done, len(self._plans))

    def _format_of(self, module: ModulePlan) -> str:
        return "int8" if module.path in self._int8_paths else "int4"

    def _finish_layer(self) -> None:
        for plan in self._plans:
            if plan.layer == self._layer and plan.modules[0].path not in self._weights:
                # an expert that no row of the text has chosen
                self._round(plan, torch.cat(list(self._base.site_rows(plan))), None)
        self._keep(self._layer, self._weights)
        self._weights = {}
        self._layer += 1
