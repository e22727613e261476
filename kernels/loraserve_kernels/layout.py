"""How one adapter lies in a CPU's memory: every module of it in one contiguous buffer, nothing padded to a common rank.

For each layer, for each site, in the order of `SITES`: the A matrices of the site's slices ([r, in], a row per rank), one after the
other, so that a site's shrink is one matrix of [sum of ranks, in]; then the B matrices, transposed to [r, out], a row per rank as well; then the rows that stand in
the place of the base's. Each of these regions starts at a multiple of `ALIGN_ELEMENTS`; the gaps are zero. What is always float32 lies in a buffer of its own: a
number of each rank, the rows δ and shift, and where weights are int8 a scale of each replaced row.

The head and the embedding belong to no layer. Their records stand in layer 0; the other layers' are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels import threads
from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.modules import (
    DTYPES,
    LAYER_MODULES,
    LAYER_SITES,
    MODULE_INDEX,
    MODULES,
    NORMS,
    SITES,
    LoraModule,
    ReplacedNorm,
    ReplacedRows,
    check_norms,
    check_place,
    check_row_ids,
    check_shapes,
)
from loraserve_kernels.reference import quantize_rows

__all__ = [
    "ALIGN_ELEMENTS",
    "DTYPES",
    "LAYER_MODULES",
    "LAYER_SITES",
    "MODULES",
    "MODULE_INDEX",
    "NORMS",
    "SITES",
    "LoraModule",
    "PackedAdapter",
    "PackedRows",
    "ReplacedNorm",
    "ReplacedRows",
    "check_place",
    "check_shapes",
    "pack_adapter",
    "packed_num_bytes",
]

ALIGN_ELEMENTS = 16
"""Regions start at multiples of this, so that a kernel may load a vector at a time whatever the dtype."""

RANK, A, B, SCALINGS, DELTA, SHIFT, NUM_ROWS, ROWS, ROW_IDS, ROW_SCALES, RECORD_WORDS = range(11)
"""A module's record, in int64 words: its rank; where A, B and the replaced rows start in the weights; where the ranks' numbers, δ, the shift and the rows' scales start
in the float32 buffer, −1 where the module has no δ, shift or scales; how many rows are replaced, and where their ids start in theirs."""

_INT8_MAX = 127
_CHUNK_ELEMENTS = 1 << 22
"""Rows are rounded to int8 so many weights at a time: a float32 copy of a whole head would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Views of a module's replaced rows: `ids` [n] int32, ascending; `weight` [n, width]; `scales` [n] float32 where weights are int8, None otherwise."""

    ids: Tensor
    weight: Tensor
    scales: Tensor | None

    def pick(self, which: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some of the rows as numbers of `dtype`, [len(which), width]."""
        weight = self.weight[which].to(dtype)
        return weight if self.scales is None else weight * self.scales[which, None].to(dtype)


@dataclass(frozen=True, slots=True)
class SiteWork:
    """What an adapter has at a site, of the layer that has most.

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
    """One adapter as the kernels read it. Immutable after packing; compared by identity.

    Attributes:
        data: 1-D, contiguous, one of `DTYPES`: the weights.
        floats: 1-D, float32.
        row_ids: 1-D, int32: which rows are replaced.
        records: [num_layers, 9, RECORD_WORDS] int64, columns as in `MODULES`; rank 0 and nothing else where the adapter has no such module.
        in_features, out_features: 9 numbers each.
        norms: (layer, norm) → [hidden_size] float32, the norms' weights that stand in the place of the base's.
        work: site → how much there is to do.
        addresses: where data, floats, row_ids and records lie, for kernels that address memory by number.
    """

    data: Tensor
    floats: Tensor
    row_ids: Tensor
    records: npt.NDArray[np.int64]
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    norms: Mapping[tuple[int, str], Tensor]
    work: Mapping[str, SiteWork] = field(init=False)
    addresses: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        addresses = self.data.data_ptr(), self.floats.data_ptr(), self.row_ids.data_ptr(), self.records.ctypes.data
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "work", {site: self._work(site) for site in SITES})

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, norms and all, alignment gaps included; the records (some KiB) aren't counted."""
        buffers = self.data.nbytes + self.floats.nbytes + self.row_ids.nbytes
        return buffers + sum(weight.nbytes for weight in self.norms.values())

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """[num_layers, 9]: the modules' ranks, columns as in `MODULES`."""
        return self.records[..., RANK]

    @property
    def max_rank(self) -> int:
        return int(self.ranks.max(initial=0))

    @property
    def num_layers(self) -> int:
        return int(self.records.shape[0])

    def lora_a(self, layer: int, module: str) -> Tensor:
        """A view of the module's A, [r, in_features]; r is 0 where the adapter has none. In int8 these are codes."""
        return self._matrix(A, self.in_features, layer, module)

    def lora_b(self, layer: int, module: str) -> Tensor:
        """A view of the module's B by rank, [r, out_features] (the checkpoint's B, transposed). In int8 these are codes."""
        return self._matrix(B, self.out_features, layer, module)

    def scaling(self, layer: int, module: str) -> Tensor:
        """A view of what each rank is multiplied with, [r] float32: its scaling, in int8 times the scales of its rows of A and of B."""
        record = self.records[layer, MODULE_INDEX[module]]
        return self.floats[record[SCALINGS] : record[SCALINGS] + record[RANK]]

    def delta(self, layer: int, module: str) -> Tensor | None:
        """A view of the module's δ, [out_features] float32; None where it has none."""
        return self._row(DELTA, layer, module)

    def shift(self, layer: int, module: str) -> Tensor | None:
        """A view of the module's shift, [out_features] float32; None where it has none."""
        return self._row(SHIFT, layer, module)

    def rows(self, layer: int, module: str) -> PackedRows | None:
        """The module's replaced rows; None where it has none."""
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
        """A view of the A matrices of all the site's slices, [sum of ranks, in_features]."""
        first = MODULE_INDEX[SITES[site][0]]
        num_rows = int(self.ranks[layer, first : first + len(SITES[site])].sum())
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
        first, count = MODULE_INDEX[SITES[site][0]], len(SITES[site])
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


