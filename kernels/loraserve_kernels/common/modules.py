"""Parts of a base that an adapter may change: the linears, their sites, the norms.

They are the same for every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.common.sites import CALLED_SITES as CALLED_SITES
from loraserve_kernels.common.sites import COLUMNS as COLUMNS
from loraserve_kernels.common.sites import EXPERT_INDEX as EXPERT_INDEX
from loraserve_kernels.common.sites import EXPERT_MODULES as EXPERT_MODULES
from loraserve_kernels.common.sites import LAYER_MODULES as LAYER_MODULES
from loraserve_kernels.common.sites import LAYER_SITES as LAYER_SITES
from loraserve_kernels.common.sites import MODULE_INDEX as MODULE_INDEX
from loraserve_kernels.common.sites import MODULES as MODULES
from loraserve_kernels.common.sites import SITES as SITES
from loraserve_kernels.common.sites import check_place as check_place
from loraserve_kernels.common.sizes import ModuleSize
from loraserve_kernels.errors import TensorMismatch

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Dtypes that a CPU may hold adapters in."""

NORMS: tuple[str, ...] = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "norm")
"""Norms that an attention's, an MLP's and the head's inputs pass, and those that an attention's and
an MLP's outputs pass before they are added.
"""


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Rows that an adapter has in the place of rows of the base's weight or embedding table.

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


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Rows that an adapter's embedding and head have beyond the base's; float32.

    They are the tokens' from the base's ``vocab_size`` on.

    Attributes:
        embedding: [n, hidden_size].
        head: [n, hidden_size].
    """

    embedding: Tensor
    head: Tensor

    @property
    def num_rows(self) -> int:
        return self.head.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.embedding.nbytes + self.head.nbytes


@dataclass(frozen=True, slots=True)
class LoraModule:
    """Changes that an adapter makes to a linear.

    A linear with all of them computes ``(1 + dora_delta) · (W' x + B diag(scaling) A x) + bias +
    bias_delta``.

    Attributes:
        layer: which decoder layer; 0 for ``lm_head`` and ``embed_tokens``.
        module: the linear's short name, one of `COLUMNS` or `EXPERT_MODULES`.
        lora_a: [r, in_features]; in_features of ``embed_tokens`` is the size of the vocabulary. r
            may be 0.
        lora_b: [out_features, r].
        scaling: alpha / r, or alpha / sqrt(r); or [r] float32, a number of each rank.
        dora_delta: [out_features], DoRA's ``m / ‖W + scaling · B A‖ − 1`` (norms of the rows, W as
            the base computes with it), or None. Where it's given, the linear's output without its
            bias is multiplied by ``1 + dora_delta``, update included.
        bias_delta: [out_features], added to all of that, or None. Not for ``embed_tokens``.
        row_overrides: the rows of W' that aren't W's, or None. Not for `EXPERT_MODULES`.
        expert: number of the expert whose linear it is; 0 for one that isn't an expert's.
    """

    layer: int
    module: str
    lora_a: Tensor
    lora_b: Tensor
    scaling: float | Tensor
    dora_delta: Tensor | None = None
    bias_delta: Tensor | None = None
    row_overrides: ReplacedRows | None = None
    expert: int = 0

    @property
    def place(self) -> tuple[int, str, int]:
        """Layer, module and expert, which no two modules of an adapter share."""
        return self.layer, self.module, self.expert


def check_shapes(m: LoraModule, shape: tuple[int, int]) -> None:
    """Check the shapes of the module; read no tensor.

    Raises: TensorMismatch: one of the module's tensors doesn't fit a linear of `shape`,
    (out_features, in_features).
    """
    out_features, in_features = shape
    rank = m.lora_a.shape[0]
    if tuple(m.lora_a.shape) != (rank, in_features) or tuple(m.lora_b.shape) != (out_features, rank):
        raise TensorMismatch(
            f"layer {m.layer} {m.module}: lora_a {tuple(m.lora_a.shape)} and lora_b {tuple(m.lora_b.shape)}; "
            f"this base takes (r, {in_features}) and ({out_features}, r)"
        )
    if isinstance(m.scaling, Tensor) and tuple(m.scaling.shape) != (rank,):
        raise TensorMismatch(
            f"layer {m.layer} {m.module}: scaling {tuple(m.scaling.shape)}; rank {rank} takes ({rank},)"
        )
    for name, row in (("dora_delta", m.dora_delta), ("bias_delta", m.bias_delta)):
        if row is not None and tuple(row.shape) != (out_features,):
            raise TensorMismatch(
                f"layer {m.layer} {m.module}: {name} {tuple(row.shape)}; this base takes ({out_features},)"
            )
    if m.module == "embed_tokens" and m.bias_delta is not None:
        raise TensorMismatch("the embedding has a bias_delta; an embedding has no bias: pass row_overrides instead")
    if m.row_overrides is not None:
        if m.module in EXPERT_INDEX:
            raise TensorMismatch(f"layer {m.layer} {m.module} replaces rows of the base's weight, which experts don't")
        _check_row_shapes(m, m.row_overrides, shape)


def _check_row_shapes(m: LoraModule, rows: ReplacedRows, shape: tuple[int, int]) -> None:
    most, width = reversed(shape) if m.module == "embed_tokens" else shape
    ids, weight = tuple(rows.ids.shape), tuple(rows.weight.shape)
    if len(ids) != 1 or not 0 < ids[0] <= most or weight != (ids[0], width) or rows.ids.dtype != torch.int32:
        raise TensorMismatch(
            f"layer {m.layer} {m.module}: {rows.ids.dtype} ids {ids} of rows {weight}; this base takes int32 (n,) and "
            f"(n, {width}), n from 1 to {most}"
        )


def check_row_ids(m: LoraModule, shape: tuple[int, int]) -> None:
    """Check that the ids of the module's replaced rows ascend and are rows of the base's weight.

    Their shapes are right already.

    Raises:
        TensorMismatch: they don't, or aren't.
    """
    if m.row_overrides is None:
        return
    ids, num_rows = m.row_overrides.ids, shape[1] if m.module == "embed_tokens" else shape[0]
    if int(ids[0]) < 0 or int(ids[-1]) >= num_rows or not bool((ids[1:] > ids[:-1]).all()):
        raise TensorMismatch(
            f"layer {m.layer} {m.module}: ids of rows from {int(ids[0])} to {int(ids[-1])}; "
            "they must ascend, and this base "
            f"has rows 0 to {num_rows - 1}"
        )


def size_of(m: LoraModule) -> ModuleSize:
    """Measure the module, without reading its numbers."""
    num_rows = 0 if m.row_overrides is None else int(m.row_overrides.ids.shape[0])
    return ModuleSize(
        m.layer,
        m.module,
        int(m.lora_a.shape[0]),
        m.dora_delta is not None,
        m.bias_delta is not None,
        num_rows,
        m.expert,
    )


def check_norms(norms: Iterable[ReplacedNorm], num_layers: int, module_shapes: Mapping[str, tuple[int, int]]) -> None:
    """Check the norms' shapes; read no tensor.

    Raises: TensorMismatch: a norm that the base doesn't have, of another size, or given twice.
    """
    seen: set[tuple[int, str]] = set()
    for n in norms:
        if n.norm not in NORMS or not 0 <= n.layer < num_layers or (n.norm == "norm" and n.layer):
            raise TensorMismatch(
                f"layer {n.layer} has a norm {n.norm}; this base has layers 0 to {num_layers - 1} and the norms "
                f"{', '.join(NORMS)}, the last in layer 0"
            )
        widths = {module_shapes[m][1] for m in (*SITES["qkv"], *SITES["gate_up"], "lm_head") if m in module_shapes}
        if len(n.weight.shape) != 1 or not widths.issuperset(n.weight.shape) or (n.layer, n.norm) in seen:
            raise TensorMismatch(
                f"layer {n.layer} {n.norm}: weight {tuple(n.weight.shape)}, or it is given twice; "
                f"this base takes {widths} numbers"
            )
        seen.add((n.layer, n.norm))
