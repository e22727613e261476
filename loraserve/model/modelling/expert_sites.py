"""Places in which a layer's experts gather their tensors while a checkpoint streams in.

A checkpoint has the experts of a layer in one parameter, in floats or in MXFP4, or the linears of
single experts, in any format. Either becomes two linears an expert (`expert_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from loraserve.errors import MissingTensor, ModelError, ShapeMismatch
from loraserve.model.checkpoint.blueprint import ModulePlan, SiteKind, SitePlan
from loraserve.model.checkpoint.site import MakeLinear, Site, make_site
from loraserve.model.checkpoint.stored_weights import ExpectedTensor, StoredWeight
from loraserve.model.config.quantization_scheme import Layout, Scheme
from loraserve.model.layers.experts import Expert
from loraserve.model.layers.linears import Linear
from loraserve.model.modelling.expert_modules import DOWN, GATE_UP, PlacedExperts
from loraserve_kernels.common.quantized import MXFP4_GROUP_SIZE, QuantizedWeight, powers_of_two

Round = Callable[[Tensor], Tensor | QuantizedWeight]

_BLOCK_BYTES = MXFP4_GROUP_SIZE // 2
_LINEARS = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN}
"""Linear of a single expert, by the names that most checkpoints have → its parameter."""


def stored_parameters(placed: PlacedExperts, path: str, names: Mapping[str, object]) -> dict[str, StoredWeight]:
    """Find the parameters that a checkpoint holds in MXFP4, by their paths.

    Args:
        path: the module's whole path.
        names: tensors of the checkpoint.

    Raises:
        ModelError: a weight's width isn't one of whole blocks.
    """
    found = {}
    for parameter in (GATE_UP, DOWN):
        whole = f"{path}.{parameter}"
        if f"{whole}_blocks" not in names:
            continue
        rows, columns = placed.shape(parameter)
        if columns % MXFP4_GROUP_SIZE:
            raise ModelError(
                f"{whole} has {columns} inputs, which isn't a multiple of MXFP4's blocks, {MXFP4_GROUP_SIZE}.",
                hint="Check config.json.",
            )
        groups = (placed.num_experts, rows, columns // MXFP4_GROUP_SIZE)
        tensors = {
            "_blocks": ExpectedTensor(((*groups, _BLOCK_BYTES),), ("U8",)),
            "_scales": ExpectedTensor((groups,), ("U8",)),
        }
        scheme = Scheme("mxfp4", Layout.MXFP4, MXFP4_GROUP_SIZE)
        found[whole] = StoredWeight(whole, scheme, rows, columns, tensors, num_scales=groups[2])
    return found


class ParametersSite:
    """Gathers a layer's parameters of all experts until their linears can be made.

    Args:
        path: the module's whole path.
        make: gets an expert's weight and bias.
        round_: what a float weight of an expert becomes.
    """

    def __init__(self, placed: PlacedExperts, path: str, *, make: MakeLinear, round_: Round) -> None:
        self.placed, self._path, self._make, self._round = placed, path, make, round_
        self._weights: dict[str, list[Tensor | QuantizedWeight]] = {}
        self._biases: dict[str, Tensor] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._linears: dict[str, list[Linear]] = {}

    def sinks(self, stored: Mapping[str, StoredWeight]) -> dict[str, Callable[[Tensor], None]]:
        """Map tensors to what takes them, by name in the model; of stored ones, in the file."""
        found: dict[str, Callable[[Tensor], None]] = {}
        for parameter in (GATE_UP, DOWN):
            path = f"{self._path}.{parameter}"
            if path in stored:
                for suffix in stored[path].tensors:
                    found[path + suffix] = partial(self._put_part, parameter, suffix)
            else:
                found[path] = partial(self._put_weight, parameter)
            if self.placed.has_bias:
                found[f"{path}_bias"] = partial(self._put_bias, parameter)
        return found

    def experts(self) -> list[Expert]:
        """Build the experts, after all tensors were put.

        Raises:
            MissingTensor: some weren't.
        """
        lacking = [parameter for parameter in (GATE_UP, DOWN) if parameter not in self._linears]
        if lacking:
            raise MissingTensor(
                f"The checkpoint lacks {self._path}.{lacking[0]}, or the experts' weights that it is made of.",
                hint="Fetch the checkpoint again, or check config.json.",
            )
        pairs = zip(self._linears[GATE_UP], self._linears[DOWN], strict=True)
        return [Expert(gate_up, down) for gate_up, down in pairs]

    def _put_weight(self, parameter: str, weights: Tensor) -> None:
        rows, columns = self.placed.shape(parameter)
        expected = (self.placed.num_experts, *((columns, rows) if self.placed.is_transposed else (rows, columns)))
        if tuple(weights.shape) != expected:
            raise ShapeMismatch(
                f"The weights of {self._path}.{parameter} have the shape {list(weights.shape)}; expected "
                f"{list(expected)} from config.json.",
                hint="Check that config.json belongs to this checkpoint.",
            )
        own = (weight.T if self.placed.is_transposed else weight for weight in weights)
        self._weights[parameter] = [self._round(self._in_order(parameter, weight).contiguous()) for weight in own]
        self._finish(parameter)

    def _put_bias(self, parameter: str, biases: Tensor) -> None:
        self._biases[parameter] = torch.stack([self._in_order(parameter, bias) for bias in biases.float()])
        self._finish(parameter)

    def _put_part(self, parameter: str, suffix: str, part: Tensor) -> None:
        parts = self._parts.setdefault(parameter, {})
        parts[suffix] = part
        if len(parts) == 2:
            rows, columns = self.placed.shape(parameter)
            scales = _scales(f"{self._path}.{parameter}_scales", parts["_scales"])
            self._weights[parameter] = [
                QuantizedWeight(
                    "mxfp4",
                    self._in_order(parameter, blocks.reshape(rows, columns // 2)).contiguous(),
                    self._in_order(parameter, own),
                    None,
                    MXFP4_GROUP_SIZE,
                    columns,
                    rows,
                )
                for blocks, own in zip(parts["_blocks"], scales, strict=True)
            ]
            del self._parts[parameter]
            self._finish(parameter)

    def _in_order(self, parameter: str, rows: Tensor) -> Tensor:
        """Put the gate's rows before those of up."""
        if parameter == DOWN or not self.placed.is_interleaved:
            return rows
        return torch.cat((rows[::2], rows[1::2]))

    def _finish(self, parameter: str) -> None:
        if parameter not in self._weights or (self.placed.has_bias and parameter not in self._biases):
            return
        weights, biases = self._weights.pop(parameter), self._biases.pop(parameter, None)
        linears: list[Linear] = []
        # each weight is freed once its linear is made
        while weights:
            number = self.placed.num_experts - len(weights)
            linears.append(self._make(weights.pop(0), None if biases is None else biases[number]))
        self._linears[parameter] = linears


