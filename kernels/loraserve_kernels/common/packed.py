"""An adapter in a CPU's memory as kernels read it. How it lies there, `layout` decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.sites import CALLED_SITES, MODULE_INDEX
from loraserve_kernels.common.sizes import DELTA, NUM_ROWS, RANK, ROW_IDS, ROW_SCALES, ROWS, SCALINGS, SHIFT, A, B


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
        """Return some of the rows as numbers of `dtype`, [len(which), width]."""
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
class PackedAdapter:
    """Adapter as the kernels read it. Immutable after packing; compared by identity.

    Attributes:
        data: 1-D, contiguous, one of `DTYPES`: the weights.
        floats: 1-D, float32.
        row_ids: 1-D, int32: which rows are replaced.
        records: [num_layers, num_modules, RECORD_WORDS] int64, columns as in `MODULES`; rank 0
            and nothing else where the adapter has no such module.
        in_features, out_features: a number for each of `MODULES`.
        norms: (layer, norm) → [hidden_size] float32, the norms' weights that stand in the place of
            the base's.
        head: [num_labels, hidden_size] float32, a classification head, which no kernel reads.
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
        """Bytes of weights, norms, head and all, alignment gaps included.

        The records (some KiB) aren't counted.
        """
        buffers = self.data.nbytes + self.floats.nbytes + self.row_ids.nbytes
        head_bytes = 0 if self.head is None else self.head.nbytes
        return buffers + sum(weight.nbytes for weight in self.norms.values()) + head_bytes

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_modules]: the modules' ranks, columns as in `MODULES`."""
        return self.records[..., RANK]

    @property
    def max_rank(self) -> int:
        return int(self.ranks.max(initial=0))

    @property
    def num_layers(self) -> int:
        return int(self.records.shape[0])

    def lora_a(self, layer: int, module: str) -> Tensor:
        """Return a view of the module's A, [r, in_features]; r is 0 where the adapter has none.

        In int8 these are codes.
        """
        return self._matrix(A, self.in_features, layer, module)

    def lora_b(self, layer: int, module: str) -> Tensor:
        """Return a view of the module's B by rank, [r, out_features].

        It is the checkpoint's B, transposed. In int8 these are codes.
        """
        return self._matrix(B, self.out_features, layer, module)

    def scaling(self, layer: int, module: str) -> Tensor:
        """Return a view of each rank's factor, [r] float32.

        In int8 it is the rank's scaling times the scales of its rows of A and of B.
        """
        record = self.records[layer, MODULE_INDEX[module]]
        return self.floats[record[SCALINGS] : record[SCALINGS] + record[RANK]]

    def dora_delta(self, layer: int, module: str) -> Tensor | None:
        """Return a view of the module's δ, [out_features] float32; None where it has none."""
        return self._row(DELTA, layer, module)

    def bias_delta(self, layer: int, module: str) -> Tensor | None:
        """Return a view of the module's bias delta, [out_features] float32; None without one."""
        return self._row(SHIFT, layer, module)

    def row_overrides(self, layer: int, module: str) -> PackedRows | None:
        """Return the module's replaced rows; None where it has none."""
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
        """Return a view of the A matrices of all the site's slices, [sum of ranks, in_features]."""
        first = MODULE_INDEX[CALLED_SITES[site][0]]
        num_rows = int(self.ranks[layer, first : first + len(CALLED_SITES[site])].sum())
        width, start = self.in_features[first], int(self.records[layer, first, A])
        return self.data[start : start + num_rows * width].view(num_rows, width)

    def _matrix(self, word: int, widths: tuple[int, ...], layer: int, module: str) -> Tensor:
        index = MODULE_INDEX[module]
        record = self.records[layer, index]
        rank, width, start = int(record[RANK]), widths[index], int(record[word])
        return self.data[start : start + rank * width].view(rank, width)

    def _row(self, word: int, layer: int, module: str) -> Tensor | None:
        index = MODULE_INDEX[module]
        start = int(self.records[layer, index, word])
        return self.floats[start : start + self.out_features[index]] if start >= 0 else None

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
