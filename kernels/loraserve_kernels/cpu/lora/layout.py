"""Layout of an adapter in a CPU's memory.

Every module of it lies in one contiguous buffer; nothing is padded to a common rank. For each
layer, for each site, in the order of `SITES`: the A matrices of the site's slices ([r, in], a row
per rank), one after the other, so that a site's shrink is one matrix of [sum of ranks, in]; then
the B matrices, transposed to [r, out], a row per rank as well; then the rows that stand in the
place of the base's. Each of these regions starts at a multiple of `ALIGN_ELEMENTS`; the gaps are
zero. What is always float32 lies in a buffer of its own: a number of each rank, the rows δ and
shift, and where weights are int8 a scale of each replaced row.

After all layers come the experts' matrices, layer by layer and expert by expert, those of
`EXPERT_SITES` alike: what an adapter doesn't change takes nothing.

The head and the embedding belong to no layer. Their records stand in layer 0; the other layers' are
empty.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from loraserve_kernels.common.modules import (
    COLUMNS,
    DTYPES,
    LAYER_MODULES,
    LAYER_SITES,
    MODULE_INDEX,
    MODULES,
    NORMS,
    SITES,
    ExtraRows,
    LoraModule,
    ReplacedNorm,
    ReplacedRows,
    check_norms,
    check_place,
    check_row_ids,
    check_shapes,
    size_of,
)
from loraserve_kernels.common.packed import PackedAdapter, PackedExperts
from loraserve_kernels.common.sizes import ALIGN_ELEMENTS, PackedLayout, lay_out
from loraserve_kernels.cpu import threads
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.reference import quantize_rows

__all__ = [
    "ALIGN_ELEMENTS",
    "COLUMNS",
    "DTYPES",
    "LAYER_MODULES",
    "LAYER_SITES",
    "MODULES",
    "MODULE_INDEX",
    "NORMS",
    "SITES",
    "ExtraRows",
    "LoraModule",
    "PackedAdapter",
    "ReplacedNorm",
    "ReplacedRows",
    "check_place",
    "check_shapes",
    "pack_adapter",
    "packed_num_bytes",
]

_INT8_MAX = 127
_OWN_PAGES_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 22
"""Rows are rounded to int8 that many weights at a time: a float32 copy of a whole head would take
gigabytes.
"""


def packed_num_bytes(
    modules: Iterable[LoraModule],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    norms: Sequence[ReplacedNorm] = (),
    head: Tensor | None = None,
    extra_rows: ExtraRows | None = None,
) -> int:
    """Bytes that `pack_adapter` will allocate for all of these. Reads shapes alone.

    Raises:
        TensorMismatch: as `pack_adapter`, but for the ids of rows.
    """
    layout = _lay_out(modules, num_layers, module_shapes, dtype)
    check_norms(norms, num_layers, module_shapes)
    floats = sum(n.weight.shape[0] for n in norms) + (0 if head is None else head.numel())
    return layout.num_bytes(dtype, floats) + (0 if extra_rows is None else extra_rows.num_bytes)


def pack_adapter(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    norms: Sequence[ReplacedNorm] = (),
    head: Tensor | None = None,
    extra_rows: ExtraRows | None = None,
) -> PackedAdapter:
    """Copy an adapter's matrices into new buffers; gaps are zero.

    It uses the caller's thread alone.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base; it may lack modules that
            the adapter lacks too.
        dtype: what the weights are stored in. int8: each rank's row of A and of B and each replaced
            row is rounded, with a scale of its own; the rest is float32 always.
        norms: in any order.
        head: a classification head, [num_labels, hidden_size], which no kernel reads.
        extra_rows: rows beyond the base's, which are kept as they are.

    Raises:
        TensorMismatch: a module or a norm that doesn't fit the base, or one given twice.
    """
    layout = _lay_out(modules, num_layers, module_shapes, dtype)
    check_norms(norms, num_layers, module_shapes)
    for m in modules:
        check_row_ids(m, module_shapes[m.module])
    shapes = [module_shapes.get(module, (0, 0)) for module in COLUMNS]
    with threads.alone():
        packed = PackedAdapter(
            data=_zeros(layout.num_elements, dtype),
            floats=_zeros(layout.num_floats, torch.float32),
            row_ids=_zeros(layout.num_row_ids, torch.int32),
            records=layout.records,
            in_features=tuple(shape[1] for shape in shapes),
            out_features=tuple(shape[0] for shape in shapes),
            norms={(n.layer, n.norm): n.weight.to(torch.float32, copy=True) for n in norms},
            head=None if head is None else head.to(torch.float32, copy=True),
            experts=PackedExperts.of(layout.expert_records, layout.experts, module_shapes),
            extra_rows=extra_rows,
        )
        for m in modules:
            _fill(packed, m)
    return packed


def _zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Allocate zeros in memory of their own.

    Large ones are the system's fresh pages, which aren't zeroed once more, huge ones where it has
    them, and given back whole when the last view goes: an allocator that keeps pieces of them held
    a third more memory than the adapters. Of 8 MB, 1.3 ms instead of 3.3; and a step of 32
    sequences, each with such an adapter, takes a fifteenth less.
    """
    num_bytes = size * dtype.itemsize
    if num_bytes < _OWN_PAGES_BYTES:
        return torch.zeros(size, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # a kernel without huge pages
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=size)


def _fill(packed: PackedAdapter, m: LoraModule) -> None:
    scaling = packed.scaling(*m.place)
    scaling.copy_(m.scaling) if isinstance(m.scaling, Tensor) else scaling.fill_(m.scaling)
    for view, matrix in ((packed.lora_a(*m.place), m.lora_a), (packed.lora_b(*m.place), m.lora_b.T)):
        scales = _store(view, matrix)
        if scales is not None:
            scaling *= scales
    for row, values in (
        (packed.dora_delta(*m.place), m.dora_delta),
        (packed.bias_delta(*m.place), m.bias_delta),
    ):
        if row is not None and values is not None:
            row.copy_(values)
    if m.row_overrides is None:
        return
    rows = packed.row_overrides(m.layer, m.module)
    if rows is not None and m.row_overrides is not None:
        rows.ids.copy_(m.row_overrides.ids)
        scales = _store(rows.weight, m.row_overrides.weight)
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
) -> PackedLayout:
    if dtype not in DTYPES:
        raise TensorMismatch(f"adapters are stored in float32, bfloat16, float16 or int8, not {dtype}")
    sizes = []
    for m in modules:
        check_place(m.layer, m.module, num_layers, module_shapes, m.expert)
        check_shapes(m, module_shapes[m.module])
        sizes.append(size_of(m))
    return lay_out(sizes, num_layers=num_layers, module_shapes=module_shapes, dtype=dtype)
