"""Experts that modelling code has in parameters of all of them, as linears of this engine.

Transformers 5 keeps a mixture's weights in two parameters, ``gate_up_proj`` and ``down_proj``, with
a row of the first dimension for each expert. Here each expert has two linears, in any format that
linears have, to which the step's adapters add. How gate and up become one is the code's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loraserve.adapters.format.expert_names import PARAMETERS
from loraserve.model.layers.experts import Expert, mixed
from loraserve.model.layers.linears import Linear
from loraserve.model.modelling.modelled_pass import Current
from loraserve.model.modelling.modules import RunningStep
from loraserve.model.modelling.skeleton import Skeleton
from loraserve.types import ExpertsSpec
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu.lora.experts import LayerExperts
from loraserve_kernels.ops import apply_expert_lora

GATE_UP, DOWN = (name for name, _ in PARAMETERS)


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
