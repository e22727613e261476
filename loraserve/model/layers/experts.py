"""A layer's MLP where a router chooses, for each row, a few of many MLPs. On CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.model.layers.linears import Linear


@dataclass(frozen=True, slots=True)
class Expert:
    """MLP of an expert.

    Attributes:
        gate_up: both linears that share the input, side by side.
    """

    gate_up: Linear
    down: Linear


class MixtureOfExperts:
    """``Σ p_e · down_e(gated(gate_up_e(x)))`` over a row's likeliest experts.

    The router finds which they are. A row's experts are summed in their own order, so that its bits
    don't depend on the other rows.

    Args:
        router: the experts' scores for a row.
        num_chosen: experts for each row.
        is_normed: whether the chosen ones' probabilities are scaled to sum to 1.
        gated: the backend's ``activation(gate) * up``.

    Source: as transformers computes Mixtral and Qwen3-MoE.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[Expert],
        *,
        num_chosen: int,
        is_normed: bool,
        gated: Callable[[Tensor], Tensor],
    ) -> None:
        self.router, self.experts = router, tuple(experts)
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
        return out
