"""LoRA on the CPU: one compiled launch for all segments of a step where numba is installed, PyTorch segment by segment otherwise."""

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

from loraserve_kernels import threads
from loraserve_kernels.layout import MODULE_INDEX, SITES
from loraserve_kernels.plan import LoraPlan

HAS_NUMBA: bool = importlib.util.find_spec("numba") is not None

_MIN_PARALLEL_BYTES = 128 << 10
"""A launch with less work than reading so many bytes isn't worth waking a second thread for."""


def apply_lora(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """`launch.apply_lora` by the fastest way that this machine has. Tensors are taken as checked."""
    if HAS_NUMBA:
        _apply_lora_numba(x, y, plan, site, layer, bias)
    else:
        apply_lora_torch(x, y, plan, site, layer, bias)


def apply_embedding_lora(token_ids: Tensor, y: Tensor, plan: LoraPlan) -> None:
    """`launch.apply_embedding_lora` by the fastest way that this machine has. Tensors are taken as checked."""
    if HAS_NUMBA:
        _apply_lora_numba(token_ids[:, None], y, plan, "embed", 0, None)
    else:
        apply_embedding_lora_torch(token_ids, y, plan)


def apply_lora_torch(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """`launch.apply_lora` in PyTorch, segment by segment."""
    first = MODULE_INDEX[SITES[site][0]]
    for segment in plan.segments:
        adapter, rows = segment.adapter, slice(segment.row_start, segment.row_end)
        site_a = adapter.site_a(layer, site)
        if not site_a.shape[0]:
            continue
        shrunk = x[rows] @ site_a.to(x.dtype).T
        rank_start = column = 0
        for index, module in enumerate(SITES[site], first):
            rank, width = int(adapter.ranks[layer, index]), adapter.out_features[index]
            if rank:
                b = adapter.lora_b(layer, module).to(x.dtype)
                scaling = float(adapter.scalings[layer, index])
                part = y[rows, column : column + width].addmm_(
                    shrunk[:, rank_start : rank_start + rank], b, alpha=scaling
                )
                _scale(part, adapter.delta(layer, module), None if bias is None else bias[column : column + width])
            rank_start, column = rank_start + rank, column + width


def apply_embedding_lora_torch(token_ids: Tensor, y: Tensor, plan: LoraPlan) -> None:
    """`launch.apply_embedding_lora` in PyTorch, segment by segment."""
    for segment in plan.segments:
        adapter, part = segment.adapter, y[segment.row_start : segment.row_end]
        a, b = adapter.lora_a(0, "embed_tokens"), adapter.lora_b(0, "embed_tokens")
        if a.shape[0]:
            shrunk = a[:, token_ids[segment.row_start : segment.row_end]].to(y.dtype).T
            part.addmm_(shrunk, b.to(y.dtype), alpha=float(adapter.scalings[0, MODULE_INDEX["embed_tokens"]]))
            _scale(part, adapter.delta(0, "embed_tokens"), None)


def _scale(y: Tensor, delta: Tensor | None, bias: Tensor | None) -> None:
    if delta is not None:
        y.addcmul_(y if bias is None else y - bias, delta)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernel for adapters of `dtype`, or read it from numba's cache."""
    if HAS_NUMBA:
        _kernel(dtype)


@dataclass(frozen=True, slots=True)
class _Kernel:
    call: Callable[[int], None]
    address: int
    handle: Any
    """Keeps the machine code alive."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """What stays the same over the layers of a step for the adapters of one dtype: the argument block, filled but for pointers and layer."""

    kernel: _Kernel
    args: npt.NDArray[np.int64]
    address: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class _SiteLaunches:
    """A plan's launches at a site, one for each dtype; they share scratch memory, since they run one after the other."""

    launches: tuple[_Launch, ...]
    scratch: npt.NDArray[np.float32]
    first: int
    num_modules: int


@functools.cache
def _kernel(dtype: torch.dtype) -> _Kernel:
    from loraserve_kernels import cpu_lora

    compiled = {
        torch.float32: cpu_lora.compiled_float32,
        torch.bfloat16: cpu_lora.compiled_bfloat16,
        torch.float16: cpu_lora.compiled_float16,
    }
    handle = compiled[dtype]()
    return _Kernel(handle.ctypes, handle.address, handle)


def _make_launches(plan: LoraPlan, site: str) -> _SiteLaunches:
    from loraserve_kernels import cpu_lora as words

    modules = SITES[site]
    first, adapter = MODULE_INDEX[modules[0]], plan.segments[0].adapter
    widths = adapter.out_features[first : first + len(modules)]
    # numbers read for each rank; the embedding reads one of A's for each row
    width = sum(widths) // len(widths) + (adapter.in_features[first] if site != "embed" else 0)
    site_ranks = [s.adapter.ranks[:, first : first + len(modules)].sum(1).max(initial=0) for s in plan.segments]
    scratch = np.empty((plan.num_tokens, max(1, int(max(site_ranks)))), dtype=np.float32)
    launches = []
    # the head and the embedding rarely have any
    for dtype, table in plan.tables.items() if max(site_ranks) else ():
        args = np.zeros(words.NUM_WORDS, dtype=np.int64)
        args[words.SEGMENTS], args[words.NUM_SEGMENTS] = table.ctypes.data, len(table)
        args[words.IN_FEATURES], args[words.NUM_SLICES] = adapter.in_features[first], len(modules)
        args[words.WIDTHS : words.WIDTHS + len(modules)] = widths
        args[words.SCRATCH], args[words.SCRATCH_STRIDE] = scratch.ctypes.data, scratch.shape[1]
        args[words.TAKES_TOKENS] = site == "embed"
        work = sum(
            # a row beyond the first costs arithmetic, about a quarter of what reading the weights did
            int(rank) * width * dtype.itemsize * (3 + s.row_end - s.row_start) // 4
            for s, rank in zip(plan.segments, site_ranks, strict=True)
            if s.adapter.data.dtype == dtype
        )
        num_threads = threads.num_threads() if work >= _MIN_PARALLEL_BYTES else 1
        launches.append(_Launch(_kernel(dtype), args, args.ctypes.data, num_threads))
    return _SiteLaunches(tuple(launches), scratch, first, adapter.ranks.shape[1])


def _apply_lora_numba(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None) -> None:
    prepared = plan.launches.get(site)
    if not isinstance(prepared, _SiteLaunches):
        prepared = plan.launches[site] = _make_launches(plan, site)
    for launch in prepared.launches:
        args = launch.args
        # CLAIMED, FINISHED, X … Y_STRIDE, TABLE_INDEX
        args[0] = args[8] = 0
        args[16:20] = (x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
        args[23] = layer * prepared.num_modules + prepared.first
        # BIAS
        args[31] = 0 if bias is None else bias.data_ptr()
        threads.run(launch.kernel.call, launch.kernel.address, launch.address, launch.num_threads)
