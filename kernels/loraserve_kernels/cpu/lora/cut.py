"""Part of a packed adapter, for a base of which several processes have a part each.

Every change that an adapter makes to a linear is linear in its input, δ and replaced rows included:
what the parts of a row-parallel one give may be summed. A part is cut from the packed adapter, so
that its codes, scales and δ are the whole one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.cuts import Axis, ModuleCut, PartCut
from loraserve_kernels.common.modules import COLUMNS, LoraModule
from loraserve_kernels.common.packed import PackedAdapter, PackedExperts, PackedRows
from loraserve_kernels.common.sites import EXPERT_MODULES, MODULE_INDEX, ModuleShapes
from loraserve_kernels.common.sizes import DELTA, NUM_ROWS, RANK, SHIFT, ModuleSize, PackedLayout, lay_out

Allocate = Callable[[int, torch.dtype], Tensor]
"""Function that allocates that many zeros."""


def lay_out_part(
    modules: Sequence[LoraModule], cut: PartCut, *, module_shapes: ModuleShapes, dtype: torch.dtype
) -> PackedLayout:
    """Compute the layout that `cut_adapter` gives a part of these modules. Reads ids of rows alone.

    Args:
        module_shapes: of the part.
    """
    sizes = [
        _size(
            layer,
            m.module,
            cut.modules[m.module],
            int(m.lora_a.shape[0]),
            m.dora_delta is not None,
            m.bias_delta is not None,
            None if m.row_overrides is None else m.row_overrides.ids,
            m.expert,
        )
        for m in modules
        if (layer := cut.module_layer(m.layer, m.module)) is not None
    ]
    return lay_out(sizes, num_layers=cut.num_layers, module_shapes=module_shapes, dtype=dtype)


def cut_adapter(
    packed: PackedAdapter,
    cut: PartCut,
    *,
    module_shapes: ModuleShapes,
    allocate: Allocate,
    keeps_head: bool,
) -> PackedAdapter:
    """Copy a part of an adapter.

    Norms of the part's layers are whole in it.

    Args:
        module_shapes: of the part.
        allocate: the part's memory, in the order of data, floats, ids and norms.
        keeps_head: whether the classification head goes along, which no kernel reads.
    """
    places = [
        (local, place) for place in _places_of(packed) if (local := cut.module_layer(place[0], place[1])) is not None
    ]
    layout = lay_out(
        [_size_of(packed, local, place, cut.modules[place[1]]) for local, place in places],
        num_layers=cut.num_layers,
        module_shapes=module_shapes,
        dtype=packed.data.dtype,
    )
    shapes = [module_shapes.get(module, (0, 0)) for module in COLUMNS]
    part = PackedAdapter(
        data=allocate(layout.num_elements, packed.data.dtype),
        floats=allocate(layout.num_floats, torch.float32),
        row_ids=allocate(layout.num_row_ids, torch.int32),
        records=layout.records,
        in_features=tuple(shape[1] for shape in shapes),
        out_features=tuple(shape[0] for shape in shapes),
        norms={
            (local, norm): allocate(weight.numel(), torch.float32).copy_(weight)
            for (layer, norm), weight in packed.norms.items()
            if (local := cut.norm_layer(layer, norm)) is not None
        },
        head=packed.head if keeps_head else None,
        experts=PackedExperts.of(layout.expert_records, layout.experts, module_shapes),
    )
    for local, place in places:
        _fill(part, local, packed, place, cut.modules[place[1]])
    return part


def norm_widths(norms: Iterable[tuple[int, str, int]], cut: PartCut) -> list[int]:
    """List the numbers of weights of the norms that a part has.

    Args:
        norms: (layer, norm, number of weights).
    """
    return [width for layer, norm, width in norms if cut.norm_layer(layer, norm) is not None]


_Place = tuple[int, str, int]
"""(layer, module, number of the expert; 0 for what isn't an expert's)."""


def _places_of(packed: PackedAdapter) -> Iterator[_Place]:
    """Yield the modules that an adapter changes."""
    for layer in range(packed.num_layers):
        yield from ((layer, module, 0) for module in _changed(packed.records[layer], COLUMNS))
    if packed.experts is not None:
        for (layer, expert), row in packed.experts.rows.items():
            modules = _changed(packed.experts.records[row], EXPERT_MODULES)
            yield from ((layer, module, expert) for module in modules)


def _changed(records: npt.NDArray[np.int64], modules: Sequence[str]) -> list[str]:
    has_any = (records[:, RANK] > 0) | (records[:, NUM_ROWS] > 0) | (records[:, DELTA] >= 0) | (records[:, SHIFT] >= 0)
    return [module for module, has in zip(modules, has_any.tolist(), strict=True) if has]


def _rows_of(packed: PackedAdapter, place: _Place) -> PackedRows | None:
    """Look up a module's replaced rows; those of a mixture have none."""
    layer, module, _ = place
    return packed.row_overrides(layer, module) if module in MODULE_INDEX else None


