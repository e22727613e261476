"""The loss of precision by how an adapter is held, measured for each adapter as it is loaded.

Two things lie between an update as it was uploaded and as it is served: its ranks may be cut to the
fewest that keep within an error (`truncate`), and a device may hold its numbers in a narrower dtype
than the file's (`round_to_held`). Both are measured together, in the Frobenius norm of a module's
``B diag(scaling) A``, relative to the uploaded one's; the product itself, as large as a weight of
the base, is never made: its norm is the sum of two small Gram matrices' product. Rows that stand in
the place of the base's are rounded too, never cut, and measured likewise. δ, shifts and norms are
float32 on every device, and lose nothing.

DoRA's δ is computed for the update as it's held, not as it was uploaded: a row's length is its
magnitude then, exactly, and of what rounding did to the row only the part across it remains. (Of
cut ranks hardly any lies along the row; with the uploaded norms the error would be up to 2 %
smaller.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve.errors import AdapterUnservable
from loraserve.memory.devices.base import DTYPE_NAMES
from loraserve.memory.loading.base_weights import module_label
from loraserve_kernels.cpu.lora.layout import LoraModule, ReplacedRows
from loraserve_kernels.reference import quantize_rows

_INT8_MAX = 127
_CHUNK_ELEMENTS = 1 << 19
"""Elements converted at a time, so that a vocabulary's matrix isn't held twice in a wider dtype."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The loss that an operator allows adapters.

    Attributes:
        rank_error: relative error within which each module keeps the fewest ranks, at least one;
            None keeps all.
        max_loss: loss of any module over which an adapter is refused; None refuses none.
    """

    rank_error: float | None = None
    max_loss: float | None = None


EXACT = Precision()
"""The default: no rank is cut, and no rounding refused."""


def truncate(m: LoraModule, error: float) -> LoraModule:
    """Cut the module to the fewest ranks that keep ``B diag(scaling) A`` within `error`.

    The error is relative, in the Frobenius norm; at least one rank is kept. A module that needs all
    of its ranks is returned as it is.

    New factors are balanced (rank by rank, the two rows are of one length), orthogonal and float32,
    the strongest rank first.

    Source: Eckart–Young, on the cores of two thin QR factorisations: ``B A = Q_b (R_b R_aᵀ) Q_aᵀ``,
    of which the inner matrix is r × r.
    """
    rank = m.lora_a.shape[0]
    if rank < 2:
        return m
    a = m.lora_a.double()
    if isinstance(m.scaling, Tensor):
        a *= m.scaling[:, None]
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(m.lora_b.double())
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    # what is lost by stopping before rank i, the smallest added first
    lost = s.square().flip(0).cumsum(0).flip(0).sqrt()
    kept = max(1, int((lost > error * lost[0]).sum()))
    if kept >= rank:
        return m
    root = s[:kept].sqrt()
    return replace(
        m,
        lora_a=(root[:, None] * (vh[:kept] @ q_a.T)).float(),
        lora_b=((q_b @ u[:, :kept]) * root).float(),
        scaling=1.0 if isinstance(m.scaling, Tensor) else m.scaling,
    )


def round_to_held(m: LoraModule, dtype: torch.dtype) -> LoraModule:
    """Round A and B as a device that holds them in `dtype` rounds them.

    They are of that dtype, or float32 if it is int8. A module that needs no rounding is returned as
    it is.
    """
    if _is_exact(m.lora_a, dtype) and _is_exact(m.lora_b, dtype):
        return m
    return replace(m, lora_a=_held(m.lora_a, dtype), lora_b=_held(m.lora_b.T, dtype).T)


def loss(uploaded: LoraModule, held: LoraModule, dtype: torch.dtype) -> float:
    """Compute the relative error of a module as held against it as uploaded.

    It is the error of its update or of its replaced rows, whichever is larger.

    Args:
        held: `round_to_held` of the uploaded module, or of what `truncate` left of it.
        dtype: what the device holds rows in.
    """
    of_rows = 0.0 if uploaded.row_overrides is None else _rows_loss(uploaded.row_overrides, dtype)
    if held.lora_a is uploaded.lora_a and held.lora_b is uploaded.lora_b:
        return of_rows
    if held.lora_a.shape == uploaded.lora_a.shape:
        return max(of_rows, _rounding_loss(uploaded, held))
    left, right = [uploaded.lora_b.T, -held.lora_b.T], [_scaled(uploaded), _scaled(held)]
    size = _product_norm(left[:1], right[:1])
    return max(of_rows, _product_norm(left, right) / size) if size else of_rows


def refuse_lossy(m: LoraModule, lost: float, dtype: torch.dtype, precision: Precision) -> None:
    """Raise an error if a module loses more than the operator allows.

    Raises:
        AdapterUnservable: the loss is over the bound; the message names module, loss and bound.
    """
    if precision.max_loss is None or lost <= precision.max_loss:
        return
    cut = "" if precision.rank_error is None else f", its ranks cut to within {precision.rank_error:g}"
    raise AdapterUnservable(
        f"{module_label(m)} has a precision loss of {lost:.3g} in {DTYPE_NAMES[dtype]}{cut}; "
        f"at most {precision.max_loss:g} is allowed.",
        hint="Serve with a wider --adapter-dtype, a smaller --adapter-rank-error or a larger --max-adapter-loss.",
    )


def _is_exact(matrix: Tensor, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.promote_types(matrix.dtype, dtype) == dtype


def _held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the rows as they are held, [n, width]."""
    if dtype.is_floating_point:
        return rows.to(dtype)
    codes, scales = quantize_rows(rows.float(), _INT8_MAX)
    return codes.mul_(scales[:, None])


