"""How one adapter lies in a CPU's memory: every module of it in one contiguous buffer, nothing padded to a common rank.

For each layer, for each site, in the order of `SITES`: the A matrices of the site's slices ([r, in], a row per rank), one after the
other, so that a site's shrink is one matrix of [sum of ranks, in]; then the B matrices, transposed to [r, out], a row per rank as well; then the rows that stand in
the place of the base's. Each of these regions starts at a multiple of `ALIGN_ELEMENTS`; the gaps are zero. What is always float32 lies in a buffer of its own: a
number of each rank, the rows δ and shift, and where weights are int8 a scale of each replaced row.

The head and the embedding belong to no layer. Their records stand in layer 0; the other layers' are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from loraserve_kernels.packed import (
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
    PackedAdapter,
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
    "ReplacedNorm",
    "ReplacedRows",
    "check_place",
    "check_shapes",
    "pack_adapter",
    "packed_num_bytes",
]

ALIGN_ELEMENTS = 16
"""Regions start at multiples of this, so that a kernel may load a vector at a time whatever the dtype."""

_INT8_MAX = 127
_CHUNK_ELEMENTS = 1 << 22
"""Rows are rounded to int8 so many weights at a time: a float32 copy of a whole head would take gigabytes."""


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