def _size_of(packed: PackedAdapter, local: int, place: _Place, cut: ModuleCut) -> ModuleSize:
    rows = _rows_of(packed, place)
    return _size(
        local,
        place[1],
        cut,
        int(packed.scaling(*place).shape[0]),
        packed.dora_delta(*place) is not None,
        packed.bias_delta(*place) is not None,
        None if rows is None else rows.ids,
        place[2],
    )


def _size(
    layer: int,
    module: str,
    cut: ModuleCut,
    rank: int,
    has_delta: bool,
    has_shift: bool,
    ids: Tensor | None,
    expert: int,
) -> ModuleSize:
    num_rows = 0 if ids is None else int(ids[_chosen(ids, module, cut)].shape[0])
    return ModuleSize(layer, module, rank, has_delta, has_shift and cut.has_bias, num_rows, expert)


def _chosen(ids: Tensor, module: str, cut: ModuleCut) -> slice:
    """Find which replaced rows the part has: of a row-parallel linear, a piece of each."""
    if cut.axis is Axis.IN and module != "embed_tokens":
        return slice(0, int(ids.shape[0]))
    first, last = torch.searchsorted(ids, torch.tensor([cut.start, cut.end], dtype=ids.dtype)).tolist()
    return slice(first, last)


def _fill(part: PackedAdapter, local: int, whole: PackedAdapter, place: _Place, cut: ModuleCut) -> None:
    count, module, own = cut.end - cut.start, place[1], (local, *place[1:])
    part.scaling(*own).copy_(whole.scaling(*place))
    is_out = cut.axis is Axis.OUT
    a, b = whole.lora_a(*place), whole.lora_b(*place)
    part.lora_a(*own)[:, : a.shape[1] if is_out else count] = a if is_out else a[:, cut.start : cut.end]
    part.lora_b(*own)[:, : count if is_out else b.shape[1]] = b[:, cut.start : cut.end] if is_out else b
    for row, values in (
        (part.dora_delta(*own), whole.dora_delta(*place)),
        (part.bias_delta(*own), whole.bias_delta(*place)),
    ):
        if row is not None and values is not None:
            row[: count if is_out else None] = values[cut.start : cut.end] if is_out else values
    target, rows = _rows_of(part, own), _rows_of(whole, place)
    if target is not None and rows is not None:
        _fill_rows(target, rows, module, cut)


def _fill_rows(target: PackedRows, rows: PackedRows, module: str, cut: ModuleCut) -> None:
    chosen = _chosen(rows.ids, module, cut)
    is_split = cut.axis is Axis.IN and module != "embed_tokens"
    target.ids.copy_(rows.ids[chosen] - (0 if is_split else cut.start))
    target.weight.copy_(rows.weight[chosen, cut.start : cut.end] if is_split else rows.weight[chosen])
    if target.scales is not None and rows.scales is not None:
        target.scales.copy_(rows.scales[chosen])
