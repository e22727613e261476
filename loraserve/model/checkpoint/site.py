"""Linears with a common input.

They are gathered from a checkpoint while it's read, until they become one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from loraserve.model.checkpoint.blueprint import SitePlan
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.checkpoint.stored_weights import StoredWeight
from loraserve.model.layers.linears import JoinedLinear, Linear, quantize_weight
from loraserve_kernels.common.quantized import QuantizedWeight, concatenate

MakeLinear = Callable[[Tensor | QuantizedWeight, Tensor | None], Linear]
Cut = Callable[[Tensor | QuantizedWeight, Tensor | None, int, int], tuple[Tensor | QuantizedWeight, Tensor | None]]
"""Returns what is kept of a weight and a bias that are these rows of a site."""


@dataclass(frozen=True, slots=True)
class SiteModule:
    """Member of a site's linears.

    Attributes:
        stored: how its weight is stored; None: in a float dtype.
    """

    out_features: int
    has_bias: bool
    stored: StoredWeight | None


class Site:
    """Gathers the tensors of linears with a common input until the last is there.

    Then they become a linear, and the gathering memory is freed.

    Args:
        make: gets the fused weight and bias.
        dtype: what float weights are gathered in.
        quantize: what they're rounded to then; ``none``: they aren't. Weights that are stored
            quantized stay what they are.
        rotation: inputs of a Hadamard block by which they're rotated before; 0: they aren't.
        device: where they're rounded.
        cut: what is kept of the whole weight, once it is rounded; None: all of it.
    """

    def __init__(
        self,
        modules: Sequence[SiteModule],
        in_features: int,
        *,
        make: MakeLinear,
        dtype: torch.dtype,
        quantize: str,
        rotation: int,
        device: torch.device,
        cut: Cut | None = None,
    ) -> None:
        self._cut, self._rotation = cut, rotation
        self._modules, self._in_features = tuple(modules), in_features
        self._make, self._dtype, self._quantize, self._device = make, dtype, quantize, device
        self._first_rows = [sum(module.out_features for module in modules[:i]) for i in range(len(modules) + 1)]
        self._bias = torch.zeros(self._first_rows[-1]) if any(module.has_bias for module in modules) else None
        self._is_float = all(module.stored is None for module in modules)
        # of a site whose weights are all float: one matrix, so that nothing is copied twice
        self._fused: Tensor | None = None
        self._weights: dict[int, Tensor | QuantizedWeight] = {}
        self._parts: dict[int, dict[str, Tensor]] = {}
        self._num_missing = sum(1 + module.has_bias for module in modules)
        self.linear: Linear | None = None

    def put_bias(self, index: int, bias: Tensor) -> None:
        if self._bias is not None:
            self._bias[self._first_rows[index] : self._first_rows[index + 1]] = bias
        self._count_down()

    def put_weight(self, index: int, weight: Tensor) -> None:
        """Take a module's float weight."""
        if self._is_float and len(self._modules) == 1:
            # it is in memory of its own
            self._fused = weight.to(self._dtype)
        elif self._is_float:
            if self._fused is None:
                self._fused = torch.empty(self._first_rows[-1], self._in_features, dtype=self._dtype)
            self._fused[self._first_rows[index] : self._first_rows[index + 1]] = weight
        else:
            self._weights[index] = weight.to(self._dtype)
        self._count_down()

    def put_part(self, index: int, stored: StoredWeight, suffix: str, part: Tensor) -> None:
        """Take one tensor of a module's quantized weight.

        Raises:
            ModelError: it was the last, and they contradict each other.
        """
        parts = self._parts.setdefault(index, {})
        parts[suffix] = part
        if len(parts) == len(stored.tensors):
            self._weights[index] = assemble(stored, parts)
            del self._parts[index]
            self._count_down()

    def _count_down(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self.linear = self._finish()
            self._fused = None
            self._weights.clear()
            return_free_memory()

    def _finish(self) -> Linear:
        if self._fused is not None:
            return self._made(self._rounded(self._fused), self._bias, 0, len(self._modules))
        linears: list[Linear] = []
        for _, group in groupby(range(len(self._modules)), key=self._kind):
            indices = list(group)
            weights = [self._weights.pop(index) for index in indices]
            bias = self._bias
            if bias is not None:
                bias = bias[self._first_rows[indices[0]] : self._first_rows[indices[-1] + 1]]
            linears.append(self._made(self._joined(weights), bias, indices[0], indices[-1] + 1))
        return linears[0] if len(linears) == 1 else JoinedLinear(linears)

    def _made(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, first: int, last: int) -> Linear:
        """Make the linear of these modules."""
        if self._cut is not None:
            weight, bias = self._cut(weight, bias, self._first_rows[first], self._first_rows[last])
        return self._make(weight, bias)

    def _kind(self, index: int) -> tuple[str, int, bytes]:
        """Modules of one kind, side by side, become one weight."""
        weight = self._weights[index]
        if isinstance(weight, Tensor):
            return "", 0, b""
        order = b"" if weight.permutation is None else weight.permutation.numpy().tobytes()
        return weight.format, weight.group_size, order

    def _joined(self, weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        if len(weights) == 1:
            weight = weights[0]
            return self._rounded(weight) if isinstance(weight, Tensor) else weight
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if quantized:
            return concatenate(quantized)
        return self._rounded(torch.cat([weight for weight in weights if isinstance(weight, Tensor)]))

    def _rounded(self, weight: Tensor) -> Tensor | QuantizedWeight:
        if self._quantize == "none":
            return weight
        return quantize_weight(weight.to(self._device), self._quantize, self._rotation)


def make_site(
    plan: SitePlan,
    stored: Mapping[str, StoredWeight],
    *,
    make: MakeLinear,
    dtype: torch.dtype,
    rotation: int,
    device: torch.device,
    cut: Cut | None = None,
) -> tuple[Site, dict[str, Callable[[Tensor], None]]]:
    """Build the site of a plan, and what takes each of its tensors, by name.

    Args:
        stored: linears that the checkpoint holds quantized, by path.
        rotation: as `Site` takes it.
    """
    site = Site(
        [SiteModule(module.out_features, module.has_bias, stored.get(module.path)) for module in plan.modules],
        plan.in_features,
        make=make,
        dtype=dtype,
        quantize=plan.quantize,
        rotation=rotation,
        device=device,
        cut=cut,
    )
    sinks: dict[str, Callable[[Tensor], None]] = {}
    for index, module in enumerate(plan.modules):
        weight = stored.get(module.path)
        if weight is None:
            sinks[f"{module.path}.weight"] = partial(site.put_weight, index)
        else:
            for suffix in weight.tensors:
                sinks[f"{module.path}.{suffix}"] = partial(site.put_part, index, weight, suffix)
        if module.has_bias:
            sinks[f"{module.path}.bias"] = partial(site.put_bias, index)
    return site, sinks


def return_free_memory() -> None:
    """Release freed memory to the system.

    glibc keeps it otherwise, in pieces that the next tensors may not fit.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
