"""Weights of a whole base, read from its checkpoint when they're needed.

It's for what reads weights outside the steps (DoRA's lengths, copies that PEFT saves, the reference
evaluation) where this process has a part of the base alone: no weight is exchanged, and none stays
in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.model.checkpoint.blueprint import Blueprint, SiteKind, SitePlan, draw
from loraserve.model.checkpoint.cutting import rotation_of
from loraserve.model.checkpoint.files import Checkpoint, open_checkpoint
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.checkpoint.site import make_site
from loraserve.model.config.model_config import ModelConfig, read_config
from loraserve.model.decoder import Decoder
from loraserve.model.layers.embedding import QuantizedTable, table_rows
from loraserve.model.layers.experts import MixtureOfExperts, make_mixture
from loraserve.model.layers.linears import Linear, float_rows, half_bias, quantize_weight
from loraserve_kernels.common.arithmetic import OUTLIERS, ActivationRounding, Arithmetic, activation_rounding
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.row_blocks import row_blocks
from loraserve_kernels.cpu.linear.chooser import chooser
from loraserve_kernels.cpu.lora.layout import SITES


class WholeWeights:
    """A base's weights as a process that held all of it would compute with them.

    Any thread may call it.

    Attributes:
        config: the base's.
    """

    device = torch.device("cpu")

    def __init__(self, model_dir: Path, decoder: Decoder, dtype: torch.dtype, quantize: str) -> None:
        """Read the headers.

        Args:
            decoder: of this process's part.
            dtype: what weights are kept in when they aren't quantized.
            quantize: what a float checkpoint's linears are rounded to.
        """
        self.config: ModelConfig = read_config(model_dir)
        self._checkpoint: Checkpoint = open_checkpoint(model_dir)
        self._blueprint: Blueprint = draw(self.config, self._checkpoint.tensors, quantize)
        self._decoder, self._gated, self._dtype = decoder, decoder.backend.gated, dtype
        self._gather_dtype = dtype if self._blueprint.quantize == "none" else torch.float32
        self._sites = {(plan.layer, plan.name): plan for plan in self._blueprint.sites if plan.name}
        self._routers: dict[int, list[SitePlan]] = {}
        self._experts: dict[int, list[SitePlan]] = {}
        for plan in self._blueprint.sites:
            if plan.kind is SiteKind.ROUTER:
                self._routers.setdefault(plan.layer, []).append(plan)
            elif plan.kind is SiteKind.EXPERT:
                self._experts.setdefault(plan.layer, []).append(plan)

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield modules' weights in float32, by blocks of rows; see `Decoder.weight_rows`."""
        if modules == ("embed_tokens",):
            yield from table_rows(self._embedding())
        elif modules == ("lm_head",):
            yield from self._head().rows(0, self.config.vocab_size)
        else:
            yield from self._rows(layer, modules)

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, [out_features] float32; None where it has none."""
        plan, start = self._site_of(layer, module)
        if not self.config.has_bias(module):
            return None
        bias = self.read(plan).bias
        return None if bias is None else bias[start : start + self.config.module_shapes[module][0]].float()

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Look up how a module's products round their input; None: they don't.

        All layers are computed as those that this process has; it may not have the head.
        """
        if module != "lm_head":
            return self._decoder.activation_rounding(0, module)
        if self._blueprint.head_quantize != "int8":
            return None
        # of several parts the head's is named last
        names = reversed(self._decoder.spec.arithmetic.split("+"))
        found = next((one for name in names if (one := activation_rounding(name)) is not None), None)
        if found is None:
            return None
        return replace(found, rotation=self._head_rotation(), num_outliers=OUTLIERS if found.group else 0)

    def norm_weight(self, name: str) -> Tensor:
        """Read what a norm multiplies with, by the name of its tensor in the checkpoint."""
        weight = self._checkpoint.rows(name, 0, self._blueprint.tensors[name].shape[0]).float()
        offset = self.config.architecture.norm_offset
        return weight + offset if offset else weight

    def experts(self, layer: int) -> MixtureOfExperts | None:
        """Build what stands in the place of a layer's MLP; its weights are read on demand."""
        if self.config.experts is None:
            return None
        routers, linears = (
            [_StoredLinear(self, plan) for plan in held[layer]] for held in (self._routers, self._experts)
        )
        return make_mixture(self.config.experts, routers, linears, self._gated)

    def _rows(self, layer: int, modules: Sequence[str]) -> Iterator[Tensor]:
        plan, start = self._site_of(layer, modules[0])
        count = sum(self.config.module_shapes[module][0] for module in modules)
        names = SITES[plan.name]
        if len(plan.modules) == len(names):
            # of modules that the file has one by one, those that are requested
            first = names.index(modules[0])
            plan, start = replace(plan, modules=plan.modules[first : first + len(modules)]), 0
        yield from self.read(plan).rows(start, start + count)

    def _site_of(self, layer: int, module: str) -> tuple[SitePlan, int]:
        """Find the site that a module is a part of, and its first row."""
        site, names = next((site, names) for site, names in SITES.items() if module in names)
        if (layer, site) not in self._sites:
            raise InvariantViolation(f"{module} of layer {layer} was asked for, which this base doesn't have.")
        start = sum(self.config.module_shapes[name][0] for name in names[: names.index(module)])
        return self._sites[layer, site], start

    def _embedding(self) -> Tensor | QuantizedTable:
        table = self._checkpoint.rows(self.config.architecture.embedding, 0, self.config.vocab_size)
        stored = self._blueprint.stored_embedding
        return table if stored is None else QuantizedTable(assemble(stored, {"weight": table}))

    def _head(self) -> Linear:
        plan = self._sites.get((0, "lm_head"))
        if plan is not None:
            return self.read(plan)
        table = self._embedding()
        weight = table.to(self._gather_dtype) if isinstance(table, Tensor) else table.weight
        if isinstance(weight, Tensor) and self._blueprint.head_quantize != "none":
            weight = quantize_weight(weight, self._blueprint.head_quantize, self._head_rotation())
        return HeldWeight(weight, None, self._dtype)

    def _head_rotation(self) -> int:
        return self._decoder.rotations.block(self._blueprint.head_quantize, self.config.hidden_size)

    def read(self, plan: SitePlan) -> Linear:
        """Read a site's weights, gathered and rounded as the loader does."""
        dtype = torch.float32 if plan.kind is SiteKind.ROUTER else self._dtype
        site, sinks = make_site(
            plan,
            self._blueprint.stored,
            make=lambda weight, bias: HeldWeight(weight, bias, dtype),
            dtype=self._gather_dtype,
            rotation=rotation_of(self._decoder.rotations, plan),
            device=self.device,
        )
        for stored, tensor, _ in self._checkpoint.read(frozenset(sinks)):
            sinks[stored.name](tensor)
        if site.linear is None:
            raise InvariantViolation("a linear lacks some of its tensors")
        return site.linear


