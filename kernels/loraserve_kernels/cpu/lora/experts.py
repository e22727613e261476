"""LoRA on a mixture of experts, on a CPU.

An expert sees some of a step's rows, gathered and in their order, so that an adapter's are one
range of them. Each expert's rows are one launch of the kernel that the linears of layers have, in
which every adapter that changes the expert has a segment. Nothing is padded: neither to a rank, nor
to experts that an adapter leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.packed import PackedAdapter, PackedExperts
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.common.sites import EXPERT_INDEX, EXPERT_SITES
from loraserve_kernels.common.sizes import RANK
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora import apply


@dataclass(frozen=True, slots=True)
class ExpertSegment:
    """Rows ``row_start:row_end`` of an expert's that belong to an adapter which changes it.

    Attributes:
        record: the expert's row of the adapter's records.
    """

    adapter: PackedAdapter
    experts: PackedExperts
    record: int
    row_start: int
    row_end: int


class LayerExperts:
    """Rows of a step whose adapters change a layer's experts, or what chooses them."""

    def __init__(self, plan: LoraPlan, layer: int) -> None:
        self._layer = layer
        self._segments = [
            (s.adapter, s.adapter.experts, s.row_start, s.row_end)
            for s in plan.segments
            if s.adapter.experts is not None and layer in s.adapter.experts.layers
        ]
        self._bounds = np.array([bounds for _, _, *bounds in self._segments], dtype=np.int64).reshape(-1, 2)

    def __bool__(self) -> bool:
        return bool(self._segments)

    def segments(self, expert: int = 0, rows: npt.NDArray[np.int64] | None = None) -> list[ExpertSegment]:
        """List the segments of an expert's rows.

        Args:
            expert: its number; 0 for what isn't an expert's.
            rows: the step's rows that pass it, ascending; None: all.
        """
        bounds = self._bounds if rows is None else np.searchsorted(rows, self._bounds)
        found = []
        for (adapter, experts, _, _), (start, end) in zip(self._segments, bounds.tolist(), strict=True):
            record = experts.rows.get((self._layer, expert)) if start < end else None
            if record is not None:
                found.append(ExpertSegment(adapter, experts, record, start, end))
        return found


def apply_expert_lora(x: Tensor, y: Tensor, segments: Sequence[ExpertSegment], site: str) -> None:
    """`ops.apply_expert_lora` by the fastest way that this machine has.

    Tensors are taken as checked.
    """
    if apply.HAS_NUMBA:
        _apply_numba(x, y, segments, site)
    else:
        apply_expert_lora_torch(x, y, segments, site)


def apply_expert_lora_torch(x: Tensor, y: Tensor, segments: Sequence[ExpertSegment], site: str) -> None:
    """`ops.apply_expert_lora` in PyTorch, segment by segment."""
    for segment in segments:
        adapter, rows, column = segment.adapter, slice(segment.row_start, segment.row_end), 0
        place = next(place for place, record in segment.experts.rows.items() if record == segment.record)
        for module in EXPERT_SITES[site]:
            width = segment.experts.out_features[EXPERT_INDEX[module]]
            part = y[rows, column : column + width]
            key = (place[0], module, place[1])
            a, b = adapter.lora_a(*key), adapter.lora_b(*key)
            delta, shift = adapter.dora_delta(*key), adapter.bias_delta(*key)
            if a.shape[0]:
                part.addmm_(x[rows] @ a.to(x.dtype).T * adapter.scaling(*key), b.to(y.dtype))
            if delta is not None:
                part.addcmul_(part, delta)
            if shift is not None:
                part.add_(shift)
            column += width


def _apply_numba(x: Tensor, y: Tensor, segments: Sequence[ExpertSegment], site: str) -> None:
    from loraserve_kernels.cpu.lora import kernel as lora_kernel

    first, count = EXPERT_INDEX[EXPERT_SITES[site][0]], len(EXPERT_SITES[site])
    by_dtype: dict[torch.dtype, list[ExpertSegment]] = {}
    for segment in segments:
        by_dtype.setdefault(segment.adapter.data.dtype, []).append(segment)
    for dtype, some in by_dtype.items():
        table = np.zeros((len(some), lora_kernel.SEGMENT_WORDS), dtype=np.int64)
        most_ranks, num_bytes, shapes = 1, 0, some[0].experts
        widths = shapes.out_features[first : first + count]
        for row, s in zip(table, some, strict=True):
            data, floats, row_ids, _ = s.adapter.addresses
            records = s.experts.records[s.record, first : first + count]
            row[:6] = (s.row_start, s.row_end, data, floats, row_ids, records.ctypes.data)
            ranks = records[:, RANK].tolist()
            most_ranks = max(most_ranks, sum(ranks))
            weights = sum(rank * (shapes.in_features[first] + width) for rank, width in zip(ranks, widths, strict=True))
            num_bytes += weights * dtype.itemsize * (3 + s.row_end - s.row_start) // 4
        scratch = np.empty((x.shape[0], most_ranks), dtype=np.float32)
        args = np.zeros(lora_kernel.NUM_WORDS, dtype=np.int64)
        args[lora_kernel.X : lora_kernel.NUM_SEGMENTS + 1] = (
            *(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)),
            *(table.ctypes.data, len(table)),
        )
        args[lora_kernel.IN_FEATURES], args[lora_kernel.NUM_SLICES] = shapes.in_features[first], count
        args[lora_kernel.WIDTHS : lora_kernel.WIDTHS + count] = widths
        args[lora_kernel.SCRATCH], args[lora_kernel.SCRATCH_STRIDE] = scratch.ctypes.data, scratch.shape[1]
        num_threads = threads.num_threads() if num_bytes >= apply.MIN_PARALLEL_BYTES else 1
        compiled = apply.kernel_of(dtype)
        threads.run(compiled.call, compiled.address, args.ctypes.data, num_threads)