def _scales(name: str, exponents: Tensor) -> Tensor:
    """Decode the exponents of blocks.

    Raises:
        ModelError: some mean NaN.
    """
    scales = powers_of_two(exponents)
    num_bad = int(scales.isinf().sum())
    if num_bad:
        raise ModelError(
            f"The tensor {name} has {num_bad} of {scales.numel()} scales that aren't numbers.",
            hint="Fetch the checkpoint again.",
        )
    return scales


def stored_linears(
    placed: PlacedExperts,
    path: str,
    names: Iterable[str],
    find: Callable[[str, tuple[int, int]], StoredWeight | None],
) -> dict[str, StoredWeight]:
    """Find the linears of single experts that a checkpoint holds quantized, by their paths.

    Args:
        path: the module's whole path.
        names: tensors of the checkpoint.
        find: returns how the linear of a path and a shape is stored; None: in a float dtype.
    """
    is_apart = any(name.startswith(f"{path}.0.gate_proj.") for name in names)
    if placed.is_transposed or placed.has_bias or not is_apart:
        return {}
    inner, hidden = placed.intermediate_size, placed.hidden_size
    found = {}
    for number in range(placed.num_experts):
        for name, parameter in _LINEARS.items():
            shape = (inner, hidden) if parameter == GATE_UP else (hidden, inner)
            weight = find(f"{path}.{number}.{name}", shape)
            if weight is not None:
                found[weight.path] = weight
    return found


class LinearsSite:
    """Gathers the linears of a layer's single experts, some of which are stored quantized.

    Args:
        path: the module's whole path.
        dtype: of those in floats.

    Attributes:
        sinks: what takes each tensor, by its name.
    """

    def __init__(
        self,
        placed: PlacedExperts,
        path: str,
        stored: Mapping[str, StoredWeight],
        *,
        make: MakeLinear,
        dtype: torch.dtype,
    ) -> None:
        self.placed, self._path = placed, path
        self._sites: list[tuple[str, Site]] = []
        self.sinks: dict[str, Callable[[Tensor], None]] = {}
        for number in range(placed.num_experts):
            for parameter in (GATE_UP, DOWN):
                rows, columns = placed.shape(parameter)
                names = [f"{path}.{number}.{name}" for name, of in _LINEARS.items() if of == parameter]
                modules = tuple(ModulePlan(name, rows // len(names), False) for name in names)
                plan = SitePlan(SiteKind.EXPERT, placed.layer, "", modules, columns, "none")
                site, sinks = make_site(plan, stored, make=make, dtype=dtype, rotation=0, device=torch.device("cpu"))
                self._sites.append((names[0], site))
                self.sinks |= sinks

    def experts(self) -> list[Expert]:
        """Build the experts, after all tensors were put.

        Raises:
            MissingTensor: some weren't.
        """
        linears = []
        for name, site in self._sites:
            if site.linear is None:
                raise MissingTensor(f"The checkpoint lacks a part of {name}.", hint="Fetch the checkpoint again.")
            linears.append(site.linear)
        return [Expert(gate_up, down) for gate_up, down in zip(linears[::2], linears[1::2], strict=True)]