class HeldWeight:
    """A linear that is read and multiplies nothing."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        if isinstance(weight, Tensor) and weight.dtype != dtype:
            largest = torch.finfo(dtype).max
            weight = weight.float().clamp(-largest, largest).to(dtype)
        if bias is not None and isinstance(weight, Tensor) and dtype != torch.float32:
            bias = half_bias(bias, chooser().choose(str(dtype).removeprefix("torch."), *weight.shape).arithmetic)
        self._weight, self.bias = weight, bias
        self.num_bytes = weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        self.out_features = weight.shape[0] if isinstance(weight, Tensor) else weight.out_features
        self.arithmetics: tuple[Arithmetic, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        raise InvariantViolation("a weight that is only read was multiplied with")

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        if isinstance(self._weight, Tensor):
            yield from float_rows(self._weight, start, end)
            return
        for first, last in row_blocks(start, end, self._weight.in_features):
            yield self._weight.rows(first, last).dequantize(torch.float32)


class _StoredLinear(HeldWeight):
    """A linear whose weights are read from the checkpoint each time."""

    def __init__(self, weights: WholeWeights, plan: SitePlan) -> None:
        self._whole, self._plan = weights, plan
        self.bias, self.num_bytes, self.arithmetics = None, 0, ()
        self.out_features = sum(module.out_features for module in plan.modules)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        yield from self._whole.read(self._plan).rows(start, end)
