"""Which rows of a step belong to which adapter. Built once a step, used by every layer and site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraserve_kernels.errors import InvalidPlan
from loraserve_kernels.layout import PackedAdapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``row_start:row_end`` of the step belong to `adapter`."""

    adapter: PackedAdapter
    row_start: int
    row_end: int


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The step's segments, in row order and disjoint. A row in no segment is a base row: no kernel touches it.

    The plan holds its adapters: their memory lives at least as long as the plan.
    """

    segments: tuple[Segment, ...]
    num_tokens: int


def make_plan(segments: Sequence[tuple[PackedAdapter, int, int]], num_tokens: int) -> LoraPlan | None:
    """Make the plan of a step, or None when every row is the base's, so that a base-only step launches no LoRA kernel.

    Args:
        segments: (adapter, row_start, row_end), in row order, disjoint, none empty. Neighbouring segments of one adapter are joined.
        num_tokens: rows of the step.

    Raises:
        InvalidPlan: segments overlap, are out of order, are empty or go past num_tokens.
    """
    joined: list[Segment] = []
    end = 0
    for adapter, row_start, row_end in segments:
        if not end <= row_start < row_end <= num_tokens:
            raise InvalidPlan(f"rows {row_start}:{row_end} come after row {end} of a step of {num_tokens} rows")
        if joined and joined[-1].adapter is adapter and joined[-1].row_end == row_start:
            joined[-1] = Segment(adapter, joined[-1].row_start, row_end)
        else:
            joined.append(Segment(adapter, row_start, row_end))
        end = row_end
    return LoraPlan(tuple(joined), num_tokens) if joined else None
