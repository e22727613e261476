"""A checkpoint's own weights as a `ReferenceBase`.

They are float32 as the files mean them, rounded to nothing, and read a block of rows at a time
while they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.model.checkpoint.blueprint import Blueprint, ModulePlan, SiteKind, SitePlan, draw, shared_expert
from loraserve.model.checkpoint.files import Checkpoint, open_checkpoint
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.config.model_config import ActivationFunction, read_config
from loraserve.model.layers.experts import MixtureOfExperts, make_mixture
from loraserve.model.layers.norms import geglu, swiglu
from loraserve_kernels.common.arithmetic import FLOATS, ActivationRounding, Arithmetic
from loraserve_kernels.common.row_blocks import row_blocks
from loraserve_kernels.cpu.lora.layout import SITES

_BLOCK_WEIGHTS = 1 << 22
"""Read at a time: 16 MiB in float32.

A weight that is stored quantized is in memory whole, in its few bits.
"""


class OriginalBase:
    """The base of a directory, of which nothing but norms stays in memory.

    Attributes:
        config: its shapes.
        device: where blocks of weights go, to be multiplied.
    """

    def __init__(self, model_dir: Path, device: torch.device, max_model_len: int | None = None) -> None:
        """Read the headers and check them.

        Args:
            max_model_len: the longest context that is served; None: the config's.

        Raises:
            UnknownArchitecture, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is
                wrong with the directory, and where.
        """
        config = read_config(model_dir)
        self.config, self.device = config.for_context(max_model_len or config.max_model_len), device
        self._checkpoint = open_checkpoint(model_dir)
        self._blueprint = draw(self.config, self._checkpoint.tensors, "none")
        self._sites: dict[tuple[int, str], StreamedLinear] = {}
        self._routers: dict[int, list[StreamedLinear]] = {}
        self._experts: dict[int, list[StreamedLinear]] = {}
        self._head: StreamedLinear | None = None
        for plan in self._blueprint.sites:
            self._add(plan)

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Module of a layer → (out_features, in_features), the shared expert's among them."""
        shared = {module: shape for module, (_, shape) in shared_expert(self.config).items()}
        return {**shared, **self.config.module_shapes}

    @property
    def stored_formats(self) -> list[str]:
        """Formats that the checkpoint is quantized to; empty if its weights are floats."""
        return self._blueprint.stored_formats

    @property
    def files(self) -> list[Path]:
        """Files that hold the weights."""
        return sorted({stored.file for stored in self._checkpoint.tensors.values()})

    def _add(self, plan: SitePlan) -> None:
        linear = StreamedLinear(plan, self._blueprint, self._checkpoint, self.device)
        match plan.kind:
            case SiteKind.HEAD:
                self._head = linear
            case SiteKind.ROUTER:
                self._routers.setdefault(plan.layer, []).append(linear)
            case SiteKind.EXPERT:
                self._experts.setdefault(plan.layer, []).append(linear)
            case SiteKind.LAYER:
                self._sites[plan.layer, plan.name] = linear

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield modules' weights, float32, a block of rows at a time, in order.

        `Decoder.weight_rows` does the same.
        """
        if modules == ("embed_tokens",) or (modules == ("lm_head",) and self._head is None):
            name = self.config.architecture.embedding
            stored = self._blueprint.stored_embedding
            for first, last in row_blocks(0, self.config.vocab_size, self.config.hidden_size, _BLOCK_WEIGHTS):
                block = self._checkpoint.rows(name, first, last)
                if stored is not None:
                    rows = replace(stored, out_features=last - first)
                    block = assemble(rows, {"weight": block}).dequantize(torch.float32)
                yield block.to(self.device, torch.float32)
            return
        if modules == ("lm_head",) and self._head is not None:
            yield from self._head.rows(0, self.config.vocab_size)
            return
        site, start = self._site(layer, modules[0])
        size = sum(self._shapes[module][0] for module in modules)
        yield from site.rows(start, start + size)

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, [out_features] float32; None where it has none."""
        if module not in self.config.module_shapes or not self.config.has_bias(module):
            return None
        site, start = self._site(layer, module)
        bias = site.bias
        return None if bias is None else bias[start : start + self.config.module_shapes[module][0]]

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Return None: no product rounds its input."""
        return None

    def experts(self, layer: int) -> MixtureOfExperts | None:
        """Build what stands in the place of a layer's MLP; None where that is an MLP."""
        experts = self.config.experts
        if experts is None:
            return None
        gated = swiglu if self.config.activation is ActivationFunction.SILU else geglu
        return make_mixture(experts, self._routers[layer], self._experts[layer], gated)

    def norm_weight(self, name: str) -> Tensor:
        """Read what a norm multiplies with, float32, by the name of its tensor."""
        weight = self._checkpoint.rows(name, 0, self._checkpoint.tensors[name].shape[0]).float()
        return weight + self.config.architecture.norm_offset

    def modules_of(self, plan: SitePlan) -> tuple[str, ...]:
        """List the modules of a layer's site, in the order of their rows."""
        return SITES[plan.name]

    def site_rows(self, plan: SitePlan) -> Iterator[Tensor]:
        """Yield a site's whole weight, float32, a block of rows at a time, in order."""
        return StreamedLinear(plan, self._blueprint, self._checkpoint, self.device).rows(
            0, sum(module.out_features for module in plan.modules)
        )

    def _site(self, layer: int, module: str) -> tuple[StreamedLinear, int]:
        """Find the site that a layer's module is a part of, and the module's first row."""
        site, modules = next((site, modules) for site, modules in SITES.items() if module in modules)
        if (layer, site) not in self._sites and module in self._shapes:
            # of the shared expert, which comes last
            gate_up, down = self._experts[layer][-2:]
            start = self._shapes[module][0] if module == "up_proj" else 0
            return down if site == "down" else gate_up, start
        if (layer, site) not in self._sites:
            raise InvariantViolation(f"{module} of layer {layer} was asked for, which this base doesn't have.")
        start = sum(self.config.module_shapes[before][0] for before in modules[: modules.index(module)])
        return self._sites[layer, site], start


