"""How one adapter lies in memory: every module of it in one contiguous buffer, nothing padded to a common rank.

For each layer, for each site, in the order of `SITES`: the A matrices of the site's slices ([r, in], a row per rank), one after the
other, so that a site's shrink is one matrix of [sum of ranks, in]; then the B matrices, transposed to [r, out], a row per rank as well.
Each of these two regions starts at a multiple of `ALIGN_ELEMENTS`; the gaps are zero. δ rows (see `LoraModule`) are float32, in a buffer of their own.

The head and the embedding belong to no layer. Their tables have a row for each layer as the others' have, and they stand in that of layer 0.
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

SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "lm_head": ("lm_head",),
    "embed": ("embed_tokens",),
}
"""Linears that share an input: their outputs are slices of one tensor, in this order. The embedding is a linear whose input is a one-hot row."""

LAYER_SITES: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
"""The sites that every decoder layer has."""

MODULES: tuple[str, ...] = tuple(module for site in SITES.values() for module in site)
"""Every module that can carry LoRA; a module's place here is its column in the tables."""

MODULE_INDEX: dict[str, int] = {module: index for index, module in enumerate(MODULES)}

LAYER_MODULES: tuple[str, ...] = tuple(module for site in LAYER_SITES for module in SITES[site])
"""Those of the decoder layers: the first of `MODULES`."""

ALIGN_ELEMENTS = 16
"""Regions start at multiples of this, so that a kernel may load 32 bytes at a time whatever the dtype."""

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Rows of a linear's weight, or of the embedding's table, that an adapter has in the place of the base's.

    Attributes:
        ids: [n] int32, ascending: which rows: output features of a linear, tokens of the embedding.
        weight: [n, in_features]; of the embedding [n, hidden_size].
    """

    ids: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class ReplacedNorm:
    """A norm's weight in the place of the base's.

    Attributes:
        layer: 0 for ``norm``.
        norm: one of `NORMS`.
        weight: [hidden_size], what normed rows are multiplied with.
    """

    layer: int
    norm: str
    weight: Tensor


NORMS: tuple[str, ...] = ("attention_norm", "mlp_norm", "norm")
"""What an attention's, an MLP's and the head's inputs pass."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """What an adapter changes of one linear: ``(1 + delta) · (W' x + B diag(scaling) A x) + bias + shift``, W' being W but for the rows in `rows`.

    Attributes:
        layer: which decoder layer; 0 for ``lm_head`` and ``embed_tokens``.
        module: the linear's short name, one of `MODULES`.
        lora_a: [r, in_features]; in_features of ``embed_tokens`` is the size of the vocabulary. r may be 0.
        lora_b: [out_features, r].
        scaling: alpha / r, or alpha / sqrt(r); or [r] float32, a number of each rank.
        delta: [out_features], DoRA's ``m / ‖W + scaling · B A‖ − 1`` (norms of the rows, W as the base computes with it), or None. Where it's given, the
            linear's output without its bias is multiplied by ``1 + delta``, update included.
        shift: [out_features], added to all of that, or None. Not for ``embed_tokens``.
        rows: the rows of W' that aren't W's, or None.
    """

    layer: int
    module: str
    lora_a: Tensor
    lora_b: Tensor
    scaling: float | Tensor
    delta: Tensor | None = None
    shift: Tensor | None = None
    rows: ReplacedRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """One adapter as the kernels read it. Immutable after packing; compared by identity.

    Attributes:
        data: 1-D, contiguous, float32, bfloat16 or float16.
        deltas: 1-D, float32: the modules' δ rows.
        ranks: [num_layers, 9] int32, columns as in `MODULES`; 0 where the adapter has no such module.
        scalings: [num_layers, 9] float32.
        a_offsets: [num_layers, 9] int64, in elements of `data`: where A [r, in] starts.
        b_offsets: [num_layers, 9] int64: where B [r, out] starts.
        delta_offsets: [num_layers, 9] int64, in elements of `deltas`: where δ [out] starts; −1 where the module has none.
        in_features, out_features: 9 numbers each.
        addresses: where data, ranks, scalings, a_offsets, b_offsets, deltas and delta_offsets lie, for kernels that address memory by number.
    """

    data: Tensor
    deltas: Tensor
    ranks: npt.NDArray[np.int32]
    scalings: npt.NDArray[np.float32]
    a_offsets: npt.NDArray[np.int64]
    b_offsets: npt.NDArray[np.int64]
    delta_offsets: npt.NDArray[np.int64]
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    addresses: tuple[int, int, int, int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        ranks, scalings, a_offsets, b_offsets, delta_offsets = (
            table.ctypes.data
            for table in (self.ranks, self.scalings, self.a_offsets, self.b_offsets, self.delta_offsets)
        )
        data, deltas = self.data.data_ptr(), self.deltas.data_ptr()
        object.__setattr__(self, "addresses", (data, ranks, scalings, a_offsets, b_offsets, deltas, delta_offsets))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, alignment gaps included; the tables (some KiB) aren't counted."""
        return self.data.nbytes + self.deltas.nbytes

    @property
    def max_rank(self) -> int:
        return int(self.ranks.max(initial=0))

    @property
    def num_layers(self) -> int:
        return int(self.ranks.shape[0])

    def lora_a(self, layer: int, module: str) -> Tensor:
        """A view of the module's A, [r, in_features]; r is 0 where the adapter has none."""
        return self._matrix(self.a_offsets, self.in_features, layer, module)

    def lora_b(self, layer: int, module: str) -> Tensor:
        """A view of the module's B by rank, [r, out_features] (the checkpoint's B, transposed)."""
        return self._matrix(self.b_offsets, self.out_features, layer, module)

    def delta(self, layer: int, module: str) -> Tensor | None:
        """A view of the module's δ, [out_features] float32; None where it has none."""
        index = MODULE_INDEX[module]
        start = int(self.delta_offsets[layer, index])
        return self.deltas[start : start + self.out_features[index]] if start >= 0 else None

    def site_a(self, layer: int, site: str) -> Tensor:
        """A view of the A matrices of all the site's slices, [sum of ranks, in_features]."""
        first = MODULE_INDEX[SITES[site][0]]
        num_rows = int(self.ranks[layer, first : first + len(SITES[site])].sum())
        width, start = self.in_features[first], int(self.a_offsets[layer, first])
        return self.data[start : start + num_rows * width].view(num_rows, width)

    def _matrix(self, offsets: npt.NDArray[np.int64], widths: tuple[int, ...], layer: int, module: str) -> Tensor:
        index = MODULE_INDEX[module]
        rank, width, start = int(self.ranks[layer, index]), widths[index], int(offsets[layer, index])
        return self.data[start : start + rank * width].view(rank, width)


