"""A layer's MLP where a router chooses, for each row, a few of many MLPs. On CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.config.model_config import ExpertsConfig
from loraserve.model.layers.linears import Linear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu.lora.experts import ExpertSegment, LayerExperts
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.ops import apply_expert_lora


@dataclass(frozen=True, slots=True)
class Expert:
    """MLP of an expert.

    Attributes:
        gate_up: both linears that share the input, side by side.
    """

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Expert that all rows pass, whose output is multiplied with ``sigmoid(gate(x))``.

    Adapters change its linears as those of an MLP.
    """

    gate_up: LoraLinear
    down: LoraLinear
    gate: Linear


class MixtureOfExperts:
    """``Σ p_e · down_e(gated(gate_up_e(x)))`` over a row's likeliest experts, and a shared one.

    The router finds which they are. A row's experts are summed in their own order, so that its bits
    don't depend on the other rows.

    Args:
        router: the experts' scores for a row.
        num_chosen: experts for each row.
        is_normed: whether the chosen ones' probabilities are scaled to sum to 1.
        gated: the backend's ``activation(gate) * up``.
        shared: None: there is none.
        layer: number of the layer whose experts these are, as adapters count it.

    Source: as transformers computes Mixtral, Qwen3-MoE and Qwen2-MoE.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[Expert],
        *,
        num_chosen: int,
        is_normed: bool,
        gated: Callable[[Tensor], Tensor],
        shared: SharedExpert | None = None,
        layer: int = 0,
    ) -> None:
        self.router, self.experts, self.shared = router, tuple(experts), shared
        self.num_chosen, self.is_normed, self.layer = num_chosen, is_normed, layer
        self._gated = gated

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None = None, /) -> Tensor:
        """Compute the rows' outputs in memory of their own, for x of the same shape.

        They are [num_tokens, hidden_size] float32. Of each expert's rows, the adapters that change
        it add what they add to those that are theirs.
        """
        adapted = LayerExperts(lora, self.layer) if isinstance(lora, LoraPlan) and lora.has_experts else None
        scores = self.router(x)
        if adapted:
            apply_expert_lora(x, scores, adapted.segments(), "router")
        weights, chosen = scores.softmax(-1).topk(self.num_chosen)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)

        def one(number: int, rows: Tensor) -> Tensor:
            # in their order, so that an adapter's are one range of them
            segments = adapted.segments(number, rows.numpy()) if adapted else ()
            return self._expert(self.experts[number], x[rows], segments)

        out = mixed(x, chosen, weights, len(self.experts), one)
        if self.shared is not None:
            weight = self.shared.gate(x)
            if adapted:
                apply_expert_lora(x, weight, adapted.segments(), "shared_gate")
            # the sigmoid as a row's softmax: torch rounds the last elements of a column otherwise
            weight = F.pad(weight, (0, 1)).softmax(-1)[:, :1]
            out += weight * self.shared.down(self._gated(self.shared.gate_up(x, lora)), lora)
        return out

    def _expert(self, expert: Expert, x: Tensor, segments: Sequence[ExpertSegment]) -> Tensor:
        gate_up = expert.gate_up(x)
        apply_expert_lora(x, gate_up, segments, "experts.gate_up")
        hidden = self._gated(gate_up)
        out = expert.down(hidden)
        apply_expert_lora(hidden, out, segments, "experts.down")
        return out

    def linear(self, site: str) -> LoraLinear | None:
        """Look up the shared expert's linears of an MLP's site; None where there is none."""
        if self.shared is None:
            return None
        return self.shared.gate_up if site == "gate_up" else self.shared.down


def mixed(
    x: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Sum the outputs of each row's experts, weighted, in the experts' order.

    Args:
        x: [num_tokens, hidden_size] float32.
        chosen: [num_tokens, n], numbers of each row's experts; weights: likewise, float32.
        expert: computes the outputs of an expert for some rows, ascending, in memory of their own.
    """
    out, num_chosen = torch.zeros_like(x), chosen.shape[1]
    # the rows' choices, expert by expert
    choices = chosen.flatten().argsort(stable=True)
    first = 0
    for number, count in enumerate(chosen.flatten().bincount(minlength=num_experts).tolist()):
        if not count:
            continue
        mine = choices[first : first + count]
        rows = mine // num_chosen
        out.index_add_(0, rows, expert(number, rows).mul_(weights.flatten()[mine, None]))
        first += count
    return out


def make_mixture(
    config: ExpertsConfig,
    routers: Sequence[Linear],
    linears: Sequence[Linear],
    gated: Callable[[Tensor], Tensor],
    layer: int = 0,
) -> MixtureOfExperts:
    """Build a layer's mixture of what its checkpoint holds.

    Args:
        routers: the router, and the gate of the shared expert where there is one.
        linears: each expert's gate and up, then its down; the shared expert's last.
        layer: number of the layer, as adapters count it.
    """
    experts = [Expert(gate_up, down) for gate_up, down in zip(linears[::2], linears[1::2], strict=True)]
    shared = None
    if config.shared_intermediate_size is not None:
        last = experts.pop()
        gate_up, down = LoraLinear(last.gate_up, "gate_up", layer), LoraLinear(last.down, "down", layer)
        shared = SharedExpert(gate_up, down, routers[1])
    return MixtureOfExperts(
        routers[0],
        experts,
        num_chosen=config.num_chosen,
        is_normed=config.is_normed,
        gated=gated,
        shared=shared,
        layer=layer,
    )
