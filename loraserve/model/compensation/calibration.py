"""Rounding of a base's linears, layer by layer, each on what the rounded ones before it give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.model.checkpoint.blueprint import Blueprint, SiteKind, SitePlan
from loraserve.model.checkpoint.original import OriginalBase, StreamedLinear
from loraserve.model.compensation.gptq import compensate
from loraserve.model.layers.linears import Linear, quantize_weight
from loraserve.model.reference_model import run_products
from loraserve_kernels.common.formats import rotation_block
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.common.row_blocks import row_blocks

LayerWeights = Callable[[int, Sequence[tuple[SitePlan, QuantizedWeight]]], None]
"""Takes the rounded weights of a layer, by site, once all of them are there."""

_MIN_ROWS = 32
"""Rows of an expert's calibration: of fewer nothing can be said."""


def calibrate(
    base: OriginalBase,
    blueprint: Blueprint,
    sequences: Sequence[Sequence[int]],
    keep: LayerWeights,
    progress: Callable[[int, int], None],
) -> None:
    """Round every linear of the layers to int4, rotated, and hand each layer to `keep`.

    Memory holds one site's weight, the matrix of its inputs and the sequences' activations.

    Args:
        sequences: token ids of calibration text.
        progress: told of the sites that are done, and of all.

    Raises:
        ModelError: a weight can't be rounded.
    """
    products = _Products(base, blueprint, keep, progress)
    with torch.inference_mode():
        run_products(base, sequences, products)
        products.finish()


class _Products:
    """Products of the layers' linears, whose weights are rounded when their input is there."""

    def __init__(
        self, base: OriginalBase, blueprint: Blueprint, keep: LayerWeights, progress: Callable[[int, int], None]
    ) -> None:
        self._base, self._keep, self._progress = base, keep, progress
        self._num_layers = base.config.num_layers
        self._plans = [plan for plan in blueprint.sites if plan.kind in (SiteKind.LAYER, SiteKind.EXPERT)]
        self._sites = {
            (plan.layer, module): plan
            for plan in self._plans
            if plan.kind is SiteKind.LAYER
            for module in base.modules_of(plan)
        }
        self._layer, self._num_done = 0, 0
        self._weights: dict[int, QuantizedWeight] = {}

    def multiply(self, x: Tensor, layer: int, modules: Sequence[str]) -> Tensor | None:
        """Return the product with a site's modules; None of the head, which isn't rounded here."""
        plan = self._sites.get((layer, modules[0]))
        if plan is None:
            return None
        if tuple(modules) != self._base.modules_of(plan):
            raise InvariantViolation(f"{modules} of layer {layer} aren't a whole site")
        return self._product(x, plan, lambda: self._base.weight_rows(layer, *modules))

    def multiply_by(self, x: Tensor, linear: Linear) -> Tensor | None:
        """Return the product with an expert's linear; None of a router."""
        if not isinstance(linear, StreamedLinear) or linear.plan.kind is not SiteKind.EXPERT:
            return None
        return self._product(x, linear.plan, lambda: linear.rows(0, linear.out_features))

    def _product(self, x: Tensor, plan: SitePlan, rows: Callable[[], Iterator[Tensor]]) -> Tensor:
        if plan.layer != self._layer:
            self._finish_layer()
        weight, rotation = torch.cat(list(rows())), rotation_block(plan.in_features)
        if x.shape[0] < _MIN_ROWS:
            rounded = quantize_weight(weight, "int4", rotation)
        else:
            turned = rotate(x, rotation)
            rounded = compensate(weight, turned.t() @ turned, rotation)
        self._put(plan, rounded)
        y = x.new_empty(x.shape[0], rounded.out_features)
        for first, last in row_blocks(0, rounded.out_features, rounded.in_features):
            y[:, first:last] = x @ rounded.rows(first, last).dequantize(torch.float32).t()
        return y

    def finish(self) -> None:
        """Hand over the last layer."""
        self._finish_layer()

    def _put(self, plan: SitePlan, rounded: QuantizedWeight) -> None:
        self._weights[id(plan)] = rounded
        self._num_done += 1
        self._progress(self._num_done, len(self._plans))

    def _finish_layer(self) -> None:
        plans = [plan for plan in self._plans if plan.layer == self._layer]
        for plan in plans:
            if id(plan) not in self._weights:
                # an expert that no row of the text has chosen
                weight = torch.cat(list(self._base.site_rows(plan)))
                self._put(plan, quantize_weight(weight, "int4", rotation_block(plan.in_features)))
        self._keep(self._layer, [(plan, self._weights[id(plan)]) for plan in plans])
        self._weights.clear()
        self._layer += 1