def _scaled(m: LoraModule) -> Tensor:
    """Compute ``diag(scaling) A``, [r, in_features]."""
    scaling = m.scaling[:, None] if isinstance(m.scaling, Tensor) else m.scaling
    return m.lora_a.double() * scaling


def _rows_loss(rows: ReplacedRows, dtype: torch.dtype) -> float:
    weight = rows.weight
    if _is_exact(weight, dtype):
        return 0.0
    error = size = 0.0
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step]
        wide = part.float()
        error += float((wide - _held(part, dtype)).double().square().sum())
        size += float(wide.double().square().sum())
    return math.sqrt(error / size) if size else 0.0


def _rounding_loss(uploaded: LoraModule, held: LoraModule) -> float:
    """Compute the loss between two modules of the same ranks, exactly even if it is small.

    ``B A − B̃ Ã = (B − B̃) A + B̃ (A − Ã)``
    """
    of_a, of_b = _grams(uploaded.lora_a, held.lora_a), _grams(uploaded.lora_b.T, held.lora_b.T)
    if isinstance(uploaded.scaling, Tensor):
        weights = uploaded.scaling.double()
        of_a = [gram * weights[:, None] * weights for gram in of_a]
    whole_a, mixed_a, lost_a = of_a
    whole_b, mixed_b, lost_b = of_b
    size = float((whole_a * whole_b).sum())
    # B̃ᵀ B̃, and B̃ᵀ (B − B̃)
    held_b, cross_b = whole_b - mixed_b - mixed_b.T + lost_b, mixed_b - lost_b
    error = float((lost_b * whole_a + 2 * cross_b.T * mixed_a + held_b * lost_a).sum())
    return math.sqrt(max(0.0, error) / size) if size > 0 else 0.0


def _grams(rows: Tensor, held: Tensor) -> list[Tensor]:
    """Compute ``R Rᵀ``, ``R Dᵀ`` and ``D Dᵀ`` of rows R and their loss D, [r, r] float64 each."""
    rank = rows.shape[0]
    whole, lost = (torch.zeros(rank, width, dtype=torch.float64) for width in (2 * rank, rank))
    for start, end in _chunks(rank, rows.shape[1]):
        both = torch.cat((rows[:, start:end].float(), rows[:, start:end] - held[:, start:end]))
        whole += both[:rank] @ both.T
        lost += both[rank:] @ both[rank:].T
    return [whole[:, :rank], whole[:, rank:], lost]


def _product_norm(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Compute ``‖Lᵀ R‖`` (Frobenius), where L and R are these rows one below the other."""
    return math.sqrt(max(0.0, float((_gram(left) * _gram(right)).sum())))


def _gram(parts: Sequence[Tensor]) -> Tensor:
    """Compute ``M Mᵀ`` of rows one below the other, [n, n] float64.

    Products are float64: what cancels may leave little.
    """
    num_rows = sum(part.shape[0] for part in parts)
    total = torch.zeros(num_rows, num_rows, dtype=torch.float64)
    for start, end in _chunks(num_rows, parts[0].shape[1]):
        columns = torch.cat([part[:, start:end].double() for part in parts])
        total += columns @ columns.T
    return total


def _chunks(num_rows: int, width: int) -> list[tuple[int, int]]:
    """Split the columns into ranges to convert at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(1, num_rows))
    return [(start, min(width, start + step)) for start in range(0, width, step)]
