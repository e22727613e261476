"""Reads of the base's weights for adapters: norms for DoRA, and comparison with saved weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from loraserve.adapters.ir import OUTSIDE_LAYERS
from loraserve.errors import AdapterUnservable
from loraserve_kernels.common.modules import EXPERT_INDEX, LoraModule
from loraserve_kernels.common.sites import label_of
from loraserve_kernels.cpu import threads


class BaseWeights(Protocol):
    """The resident base. Its weights never change, so any thread may read them while steps run."""

    @property
    def device(self) -> torch.device: ...

    def weight_rows(self, layer: int, module: str, /) -> Iterator[Tensor]:
        """Yield a module's weight as the base computes with it, in blocks of rows, in order.

        Blocks are [n, in_features], dequantised to float32, on `device`.

        Of ``embed_tokens``, the rows of the table: [n, hidden_size], a row for each token.
        """
        ...

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, [out_features] float32, on `device`; None where it has none."""
        ...


@contextlib.contextmanager
def background_compute(device: torch.device) -> Iterator[None]:
    """Keep this thread's work in the block from holding up steps.

    On a CPU it uses this thread alone, on a GPU a stream of its own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(threads.alone())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.stream(stream))
        yield


def dora_delta(m: LoraModule, magnitude: Tensor, weights: BaseWeights) -> Tensor:
    """Compute ``magnitude / ‖W + scaling · B A‖ - 1`` by output row, [out_features] float32.

    It is computed in float32, a block of W at a time, and lies in host memory.

    Source: DoRA, arXiv:2402.09353, as PEFT computes it in evaluation. The embedding's weight is its
    table transposed: a row's norm is over all tokens.

    Raises:
        AdapterUnservable: a row of the updated weight is zero, or not finite.
    """
    device = weights.device
    a, b = m.lora_a.to(device, torch.float32), m.lora_b.to(device, torch.float32) * m.scaling
    norms = _column_norms(m, a, b, weights) if m.module == "embed_tokens" else _row_norms(m, a, b, weights)
    delta = (magnitude.to(device, torch.float32) / norms - 1).cpu()
    if not bool(delta.isfinite().all()):
        row = int(delta.isfinite().logical_not().nonzero()[0])
        raise AdapterUnservable(
            f"{module_label(m)}: the norm of row {row} of the updated weight is {float(norms[row]):g}, "
            f"and DoRA divides by it.",
            hint="Check that the adapter was trained on this base.",
        )
    return delta


_PIECE_WEIGHTS = 1 << 18
"""Elements of a weight that a CPU computes with at a time, so that they stay in its cache."""


def _pieces(weights: BaseWeights, layer: int, module: str) -> Iterator[Tensor]:
    """Yield a module's weight in small blocks of rows."""
    for block in weights.weight_rows(layer, module):
        is_on_cpu = block.device.type == "cpu"
        yield from torch.split(block, max(1, _PIECE_WEIGHTS // block.shape[1])) if is_on_cpu else (block,)


def _adapted_pieces(weights: BaseWeights, m: LoraModule) -> Iterator[Tensor]:
    """Yield the module's weight in small blocks of rows, with the adapter's rows in place."""
    start = 0
    for block in _pieces(weights, m.layer, m.module):
        end = start + block.shape[0]
        if m.row_overrides is not None:
            first, last = torch.searchsorted(
                m.row_overrides.ids, torch.tensor([start, end], dtype=torch.int32)
            ).tolist()
            if first < last:
                block = block.clone()
                places = m.row_overrides.ids[first:last].to(block.device, torch.int64) - start
                block[places] = m.row_overrides.weight[first:last].to(block.device, torch.float32)
        yield block
        start = end


def _row_norms(m: LoraModule, a: Tensor, b: Tensor, weights: BaseWeights) -> Tensor:
    norms, start = torch.empty(b.shape[0], device=b.device), 0
    for block in _adapted_pieces(weights, m):
        end = start + block.shape[0]
        updated = torch.addmm(block, b[start:end], a)
        torch.linalg.vector_norm(updated, dim=1, out=norms[start:end])
        start = end
    return norms


def _column_norms(m: LoraModule, a: Tensor, b: Tensor, weights: BaseWeights) -> Tensor:
    squares, start = torch.zeros(b.shape[0], dtype=torch.float64, device=b.device), 0
    for block in _adapted_pieces(weights, m):
        end = start + block.shape[0]
        updated = torch.addmm(block, a[:, start:end].T, b.T)
        squares += torch.linalg.vector_norm(updated, dim=0).double() ** 2
        start = end
    return squares.sqrt().float()


def is_base_copy(module: str, saved: Tensor, weights: BaseWeights, dtype: torch.dtype, tolerance: float | None) -> bool:
    """Check whether a weight that PEFT saved with an adapter is this base's, to the bit.

    Loading it in the base's place, as PEFT does, changes nothing then.

    Args:
        saved: [vocab_size, hidden_size], any float dtype.
        dtype: what the base is held in. PEFT casts the copy to it: one of 16 bits is another weight
            than a float32 base's, one of float32 may be a 16-bit base's.
        tolerance: how far a row may be from the base's, relative to its length, where that was
            quantized: the copy is of what it was before. None: not at all.
    """
    start = 0
    for block in _pieces(weights, 0, module):
        end = start + block.shape[0]
        rows = saved[start:end].to(block.device, torch.float32)
        if tolerance is None:
            is_same = torch.equal(rows.to(dtype), block.to(dtype))
        else:
            near = torch.linalg.vector_norm(rows - block, dim=1) <= tolerance * torch.linalg.vector_norm(rows, dim=1)
            is_same = bool(near.all())
        if not is_same:
            return False
        start = end
    return True


def changed_rows(layer: int, module: str, saved: Tensor, weights: BaseWeights) -> Tensor:
    """Find the rows of a trained weight that differ from the base's, ascending, [n] int64.

    Args:
        saved: [out_features, in_features], of the embedding [vocab_size, hidden_size]; any float
            dtype.
    """
    found, start = [], 0
    for block in _pieces(weights, layer, module):
        rows = saved[start : start + block.shape[0]].to(block.device, torch.float32)
        found.append(start + (rows != block).any(1).nonzero()[:, 0].cpu())
        start += block.shape[0]
    return torch.cat(found)


def module_label(m: LoraModule) -> str:
    """Format the module's name for messages: ``Layer 3 q_proj``, ``lm_head``."""
    if m.module in OUTSIDE_LAYERS:
        return m.module
    return f"Layer {m.layer} {label_of(m.module, m.expert) if m.module in EXPERT_INDEX else m.module}"