@dataclass(frozen=True, slots=True)
class _Layout:
    records: npt.NDArray[np.int64]
    num_elements: int
    num_floats: int
    num_row_ids: int


def packed_num_bytes(
    modules: Iterable[LoraModule],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    norms: Sequence[ReplacedNorm] = (),
) -> int:
    """Bytes that `pack_adapter` will allocate for these modules and norms. Reads shapes alone.

    Raises:
        ShapeMismatch: as `pack_adapter`, but for the ids of rows.
    """
    layout = _lay_out(modules, num_layers, module_shapes, dtype)
    check_norms(norms, num_layers, module_shapes)
    num_floats = layout.num_floats + sum(n.weight.shape[0] for n in norms)
    return layout.num_elements * dtype.itemsize + 4 * (num_floats + layout.num_row_ids)


def pack_adapter(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    norms: Sequence[ReplacedNorm] = (),
) -> PackedAdapter:
    """Copy an adapter's matrices into new buffers; gaps are zero. On the caller's thread alone, whoever it is.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base; it may lack modules that the adapter lacks too.
        dtype: what the weights are stored in. int8: each rank's row of A and of B and each replaced row is rounded, with a scale of its own; the rest is
            float32 always.
        norms: in any order.

    Raises:
        ShapeMismatch: a module or a norm that doesn't fit the base, or one given twice.
    """
    layout = _lay_out(modules, num_layers, module_shapes, dtype)
    check_norms(norms, num_layers, module_shapes)
    for m in modules:
        check_row_ids(m, module_shapes[m.module])
    shapes = [module_shapes.get(module, (0, 0)) for module in MODULES]
    with threads.alone():
        packed = PackedAdapter(
            data=torch.zeros(layout.num_elements, dtype=dtype),
            floats=torch.zeros(layout.num_floats),
            row_ids=torch.zeros(layout.num_row_ids, dtype=torch.int32),
            records=layout.records,
            in_features=tuple(shape[1] for shape in shapes),
            out_features=tuple(shape[0] for shape in shapes),
            norms={(n.layer, n.norm): n.weight.to(torch.float32, copy=True) for n in norms},
        )
        for m in modules:
            _fill(packed, m)
    return packed


