"""An adapter in a CPU's memory as kernels read it. How it lies there, `layout` decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.modules import ExtraRows
from loraserve_kernels.common.sites import CALLED_SITES, EXPERT_INDEX, EXPERT_MODULES, MODULE_INDEX, ModuleShapes
from loraserve_kernels.common.sizes import (
    DELTA,
    NUM_ROWS,
    RANK,
    RECORD_WORDS,
    ROW_IDS,
    ROW_SCALES,
    ROWS,
    SCALINGS,
    SHIFT,
    A,
    B,
)

_NOTHING: npt.NDArray[np.int64] = np.zeros(RECORD_WORDS, dtype=np.int64)
_NOTHING[[DELTA, SHIFT]] = -1
_NOTHING.flags.writeable = False
"""Record of a module that an adapter doesn't change."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Views of a module's replaced rows.

    `ids` [n] int32, ascending; `weight` [n, width]; `scales` [n] float32 where weights are int8,
    None otherwise.
    """

    ids: Tensor
    weight: Tensor
    scales: Tensor | None

    def pick(self, which: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Convert some of the rows to numbers of `dtype`, [len(which), width]."""
        weight = self.weight[which].to(dtype)
        return weight if self.scales is None else weight * self.scales[which, None].to(dtype)


@dataclass(frozen=True, slots=True)
class SiteWork:
    """Size of an adapter at a site, in the layer that has most.

    Attributes:
        num_ranks: the sum of the slices' ranks.
        num_bytes: what one row reads; 0: no layer has anything.
        has_rows: whether a layer has replaced rows.
    """

    num_ranks: int
    num_bytes: int
    has_rows: bool


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Place of what an adapter changes of mixtures of experts, in its buffers.

    Attributes:
        records: [n, 5, RECORD_WORDS] int64, columns as in `EXPERT_MODULES`: of those layers'
            experts alone that the adapter changes.
        rows: (layer, expert) → its row of `records`. What isn't an expert's has expert 0's.
        layers: layers of those.
        in_features, out_features: 5 numbers each.
    """

    records: npt.NDArray[np.int64]
    rows: Mapping[tuple[int, int], int]
    layers: frozenset[int]
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]

    @classmethod
    def of(
        cls, records: npt.NDArray[np.int64], rows: Mapping[tuple[int, int], int], module_shapes: ModuleShapes
    ) -> PackedExperts | None:
        """Build the experts of these records; None where there are none."""
        if not rows:
            return None
        shapes = [module_shapes.get(module, (0, 0)) for module in EXPERT_MODULES]
        return cls(
            records,
            rows,
            frozenset(layer for layer, _ in rows),
            tuple(shape[1] for shape in shapes),
            tuple(shape[0] for shape in shapes),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """Adapter as the kernels read it. Immutable after packing; compared by identity.

    Attributes:
        data: 1-D, contiguous, one of `DTYPES`: the weights.
        floats: 1-D, float32.
        row_ids: 1-D, int32: which rows are replaced.
        records: [num_layers, num_modules, RECORD_WORDS] int64, columns as in `COLUMNS`; rank 0
            and nothing else where the adapter has no such module.
        in_features, out_features: a number for each of `COLUMNS`.
        norms: (layer, norm) → [hidden_size] float32, the norms' weights that stand in the place of
            the base's.
        head: [num_labels, hidden_size] float32, a classification head, which no kernel reads.
        experts: what it changes of mixtures of experts; None: nothing.
        extra_rows: rows beyond the base's, which no kernel reads.
        work: site → how much there is to do.
        sites: those at which there is anything to do.
        most_ranks: the most ranks that a layer has at a site.
        has_rows: whether it has replaced rows.
        base: layers and widths of the base that it is for.
        addresses: where data, floats, row_ids and records lie, for kernels that address memory by
            number.
    """

    data: Tensor
    floats: Tensor
    row_ids: Tensor
    records: npt.NDArray[np.int64]
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    norms: Mapping[tuple[int, str], Tensor]
    head: Tensor | None = None
    experts: PackedExperts | None = None
    extra_rows: ExtraRows | None = None
    work: Mapping[str, SiteWork] = field(init=False)
    sites: frozenset[str] = field(init=False)
    most_ranks: int = field(init=False)
    has_rows: bool = field(init=False)
    base: tuple[int, tuple[int, ...], tuple[int, ...]] = field(init=False)
    addresses: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        addresses = self.data.data_ptr(), self.floats.data_ptr(), self.row_ids.data_ptr(), self.records.ctypes.data
        object.__setattr__(self, "addresses", addresses)
        work = {site: self._work(site) for site in CALLED_SITES}
        object.__setattr__(self, "work", work)
        object.__setattr__(self, "sites", frozenset(site for site in work if work[site].num_bytes))
        object.__setattr__(self, "most_ranks", max(one.num_ranks for one in work.values()))
        object.__setattr__(self, "has_rows", any(one.has_rows for one in work.values()))
        object.__setattr__(self, "base", (self.num_layers, self.in_features, self.out_features))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, norms, head, extra rows and all, alignment gaps included.

        Experts' records are among them; the others (some KiB) aren't counted.
        """
        buffers = self.data.nbytes + self.floats.nbytes + self.row_ids.nbytes
        buffers += 0 if self.experts is None else self.experts.records.nbytes
        head_bytes = 0 if self.head is None else self.head.nbytes
        extra_bytes = 0 if self.extra_rows is None else self.extra_rows.num_bytes
        return buffers + sum(weight.nbytes for weight in self.norms.values()) + head_bytes + extra_bytes

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_modules]: the modules' ranks, columns as in `COLUMNS`."""
        return self.records[..., RANK]

    @property
    def max_rank(self) -> int:
        of_experts = 0 if self.experts is None else int(self.experts.records[..., RANK].max(initial=0))
        return max(of_experts, int(self.ranks.max(initial=0)))

    @property
    def num_layers(self) -> int:
        return int(self.records.shape[0])

    def lora_a(self, layer: int, module: str, expert: int = 0) -> Tensor:
        """View the module's A, [r, in_features]; r is 0 where the adapter has none.

        In int8 these are codes.
        """
        return self._matrix(A, 1, layer, module, expert)

    def lora_b(self, layer: int, module: str, expert: int = 0) -> Tensor:
        """View the module's B by rank, [r, out_features].

        It is the checkpoint's B, transposed. In int8 these are codes.
        """
        return self._matrix(B, 0, layer, module, expert)

    def scaling(self, layer: int, module: str, expert: int = 0) -> Tensor:
        """View each rank's factor, [r] float32.

        In int8 it is the rank's scaling times the scales of its rows of A and of B.
        """
        record = self._record(layer, module, expert)
        return self.floats[record[SCALINGS] : record[SCALINGS] + record[RANK]]

    def dora_delta(self, layer: int, module: str, expert: int = 0) -> Tensor | None:
        """View the module's δ, [out_features] float32; None where it has none."""
        return self._row(DELTA, layer, module, expert)

    def bias_delta(self, layer: int, module: str, expert: int = 0) -> Tensor | None:
        """View the module's bias delta, [out_features] float32; None without one."""
        return self._row(SHIFT, layer, module, expert)

    def row_overrides(self, layer: int, module: str) -> PackedRows | None:
        """View the module's replaced rows; None where it has none."""
        index = MODULE_INDEX[module]
        record = self.records[layer, index]
        count, first, ids, scales = (int(record[word]) for word in (NUM_ROWS, ROWS, ROW_IDS, ROW_SCALES))
        if not count:
            return None
        width = self.out_features[index] if module == "embed_tokens" else self.in_features[index]
        weight = self.data[first : first + count * width].view(count, width)
        return PackedRows(
            self.row_ids[ids : ids + count], weight, self.floats[scales : scales + count] if scales >= 0 else None
        )

    def site_a(self, layer: int, site: str) -> Tensor:
        """View the A matrices of all the site's slices, [sum of ranks, in_features]."""
        first = MODULE_INDEX[CALLED_SITES[site][0]]
        num_rows = int(self.ranks[layer, first : first + len(CALLED_SITES[site])].sum())
        width, start = self.in_features[first], int(self.records[layer, first, A])
        return self.data[start : start + num_rows * width].view(num_rows, width)

    def _record(self, layer: int, module: str, expert: int) -> npt.NDArray[np.int64]:
        """Find a module's record; one of zeros where the adapter has nothing of the expert."""
        record = _NOTHING
        if module in MODULE_INDEX:
            record = self.records[layer, MODULE_INDEX[module]]
        elif self.experts is not None and (layer, expert) in self.experts.rows:
            record = self.experts.records[self.experts.rows[layer, expert], EXPERT_INDEX[module]]
        return record

    def _shape(self, module: str) -> tuple[int, int]:
        """Look up a module's (out_features, in_features)."""
        if module in MODULE_INDEX:
            index = MODULE_INDEX[module]
            return self.out_features[index], self.in_features[index]
        if self.experts is None:
            return 0, 0
        index = EXPERT_INDEX[module]
        return self.experts.out_features[index], self.experts.in_features[index]

    def _matrix(self, word: int, side: int, layer: int, module: str, expert: int) -> Tensor:
        record, width = self._record(layer, module, expert), self._shape(module)[side]
        rank, start = int(record[RANK]), int(record[word])
        return self.data[start : start + rank * width].view(rank, width)

    def _row(self, word: int, layer: int, module: str, expert: int) -> Tensor | None:
        start = int(self._record(layer, module, expert)[word])
        return self.floats[start : start + self._shape(module)[0]] if start >= 0 else None

    def _work(self, site: str) -> SiteWork:
        first, count = MODULE_INDEX[CALLED_SITES[site][0]], len(CALLED_SITES[site])
        if not any(self.out_features[first : first + count]):
            # the base doesn't have it
            return SiteWork(0, 0, False)
        records = self.records[:, first : first + count]
        out, of_input = np.array(self.out_features[first : first + count]), self.in_features[first]
        # a row of the embedding reads one number of A, and one row of the table at most
        of_a, num_rows = (1, records[..., NUM_ROWS] > 0) if site == "embed" else (of_input, records[..., NUM_ROWS])
        of_row = out if site == "embed" else of_input
        size = self.data.element_size()
        by_module = size * (records[..., RANK] * (of_a + out) + num_rows * of_row)
        by_module = by_module + 4 * out * ((records[..., DELTA] >= 0).astype(int) + (records[..., SHIFT] >= 0))
        return SiteWork(
            int(records[..., RANK].sum(1).max(initial=0)),
            int(by_module.sum(1).max(initial=0)),
            bool((records[..., NUM_ROWS] > 0).any()),
        )
