"""A process among those that share a base: its rank, and its ends of what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve.model.config.model_config import ModelConfig
from loraserve.model.parallel.grid import Grid, RankPlace
from loraserve.model.parallel.part_facts import PartFacts
from loraserve.model.parallel.pipe import Pipe
from loraserve.model.parallel.ranks import Ranks
from loraserve.model.parallel.traffic import Traffic

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Share = Callable[[PartFacts], Sequence[PartFacts]]
"""Sends the others this part's facts; returns all parts' facts on rank 0, in the order of their
stages, and this one's alone on other ranks.
"""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A process of a group.

    Attributes:
        ranks: with those that have other parts of the same layers; None: there are none.
        pipe: with the stages before and after; None: there is one stage.
        share: of a pipeline, whose stages read their own tensors alone.
    """

    rank: int
    grid: Grid
    ranks: Ranks | None
    pipe: Pipe | None
    share: Share

    def place(self, whole: ModelConfig) -> RankPlace:
        """Compute what this process holds of a base."""
        return self.grid.place(self.rank, whole)


def join(grid: Grid, rank: int, store: Store, share: Share, traffic: Traffic | None = None) -> GroupMember:
    """Join the group of a base; returns once all processes have.

    Args:
        store: where they find each other.
        traffic: counts what this process exchanges.

    Raises:
        RuntimeError: another process didn't come.
    """
    from torch._C._distributed_c10d import PrefixStore

    shard, stage = grid.shard_index(rank), grid.stage_index(rank)
    traffic = Traffic() if traffic is None else traffic
    ranks = pipe = None
    if grid.tensor > 1:
        ranks = Ranks(shard, grid.tensor, PrefixStore(f"stage-{stage}", store), traffic)
    if grid.pipeline > 1:
        pipe = Pipe(stage, grid.pipeline, PrefixStore(f"pipe-{shard}", store), traffic)
    return GroupMember(rank, grid, ranks, pipe, share)
