"""A layer's MLP where a router chooses, for each row, a few of many MLPs. On CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.config.model_config import ExpertsConfig
from loraserve.model.layers.linears import Linear


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
    """Expert that all rows pass, whose output is multiplied with ``sigmoid(gate(x))``."""

    expert: Expert
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
    ) -> None:
        self.router, self.experts, self.shared = router, tuple(experts), shared
        self.num_chosen, self.is_normed = num_chosen, is_normed
        self._gated = gated

    def __call__(self, x: Tensor, _: object = None, /) -> Tensor:
        """Return the rows' outputs in memory of their own, for x of the same shape.

        They are [num_tokens, hidden_size] float32. No adapter acts here.
        """
        weights, chosen = self.router(x).softmax(-1).topk(self.num_chosen)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        # the rows' choices, expert by expert
        choices = chosen.flatten().argsort(stable=True)
        first = 0
        for expert, count in zip(
            self.experts, chosen.flatten().bincount(minlength=len(self.experts)).tolist(), strict=True
        ):
            if not count:
                continue
            mine = choices[first : first + count]
            rows = mine // self.num_chosen
            y = expert.down(self._gated(expert.gate_up(x[rows])))
            out.index_add_(0, rows, y.mul_(weights.flatten()[mine, None]))
            first += count
        if self.shared is not None:
            expert = self.shared.expert
            # the sigmoid as a row's softmax: torch rounds the last elements of a column otherwise
            weight = F.pad(self.shared.gate(x), (0, 1)).softmax(-1)[:, :1]
            out += weight * expert.down(self._gated(expert.gate_up(x)))
        return out


def make_mixture(
    config: ExpertsConfig, routers: Sequence[Linear], linears: Sequence[Linear], gated: Callable[[Tensor], Tensor]
) -> MixtureOfExperts:
    """Return a layer's mixture of what its checkpoint holds.

    Args:
        routers: the router, and the gate of the shared expert where there is one.
        linears: each expert's gate and up, then its down; the shared expert's last.
    """
    experts = [Expert(gate_up, down) for gate_up, down in zip(linears[::2], linears[1::2], strict=True)]
    shared = None
    if config.shared_intermediate_size is not None:
        shared = SharedExpert(experts.pop(), routers[1])
    return MixtureOfExperts(
        routers[0], experts, num_chosen=config.num_chosen, is_normed=config.is_normed, gated=gated, shared=shared
    )
