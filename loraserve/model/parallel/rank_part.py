"""A rank's part of a base, as the loader builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.layers.experts import MixtureOfExperts
from loraserve.model.layers.linears import Linear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import Mlp
from loraserve.model.layers.norms import RMSNorm
from loraserve.model.parallel.layers import (
    RowParallelLinear,
    SplitNorm,
    SummedMlp,
    VocabParallelEmbedding,
    VocabParallelHead,
    rounded_together,
)
from loraserve.model.parallel.ranks import Ranks
from loraserve.model.parallel.shard import Range, Shard, SiteCut
from loraserve_kernels.common.quantized import QuantizedWeight, concatenate

Weight = Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class RankPart:
    """Layers that a rank holds, and how its layers end with what others hold."""

    shard: Shard
    ranks: Ranks

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(self.shard, self.ranks)

    def linear(self, base: Linear, site: str, layer: int) -> LoraLinear:
        """Build a layer's linears of this part."""
        if site in ("o", "down"):
            return RowParallelLinear(rounded_together(base, self.ranks), site, layer, self.ranks)
        return LoraLinear(base, site, layer)

    def head(self, base: Linear) -> LoraLinear:
        """Build the head of this part."""
        return VocabParallelHead(base, "lm_head", 0, self.ranks, self.shard.whole.vocab_size)

    def experts(self, mlp: MixtureOfExperts) -> Mlp:
        """Wrap experts of which this part has some inner features."""
        return SummedMlp(mlp, self.ranks)

    def head_norm(self, weight: Tensor, eps: float, *, is_query: bool) -> RMSNorm:
        """Build the norm of queries or keys: of each head, or of all ranks' heads together."""
        shard = self.shard
        if not shard.whole.architecture.is_qk_norm_whole:
            return RMSNorm(weight, eps)
        if is_query:
            return SplitNorm(weight, eps, shard.q_part, 1, self.ranks)
        return SplitNorm(weight, eps, shard.k_part, shard.kv_copies, self.ranks)


def cut_site(cut: SiteCut, weight: Weight, bias: Tensor | None, first: int, last: int) -> tuple[Weight, Tensor | None]:
    """Cut a rank's part out of a weight and a bias that are these rows of a site.

    They are cut after they are quantized: codes and scales are the whole one's. Of linears of
    several kinds at one site, each weight has some of its rows.
    """
    rows = cut.rows_in(first, last)
    if rows is not None:
        weight = _rows(weight, rows)
        bias = None if bias is None else torch.cat([bias[start:end] for start, end in rows])
    if cut.columns is not None:
        weight = _columns(weight, cut.columns)
    return weight, bias if cut.has_bias else None


def _rows(weight: Weight, rows: Sequence[Range]) -> Weight:
    if isinstance(weight, Tensor):
        return torch.cat([weight[start:end] for start, end in rows])
    return concatenate([weight.rows(start, end) for start, end in rows])


def _columns(weight: Weight, columns: Range) -> Weight:
    start, end = columns
    if isinstance(weight, Tensor):
        return weight[:, start:end].contiguous()
    if weight.permutation is not None:
        raise ModelError(
            "A linear's inputs are quantized in another order than they stand (g_idx), which can't be cut between "
            "ranks.",
            hint="Leave --tensor-parallel out, or give a checkpoint with desc_act false.",
        )
    per_code = 2 if weight.is_packed else 1
    is_by_channel = not weight.has_groups
    group = weight.group_size
    groups = slice(None) if is_by_channel else slice(start // group, end // group)
    return QuantizedWeight(
        weight.format,
        weight.codes[:, start // per_code : end // per_code].contiguous(),
        weight.scales[:, groups],
        None if weight.zeros is None else weight.zeros[:, groups],
        end - start if is_by_channel else group,
        end - start,
        weight.out_features,
        weight.rotation,
    )
