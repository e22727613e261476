"""A rank's part of a base, as the loader builds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
)
from loraserve.model.parallel.ranks import Ranks
from loraserve.model.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds, and how its layers end with what others hold."""

    shard: Shard
    ranks: Ranks

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(self.shard, self.ranks)

    def linear(self, base: Linear, site: str, layer: int) -> LoraLinear:
        """Return a layer's linears of this part."""
        if site in ("o", "down"):
            return RowParallelLinear(base, site, layer, self.ranks)
        return LoraLinear(base, site, layer)

    def head(self, base: Linear) -> LoraLinear:
        """Return the head of this part."""
        return VocabParallelHead(base, "lm_head", 0, self.ranks, self.shard.whole.vocab_size)

    def experts(self, mlp: Mlp) -> Mlp:
        """Return experts of which this part has some inner features."""
        return SummedMlp(mlp, self.ranks)

    def head_norm(self, weight: Tensor, eps: float, *, is_query: bool) -> RMSNorm:
        """Return the norm of queries or keys: of each head, or of all ranks' heads together."""
        shard = self.shard
        if not shard.whole.architecture.is_qk_norm_whole:
            return RMSNorm(weight, eps)
        if is_query:
            return SplitNorm(weight, eps, shard.q_part, 1, self.ranks)
        return SplitNorm(weight, eps, shard.k_part, shard.kv_copies, self.ranks)