class StreamedLinear:
    """Linears with a common input, read while they are multiplied.

    Attributes:
        plan: of them.
    """

    def __init__(self, plan: SitePlan, blueprint: Blueprint, checkpoint: Checkpoint, device: torch.device) -> None:
        self.plan, self._stored, self._checkpoint, self._device = plan, blueprint.stored, checkpoint, device
        self._ends = list(accumulate(module.out_features for module in plan.modules))
        self.out_features, self.num_bytes = self._ends[-1], 0

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        """Arithmetic that it is computed with: float32."""
        return (Arithmetic(FLOATS["float32"], "torch", "any"),)

    @property
    def bias(self) -> Tensor | None:
        """Bias of all linears together; None where none has one.

        It is [out_features] float32 on the device.
        """
        if not any(module.has_bias for module in self.plan.modules):
            return None
        return torch.cat([self._module_bias(module) for module in self.plan.modules])

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([x @ block.T for block in self.rows(0, self.out_features)], dim=1)
        bias = self.bias
        return y if bias is None else y + bias

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows, float32 on the device, a block at a time, in order."""
        for module, last in zip(self.plan.modules, self._ends, strict=True):
            first = last - module.out_features
            if first < end and last > start:
                blocks = self._module_rows(module, max(start - first, 0), min(end, last) - first)
                yield from (block.to(self._device, torch.float32) for block in blocks)

    def _module_rows(self, module: ModulePlan, start: int, end: int) -> Iterator[Tensor]:
        stored, width = self._stored.get(module.path), self.plan.in_features
        if stored is None:
            for first, last in row_blocks(start, end, width, _BLOCK_WEIGHTS):
                yield self._checkpoint.rows(f"{module.path}.weight", first, last)
            return
        names = {f"{module.path}.{suffix}": suffix for suffix in stored.tensors}
        parts = {names[entry.name]: tensor for entry, tensor, _ in self._checkpoint.read(frozenset(names))}
        weight = assemble(stored, parts)
        for first, last in row_blocks(start, end, width, _BLOCK_WEIGHTS):
            yield weight.rows(first, last).dequantize(torch.float32)

    def _module_bias(self, module: ModulePlan) -> Tensor:
        if not module.has_bias:
            return torch.zeros(module.out_features, device=self._device)
        return self._checkpoint.rows(f"{module.path}.bias", 0, module.out_features).to(self._device, torch.float32)
