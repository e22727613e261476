"""Layers of a rank's part that end with what other ranks have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve.model.layers.experts import MixtureOfExperts
from loraserve.model.layers.linears import Linear, RoundingLinear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.norms import RMSNorm
from loraserve.model.parallel.ranks import Ranks
from loraserve.model.parallel.shard import Shard
from loraserve_kernels.common.arithmetic import Arithmetic
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu.linear.gemm import row_tops
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan


@dataclass(frozen=True, slots=True)
class RowParallelLinear(LoraLinear):
    """A linear of which each rank has some inputs: outputs are summed, adapters' part in them.

    B of an adapter is whole on each rank, and multiplies what the rank's part of A gives: there is
    no exchange apart from the base's own.
    """

    ranks: Ranks

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None) -> Tensor:
        return self.ranks.sum(LoraLinear.__call__(self, x, lora))


@dataclass(frozen=True, slots=True)
class RowRoundedTogether:
    """A linear of which each rank has some inputs, which are rounded as one process rounds the row.

    The ranks exchange the largest magnitudes of their parts, rotated where the linear rotates its
    input: codes and scales are those of the whole row.
    """

    linear: RoundingLinear
    ranks: Ranks

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return self.linear.arithmetics

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.ranks.largest(row_tops(x, self.linear.rotation)))

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        return self.linear.rows(start, end)


def rounded_together(linear: Linear, ranks: Ranks) -> Linear:
    """Wrap a linear of which each rank has some inputs; as it is where it rounds none."""
    return RowRoundedTogether(linear, ranks) if isinstance(linear, RoundingLinear) else linear


@dataclass(frozen=True, slots=True)
class VocabParallelHead(LoraLinear):
    """A head of which each rank has some tokens: rank 0 gets all logits, the others none."""

    ranks: Ranks
    vocab_size: int

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None) -> Tensor:
        parts = self.ranks.gather(LoraLinear.__call__(self, x, lora))
        if parts is None:
            return x.new_empty(0, self.vocab_size)
        return torch.cat(parts, 1)[:, : self.vocab_size].contiguous()


class SummedMlp:
    """Experts of which each rank has some inner features: outputs are summed."""

    def __init__(self, mlp: MixtureOfExperts, ranks: Ranks) -> None:
        mlp.experts = tuple(replace(expert, down=rounded_together(expert.down, ranks)) for expert in mlp.experts)
        if mlp.shared is not None:
            down = mlp.shared.down
            mlp.shared = replace(mlp.shared, down=replace(down, base=rounded_together(down.base, ranks)))
        self._mlp, self._ranks = mlp, ranks

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None, /) -> Tensor:
        return self._ranks.sum(self._mlp(x, lora))


class SplitNorm(RMSNorm):
    """An RMSNorm over the features of all ranks: lengths are summed.

    Args:
        weight: of all features.
        part: range of this rank's.
        copies: ranks that have the same features.
    """

    __slots__ = ("_copies", "_part", "_ranks")

    def __init__(self, weight: Tensor, eps: float, part: tuple[int, int], copies: int, ranks: Ranks) -> None:
        super().__init__(weight, eps)
        self._part = self._weight[part[0] : part[1]].contiguous()
        self._copies, self._ranks = math.sqrt(copies), ranks

    def __call__(self, x: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        length = self._ranks.sum(squares).sqrt_().div_(self._copies)
        return x.div(length.hypot_(self._floor)).mul_(self._part)


class VocabParallelEmbedding:
    """Rows of the embedding that a rank has, and a row of zeros for tokens that others have."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self._shard, self._ranks = shard, ranks

    def local(self, token_ids: Tensor) -> Tensor:
        """Convert the tokens to this rank's numbering."""
        first, last = self._shard.vocab
        return torch.where((token_ids >= first) & (token_ids < last), token_ids - first, self._shard.vocab_width)

    def table(self, embedding: Tensor) -> Tensor:
        """Copy this rank's part of an embedding table."""
        first, last = self._shard.vocab
        table = embedding.new_zeros(self._shard.vocab_width + 1, embedding.shape[1])
        table[: last - first] = embedding[first:last]
        return table

    def whole(self, hidden: Tensor) -> Tensor:
        """Sum all ranks' embedded rows, of each of which one rank has what isn't zero."""
        return self._ranks.sum(hidden)