@dataclass(frozen=True, slots=True)
class _Tables:
    ranks: npt.NDArray[np.int32]
    a_offsets: npt.NDArray[np.int64]
    b_offsets: npt.NDArray[np.int64]
    delta_offsets: npt.NDArray[np.int64]
    num_elements: int
    num_deltas: int


def packed_num_bytes(
    ranks: Iterable[tuple[int, str, int]],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    deltas: Iterable[tuple[int, str]] = (),
) -> int:
    """Bytes that `pack_adapter` will allocate for an adapter with these (layer, module, rank), without a tensor at hand.

    Args:
        deltas: the (layer, module) that have a δ row.

    Raises:
        ShapeMismatch: a layer or module that the base doesn't have, or one given twice.
    """
    tables = _tables(ranks, deltas, num_layers, module_shapes)
    return tables.num_elements * dtype.itemsize + tables.num_deltas * torch.float32.itemsize


def pack_adapter(
    modules: Sequence[LoraModule],
    *,
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> PackedAdapter:
    """Copy an adapter's matrices into one new buffer; gaps are zero. On the caller's thread alone, whoever it is.

    Args:
        modules: any subset of layers and modules, in any order, with any ranks ≥ 1.
        num_layers: the base's.
        module_shapes: module → (out_features, in_features) of the base; it may lack modules that the adapter lacks too.
        dtype: what the weights are stored in.

    Raises:
        ShapeMismatch: a module that doesn't fit the base, or one given twice.
    """
    if dtype not in DTYPES:
        raise ShapeMismatch(f"adapters are stored in float32, bfloat16 or float16, not {dtype}")
    for m in modules:
        if m.module not in module_shapes:
            raise ShapeMismatch(f"layer {m.layer} has LoRA on {m.module}; this base has {', '.join(module_shapes)}")
        check_shapes(m, module_shapes[m.module])
    tables = _tables(
        ((m.layer, m.module, m.lora_a.shape[0]) for m in modules),
        ((m.layer, m.module) for m in modules if m.delta is not None),
        num_layers,
        module_shapes,
    )
    shapes = [module_shapes.get(module, (0, 0)) for module in MODULES]
    with threads.alone():
        return _fill(modules, tables, shapes, num_layers, dtype)


def check_shapes(m: LoraModule, shape: tuple[int, int]) -> None:
    """Raises: ShapeMismatch: one of the module's tensors doesn't fit a linear of `shape`, (out_features, in_features)."""
    out_features, in_features = shape
    rank = m.lora_a.shape[0]
    if tuple(m.lora_a.shape) != (rank, in_features) or tuple(m.lora_b.shape) != (out_features, rank):
        raise ShapeMismatch(
            f"layer {m.layer} {m.module}: lora_a {tuple(m.lora_a.shape)} and lora_b {tuple(m.lora_b.shape)}; "
            f"this base takes (r, {in_features}) and ({out_features}, r)"
        )
    if m.delta is not None and tuple(m.delta.shape) != (out_features,):
        raise ShapeMismatch(
            f"layer {m.layer} {m.module}: delta {tuple(m.delta.shape)}; this base takes ({out_features},)"
        )


def check_place(layer: int, module: str, num_layers: int, module_shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises: ShapeMismatch: the base has no such module there."""
    if not 0 <= layer < num_layers:
        raise ShapeMismatch(f"LoRA on layer {layer}; this base has layers 0 to {num_layers - 1}")
    if module not in MODULE_INDEX or module not in module_shapes:
        raise ShapeMismatch(f"layer {layer} has LoRA on {module}; this base has {', '.join(module_shapes)}")
    if layer and module not in LAYER_MODULES:
        raise ShapeMismatch(f"layer {layer} has LoRA on {module}, which is in no layer: give layer 0")


def _fill(
    modules: Sequence[LoraModule],
    tables: _Tables,
    shapes: Sequence[tuple[int, int]],
    num_layers: int,
    dtype: torch.dtype,
) -> PackedAdapter:
    packed = PackedAdapter(
        data=torch.zeros(tables.num_elements, dtype=dtype),
        deltas=torch.zeros(tables.num_deltas),
        ranks=tables.ranks,
        scalings=np.zeros((num_layers, len(MODULES)), dtype=np.float32),
        a_offsets=tables.a_offsets,
        b_offsets=tables.b_offsets,
        delta_offsets=tables.delta_offsets,
        in_features=tuple(shape[1] for shape in shapes),
        out_features=tuple(shape[0] for shape in shapes),
    )
    for m in modules:
        packed.lora_a(m.layer, m.module).copy_(m.lora_a)
        packed.lora_b(m.layer, m.module).copy_(m.lora_b.T)
        if m.delta is not None and (delta := packed.delta(m.layer, m.module)) is not None:
            delta.copy_(m.delta)
        packed.scalings[m.layer, MODULE_INDEX[m.module]] = m.scaling
    return packed


def _tables(
    ranks: Iterable[tuple[int, str, int]],
    deltas: Iterable[tuple[int, str]],
    num_layers: int,
    module_shapes: Mapping[str, tuple[int, int]],
) -> _Tables:
    table = np.zeros((num_layers, len(MODULES)), dtype=np.int32)
    for layer, module, rank in ranks:
        check_place(layer, module, num_layers, module_shapes)
        if rank < 1 or table[layer, MODULE_INDEX[module]]:
            raise ShapeMismatch(f"layer {layer} {module}: rank {rank}, or the module is given twice")
        table[layer, MODULE_INDEX[module]] = rank
    a_offsets, b_offsets = np.zeros(table.shape, dtype=np.int64), np.zeros(table.shape, dtype=np.int64)
    position = 0
    for layer in range(num_layers):
        for site in SITES.values():
            for offsets, side in ((a_offsets, 1), (b_offsets, 0)):
                position = -(-position // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
                for module in site:
                    index = MODULE_INDEX[module]
                    offsets[layer, index] = position
                    position += int(table[layer, index]) * module_shapes.get(module, (0, 0))[side]
    delta_offsets = np.full(table.shape, -1, dtype=np.int64)
    num_deltas = 0
    for layer, module in deltas:
        check_place(layer, module, num_layers, module_shapes)
        delta_offsets[layer, MODULE_INDEX[module]] = num_deltas
        num_deltas += -(-module_shapes[module][0] // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return _Tables(table, a_offsets, b_offsets, delta_offsets, position, num_deltas)