def _fill(packed: PackedAdapter, m: LoraModule) -> None:
    scaling = packed.scaling(m.layer, m.module)
    scaling.copy_(m.scaling) if isinstance(m.scaling, Tensor) else scaling.fill_(m.scaling)
    for view, matrix in (
        (packed.lora_a(m.layer, m.module), m.lora_a),
        (packed.lora_b(m.layer, m.module), m.lora_b.T),
    ):
        scales = _store(view, matrix)
        if scales is not None:
            scaling *= scales
    for row, values in (
        (packed.delta(m.layer, m.module), m.delta),
        (packed.shift(m.layer, m.module), m.shift),
    ):
        if row is not None and values is not None:
            row.copy_(values)
    rows = packed.rows(m.layer, m.module)
    if rows is not None and m.rows is not None:
        rows.ids.copy_(m.rows.ids)
        scales = _store(rows.weight, m.rows.weight)
        if scales is not None and rows.scales is not None:
            rows.scales.copy_(scales)


def _store(view: Tensor, matrix: Tensor) -> Tensor | None:
    """Copy a matrix; into int8 it is rounded, and a float32 scale of each row returned."""
    if view.dtype != torch.int8:
        view.copy_(matrix)
        return None
    scales = torch.empty(view.shape[0])
    count = max(1, _CHUNK_ELEMENTS // view.shape[1])
    for start in range(0, view.shape[0], count):
        codes, part = quantize_rows(matrix[start : start + count].float(), _INT8_MAX)
        view[start : start + count], scales[start : start + count] = codes, part
    return scales


def _lay_out(
    modules: Iterable[LoraModule],
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> _Layout:
    if dtype not in DTYPES:
        raise ShapeMismatch(f"adapters are stored in float32, bfloat16, float16 or int8, not {dtype}")
    records = np.zeros((num_layers, len(MODULES), RECORD_WORDS), dtype=np.int64)
    records[..., (DELTA, SHIFT, ROW_SCALES)] = -1
    given: set[tuple[int, str]] = set()
    num_floats = num_row_ids = 0
    for m in modules:
        check_place(m.layer, m.module, num_layers, module_shapes)
        check_shapes(m, module_shapes[m.module])
        if (m.layer, m.module) in given:
            raise ShapeMismatch(f"layer {m.layer} {m.module} is given twice")
        given.add((m.layer, m.module))
        record, out_features = records[m.layer, MODULE_INDEX[m.module]], module_shapes[m.module][0]
        num_rows = 0 if m.rows is None else m.rows.ids.shape[0]
        record[RANK], record[NUM_ROWS], record[ROW_IDS] = m.lora_a.shape[0], num_rows, num_row_ids
        num_row_ids += num_rows
        for word, size in (
            (SCALINGS, m.lora_a.shape[0]),
            (DELTA, 0 if m.delta is None else out_features),
            (SHIFT, 0 if m.shift is None else out_features),
            (ROW_SCALES, num_rows if dtype == torch.int8 else 0),
        ):
            if size:
                record[word], num_floats = num_floats, num_floats + _aligned(size)
    num_elements = _place_weights(records, module_shapes)
    return _Layout(records, num_elements, num_floats, num_row_ids)


def _place_weights(records: npt.NDArray[np.int64], module_shapes: Mapping[str, tuple[int, int]]) -> int:
    position = 0
    for layer in range(records.shape[0]):
        for site, modules in SITES.items():
            width_of_row = 0 if site == "embed" else 1
            for word, count, side in ((A, RANK, 1), (B, RANK, 0), (ROWS, NUM_ROWS, width_of_row)):
                position = _aligned(position)
                for module in modules:
                    record = records[layer, MODULE_INDEX[module]]
                    record[word] = position
                    position += int(record[count]) * module_shapes.get(module, (0, 0))[side]
    return position


def _aligned(position: int) -> int:
    return -(-position // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
