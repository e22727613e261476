"""LoRA on the CPU.

One compiled launch does all segments of a step where numba is installed, PyTorch segment by segment
otherwise.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.modules import CALLED_SITES, COLUMNS, MODULE_INDEX
from loraserve_kernels.common.packed import PackedAdapter, PackedRows
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu import threads

HAS_NUMBA: bool = importlib.util.find_spec("numba") is not None

MIN_PARALLEL_BYTES = 128 << 10
"""A launch with less work than reading that many bytes isn't worth waking a second thread for."""

_WIDENED_WEIGHTS = 1 << 22
"""Number of weights of replaced rows that PyTorch has in float32 at a time."""


def apply_lora(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """`ops.apply_lora` by the fastest way that this machine has.

    Tensors are taken as checked.
    """
    if site not in plan.sites:
        return
    if HAS_NUMBA:
        _apply_lora_numba(x, y, plan, site, layer, bias)
    else:
        apply_lora_torch(x, y, plan, site, layer, bias)


def apply_embedding_lora(token_ids: Tensor, y: Tensor, plan: LoraPlan) -> None:
    """`ops.apply_embedding_lora` by the fastest way that this machine has.

    Tensors are taken as checked.
    """
    if "embed" not in plan.sites:
        return
    if HAS_NUMBA:
        _apply_lora_numba(token_ids[:, None], y, plan, "embed", 0, None)
    else:
        apply_embedding_lora_torch(token_ids, y, plan)


def apply_lora_torch(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """`ops.apply_lora` in PyTorch, segment by segment."""
    for segment in plan.segments:
        adapter, rows = segment.adapter, slice(segment.row_start, segment.row_end)
        if not adapter.work[site].num_bytes:
            continue
        shrunk = x[rows] @ adapter.site_a(layer, site).to(x.dtype).T
        rank_start = column = 0
        for index, module in enumerate(CALLED_SITES[site], MODULE_INDEX[CALLED_SITES[site][0]]):
            rank, width = int(adapter.ranks[layer, index]), adapter.out_features[index]
            part, added = y[rows, column : column + width], None if bias is None else bias[column : column + width]
            replaced = adapter.row_overrides(layer, module)
            if replaced is not None:
                _replace(x[rows], part, replaced, added)
            _expand(shrunk[:, rank_start : rank_start + rank], part, adapter, module, layer, added)
            rank_start, column = rank_start + rank, column + width


def apply_embedding_lora_torch(token_ids: Tensor, y: Tensor, plan: LoraPlan) -> None:
    """`ops.apply_embedding_lora` in PyTorch, segment by segment."""
    for segment in plan.segments:
        adapter, part = segment.adapter, y[segment.row_start : segment.row_end]
        tokens = token_ids[segment.row_start : segment.row_end]
        replaced = adapter.row_overrides(0, "embed_tokens")
        if replaced is not None:
            found = torch.searchsorted(replaced.ids, tokens.int()).clamp_(max=len(replaced.ids) - 1)
            has_row = (replaced.ids[found] == tokens).nonzero()[:, 0]
            part[has_row] = replaced.pick(found[has_row], y.dtype)
        shrunk = adapter.lora_a(0, "embed_tokens")[:, tokens].to(y.dtype).T
        _expand(shrunk, part, adapter, "embed_tokens", 0, None)


def _replace(x: Tensor, y: Tensor, rows: PackedRows, bias: Tensor | None) -> None:
    # all of a head's rows at once would be gigabytes when widened
    count = max(1, _WIDENED_WEIGHTS // rows.weight.shape[1])
    for start in range(0, len(rows.ids), count):
        ids = rows.ids[start : start + count].long()
        columns = x @ rows.pick(slice(start, start + count), x.dtype).T
        y[:, ids] = columns if bias is None else columns + bias[ids]


def _expand(shrunk: Tensor, y: Tensor, adapter: PackedAdapter, module: str, layer: int, bias: Tensor | None) -> None:
    delta, shift = adapter.dora_delta(layer, module), adapter.bias_delta(layer, module)
    if shrunk.shape[1]:
        y.addmm_(shrunk * adapter.scaling(layer, module), adapter.lora_b(layer, module).to(y.dtype))
    if delta is not None:
        y.addcmul_(y if bias is None else y - bias, delta)
    if shift is not None:
        y.add_(shift)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernel for adapters of `dtype`, or read it from numba's cache."""
    if HAS_NUMBA:
        kernel_of(dtype)


@dataclass(frozen=True, slots=True)
class _Kernel:
    call: Callable[[int], None]
    address: int
    handle: Any
    """Keeps the machine code alive."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch of a step's adapters of one dtype, for all layers.

    It is the argument block, filled but for pointers and layer.
    """

    kernel: _Kernel
    args: npt.NDArray[np.int64]
    address: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class _SiteLaunches:
    """A plan's launches at a site, one for each dtype.

    They share scratch memory, since they run one after the other.
    """

    launches: tuple[_Launch, ...]
    scratch: npt.NDArray[np.float32]
    tiles: npt.NDArray[np.float32]
    first: int


@functools.cache
def kernel_of(dtype: torch.dtype) -> _Kernel:
    from loraserve_kernels.cpu.lora import kernel as lora_kernel

    compiled = {
        torch.float32: lora_kernel.compiled_float32,
        torch.bfloat16: lora_kernel.compiled_bfloat16,
        torch.float16: lora_kernel.compiled_float16,
        torch.int8: lora_kernel.compiled_int8,
    }
    handle = compiled[dtype]()
    return _Kernel(handle.ctypes, handle.address, handle)


def _make_launches(plan: LoraPlan, site: str) -> _SiteLaunches:
    from loraserve_kernels.cpu.lora import kernel as lora_kernel

    modules = CALLED_SITES[site]
    first, adapter = MODULE_INDEX[modules[0]], plan.segments[0].adapter
    works = [(s, s.adapter.work[site]) for s in plan.segments]
    scratch = np.empty((plan.num_tokens, max(1, *(work.num_ranks for _, work in works))), dtype=np.float32)
    has_rows = any(work.has_rows for _, work in works)
    tiles = np.empty((threads.num_threads() if has_rows else 0, lora_kernel.TILE_FLOATS), dtype=np.float32)
    launches = []
    for dtype, table in plan.tables.items():
        num_bytes = sum(
            # a row beyond the first costs arithmetic, about a quarter of what reading the weights
            # did
            work.num_bytes * (3 + s.row_end - s.row_start) // 4
            for s, work in works
            if s.adapter.data.dtype == dtype
        )
        if not num_bytes:
            # the head and the embedding rarely have any
            continue
        args = np.zeros(lora_kernel.NUM_WORDS, dtype=np.int64)
        args[lora_kernel.SEGMENTS], args[lora_kernel.NUM_SEGMENTS] = table.ctypes.data, len(table)
        args[lora_kernel.IN_FEATURES], args[lora_kernel.NUM_SLICES] = adapter.in_features[first], len(modules)
        args[lora_kernel.WIDTHS : lora_kernel.WIDTHS + len(modules)] = adapter.out_features[
            first : first + len(modules)
        ]
        args[lora_kernel.SCRATCH], args[lora_kernel.SCRATCH_STRIDE] = scratch.ctypes.data, scratch.shape[1]
        args[lora_kernel.TAKES_TOKENS] = site == "embed"
        args[lora_kernel.TILES] = tiles.ctypes.data if has_rows else 0
        num_threads = threads.num_threads() if num_bytes >= MIN_PARALLEL_BYTES else 1
        launches.append(_Launch(kernel_of(dtype), args, args.ctypes.data, num_threads))
    return _SiteLaunches(tuple(launches), scratch, tiles, first)


def _apply_lora_numba(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None) -> None:
    prepared = plan.launches.get(site)
    if not isinstance(prepared, _SiteLaunches):
        prepared = plan.launches[site] = _make_launches(plan, site)
    for launch in prepared.launches:
        args = launch.args
        # CLAIMED, FINISHED, ENTERED, X … Y_STRIDE, FIRST_RECORD of `kernel`, which imports numba
        args[0] = args[8] = args[16] = 0
        args[24:28] = (x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
        args[31] = layer * len(COLUMNS) + prepared.first
        # BIAS
        args[39] = 0 if bias is None else bias.data_ptr()
        threads.run(launch.kernel.call, launch.kernel.address, launch.address, launch.num_threads)
