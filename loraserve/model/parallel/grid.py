"""Ranks of the processes that share a base, and what each holds of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loraserve.config import EngineConfig
from loraserve.model.config.model_config import ModelConfig
from loraserve.model.parallel.shard import Shard
from loraserve.model.parallel.stage import Stage
from loraserve_kernels.common.cuts import PartCut


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank of a process, and its part of a base: of some layers a part of each linear."""

    rank: int
    shard: Shard
    stage: Stage

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Module → (out_features, in_features) of this part."""
        return self.shard.modules

    @property
    def cut(self) -> PartCut:
        """Part of each adapter."""
        layers, stage = self.stage.layers, self.stage
        modules = {
            module: cut
            for module, cut in self.shard.cuts.items()
            if (module != "embed_tokens" or stage.is_first) and (module != "lm_head" or stage.is_last)
        }
        return PartCut((layers.start, layers.stop), modules, stage.is_last)

    def kv_block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Compute the bytes of this part of a KV block: keys and values of its heads and layers."""
        config = self.shard.config
        return 2 * len(self.stage.layers) * config.num_kv_heads * block_size * config.head_dim * item_bytes


@dataclass(frozen=True, slots=True)
class Grid:
    """Processes that share a base: stages of a pipeline, each of several ranks.

    The first ranks are the last stage's: rank 0 schedules and samples, and has the logits then. The
    others follow in the order of their stages.

    Attributes:
        tensor: ranks of a stage, each with a part of its linears.
        pipeline: stages.
    """

    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> Grid:
        """Build the grid of processes that an engine is configured to be."""
        return cls(config.tensor_parallel, config.pipeline_parallel)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline

    def shard_index(self, rank: int) -> int:
        """Compute which part of each linear a rank has."""
        return rank % self.tensor

    def stage_index(self, rank: int) -> int:
        """Compute which stage a rank is of."""
        return (rank // self.tensor - 1) % self.pipeline

    def place(self, rank: int, whole: ModelConfig) -> RankPlace:
        """Compute what a rank holds of a base."""
        return RankPlace(
            rank,
            Shard(self.shard_index(rank), self.tensor, whole),
            Stage(self.stage_index(rank), self.pipeline, whole),
        )

    def places(self, whole: ModelConfig) -> Iterator[RankPlace]:
        """Yield what each rank holds of a base, in the ranks' order."""
        return (self.place(rank, whole) for rank in range(self.size))
