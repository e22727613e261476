"""Experts that modelling code has in parameters of all of them, as linears of this engine.

Transformers 5 keeps a mixture's weights in two parameters, ``gate_up_proj`` and ``down_proj``, with
a row of the first dimension for each expert. Here each expert has two linears, in any format that
linears have, to which the step's adapters add. How gate and up become one is the code's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loraserve.adapters.format.expert_names import PARAMETERS
from loraserve.errors import MissingTensor, ModelError, ShapeMismatch
from loraserve.model.checkpoint.blueprint import ModulePlan, SiteKind, SitePlan
from loraserve.model.checkpoint.site import MakeLinear, Site, make_site
from loraserve.model.checkpoint.stored_weights import ExpectedTensor, StoredWeight
from loraserve.model.config.quantization_scheme import Layout, Scheme
from loraserve.model.layers.experts import Expert, mixed
from loraserve.model.layers.linears import Linear
from loraserve.model.modelling.modelled_pass import Current
from loraserve.model.modelling.modules import RunningStep
from loraserve.model.modelling.skeleton import Skeleton
from loraserve.types import ExpertsSpec
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.common.quantized import MXFP4_GROUP_SIZE, QuantizedWeight, powers_of_two
from loraserve_kernels.cpu.lora.experts import LayerExperts
from loraserve_kernels.ops import apply_expert_lora

GATE_UP, DOWN = (name for name, _ in PARAMETERS)
_BLOCK_BYTES = MXFP4_GROUP_SIZE // 2

Round = Callable[[Tensor], Tensor | QuantizedWeight]


@dataclass(frozen=True, slots=True)
class PlacedExperts:
    """Module with the weights of all experts of a layer.

    Attributes:
        path: inside the layer.
        module: the code's own.
        is_transposed: whether an expert's weight is [in_features, out_features].
        is_interleaved: whether rows of gate and up take turns.
    """

    layer: int
    path: str
    module: Any
    num_experts: int
    hidden_size: int
    intermediate_size: int
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool

    def shape(self, parameter: str) -> tuple[int, int]:
        """Compute (out_features, in_features) of an expert's part of a parameter."""
        inner, hidden = self.intermediate_size, self.hidden_size
        return (2 * inner, hidden) if parameter == GATE_UP else (hidden, inner)

    @property
    def num_weights(self) -> int:
        """Number of weights and biases of all experts."""
        shapes = [self.shape(parameter) for parameter in (GATE_UP, DOWN)]
        return self.num_experts * sum(rows * (columns + self.has_bias) for rows, columns in shapes)


def place_experts(skeleton: Skeleton) -> list[PlacedExperts]:
    """Find the modules of experts whose layout transformers states, in order."""
    found = []
    for layer, path, module in skeleton.layer_modules():
        names = {name for name, _ in module.named_parameters(recurse=False)}
        biases = {f"{GATE_UP}_bias", f"{DOWN}_bias"}
        has_bias = bool(getattr(module, "has_bias", False))
        if names != {GATE_UP, DOWN, *(biases if has_bias else ())} or getattr(module, "has_post_expert_norm", True):
            continue
        if not getattr(module, "has_gate", False) or module.get_parameter(GATE_UP).dim() != 3:
            continue
        is_transposed = bool(module.is_transposed)
        num_experts, *sizes = module.get_parameter(DOWN).shape
        inner, hidden = sizes if is_transposed else reversed(sizes)
        found.append(
            PlacedExperts(
                layer,
                path,
                module,
                num_experts,
                hidden,
                inner,
                is_transposed,
                not module.is_concatenated,
                has_bias,
            )
        )
    return found


def experts_spec(placed: Sequence[PlacedExperts], num_layers: int) -> ExpertsSpec | None:
    """Describe the mixtures as adapters change them.

    None: adapters may not, since layers lack them or differ.
    """
    kinds = {(one.path, one.num_experts, one.shape(GATE_UP), one.is_interleaved) for one in placed}
    if len(kinds) != 1 or [one.layer for one in placed] != list(range(num_layers)):
        return None
    one = placed[0]
    inner, hidden = one.intermediate_size, one.hidden_size
    return ExpertsSpec(
        num_experts=one.num_experts,
        modules={
            "experts.gate_proj": (inner, hidden),
            "experts.up_proj": (inner, hidden),
            "experts.down_proj": (hidden, inner),
            "router": (one.num_experts, hidden),
        },
        # the code has neither linears of single experts, nor a router that adapters may change
        module_paths={},
        parameters_path=one.path,
        is_interleaved=one.is_interleaved,
    )


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


_LINEARS = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN}
"""Linear of a single expert, by the names that most checkpoints have → its parameter."""


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


class AdaptedExperts(nn.Module):
    """Experts of a layer, to which the step's adapters add.

    Attributes:
        placed: what they stand in the place of.
        experts: by number.
    """

    def __init__(self, placed: PlacedExperts, experts: Sequence[Expert], step: RunningStep) -> None:
        super().__init__()
        self.placed, self.experts, self._step = placed, tuple(experts), step
        self._gate = code_gate(placed)

    def linears(self) -> Iterator[Linear]:
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).float().contiguous()
        lora = self._step.rows.lora
        adapted = LayerExperts(lora, self.placed.layer) if isinstance(lora, LoraPlan) and lora.has_experts else None

        def one(number: int, rows: Tensor) -> Tensor:
            # in their order, so that an adapter's are one range of them
            segments = adapted.segments(number, rows.numpy()) if adapted else ()
            expert, own = self.experts[number], x[rows]
            gate_up = expert.gate_up(own)
            apply_expert_lora(own, gate_up, segments, "experts.gate_up")
            inner = self._gate(gate_up)
            out = expert.down(inner)
            apply_expert_lora(inner, out, segments, "experts.down")
            return out

        return mixed(x, top_k_index, top_k_weights.float(), len(self.experts), one).view_as(hidden_states)


class ReferenceExperts(nn.Module):
    """Experts of a layer in a reference model."""

    def __init__(self, placed: PlacedExperts, experts: Sequence[Expert], current: Current) -> None:
        super().__init__()
        self._placed, self._experts, self._current = placed, tuple(experts), current
        self._gate = code_gate(placed)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, run = hidden_states.reshape(-1, hidden_states.shape[-1]).float(), self._current.running
        layer, out = self._placed.layer, torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            rows, places = (top_k_index == number).nonzero(as_tuple=True)
            if not len(rows):
                continue
            gate_up = run.expert(x[rows], expert.gate_up, layer, ("gate_proj", "up_proj"), number, rows)
            y = run.expert(self._gate(gate_up), expert.down, layer, ("down_proj",), number, rows)
            out[rows] += y * top_k_weights[rows, places, None]
        return out.view_as(hidden_states)


def code_gate(placed: PlacedExperts) -> Callable[[Tensor], Tensor]:
    """Wrap the code's own function of gate and up, for outputs in which gate's come first.

    They are contiguous, as products take them.
    """
    module = placed.module

    def gate(gate_up: Tensor) -> Tensor:
        if placed.is_interleaved:
            gate_up = torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2)
        inner: Tensor = module._apply_gate(gate_up)
        return inner.contiguous()

    return gate
