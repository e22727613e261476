"""Mapping from a step's rows to adapters. Built once a step, used by every layer and site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.common.packed import PackedAdapter
from loraserve_kernels.errors import InvalidPlan


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``row_start:row_end`` of the step belong to `adapter`."""

    adapter: PackedAdapter
    row_start: int
    row_end: int


@dataclass(frozen=True, slots=True, eq=False)
class LoraPlan:
    """The step's segments, in row order and disjoint.

    A row in no segment is a base row: no kernel touches it.

    The plan holds its adapters: their memory lives at least as long as the plan. It also holds the
    launches' scratch memory, so one plan serves one thread at a time.

    Attributes:
        segments: at least one.
        num_tokens: rows of the step.
        has_norms: whether an adapter of the step has norms of its own.
        has_extra_rows: whether one has rows of embedding and head beyond the base's.
        sites: sites that an adapter of the step changes anything at.
        tables: dtype that adapters are stored in → [its segments, 8] int64, what kernels read of a
            segment: row_start, row_end, the adapter's four addresses, 0, 0.
        has_experts: whether an adapter of the step changes experts.
        launches: site → what the launches of this plan at that site need; filled by the first.
    """

    segments: tuple[Segment, ...]
    num_tokens: int
    has_norms: bool
    has_extra_rows: bool
    has_experts: bool
    sites: frozenset[str]
    tables: dict[torch.dtype, npt.NDArray[np.int64]]
    launches: dict[str, object] = field(default_factory=dict)


def make_plan(segments: Sequence[tuple[PackedAdapter, int, int]], num_tokens: int) -> LoraPlan | None:
    """Make the plan of a step, or None when every row is the base's.

    So a base-only step launches no LoRA kernel.

    Args:
        segments: (adapter, row_start, row_end), in row order, disjoint, none empty. Neighbouring
            segments of one adapter are joined. Ranks, modules and dtypes may differ from adapter to
            adapter; the base may not.
        num_tokens: rows of the step.

    Raises:
        InvalidPlan: segments overlap, are out of order, are empty or go past num_tokens; adapters
            are for different bases.
    """
    if not segments:
        return None
    joined: list[Segment] = []
    end, base = 0, segments[0][0].base
    for adapter, row_start, row_end in segments:
        if not end <= row_start < row_end <= num_tokens:
            raise InvalidPlan(f"rows {row_start}:{row_end} come after row {end} of a step of {num_tokens} rows")
        if adapter.base != base:
            raise InvalidPlan(
                f"the adapter of rows {row_start}:{row_end} has layers and widths {adapter.base}, "
                f"the step's first {base}"
            )
        if joined and joined[-1].adapter is adapter and joined[-1].row_end == row_start:
            joined[-1] = Segment(adapter, joined[-1].row_start, row_end)
        else:
            joined.append(Segment(adapter, row_start, row_end))
        end = row_end
    rows: dict[torch.dtype, list[tuple[int, ...]]] = {}
    for s in joined:
        rows.setdefault(s.adapter.data.dtype, []).append((s.row_start, s.row_end, *s.adapter.addresses, 0, 0))
    tables = {dtype: np.array(table, dtype=np.int64) for dtype, table in rows.items()}
    sites = frozenset().union(*(s.adapter.sites for s in joined))
    return LoraPlan(
        tuple(joined),
        num_tokens,
        has_norms=any(s.adapter.norms for s in joined),
        has_extra_rows=any(s.adapter.extra_rows is not None for s in joined),
        has_experts=any(s.adapter.experts is not None for s in joined),
        sites=sites,
        tables=tables,
    )
