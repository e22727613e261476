"""Decode steps as CUDA graphs, one per batch size with and without adapters.

On the CPU (Triton's interpreter) they run eagerly.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation

logger = logging.getLogger(__name__)


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """List the sizes that decode steps are padded to, each at most twice the one before."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Capture each decode step once, by its size and whether any row has an adapter.

    Replay it from static buffers.

    Args:
        device: a CUDA device, or the CPU, where nothing is captured.
        sizes: batch sizes, ascending.
        run: computes a step of that many rows, with LoRA's kernels or without, from buffers at
            fixed addresses, and returns its logits. It doesn't wait for the device; padding rows
            read and write nothing of others.
    """

    def __init__(self, device: torch.device, sizes: list[int], run: Callable[[int, bool], Tensor]) -> None:
        self._device, self._sizes, self._run = device, sizes, run
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def bucket(self, num_rows: int) -> int | None:
        """Find the smallest size that holds that many rows; None if there is none."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def capture(self, prepare: Callable[[int], None]) -> None:
        """Capture every step, largest first, so that smaller ones share its memory.

        Args:
            prepare: fills the static buffers with a step of that many padding rows.
        """
        if self._device.type != "cuda":
            return
        started = time.monotonic()
        pool = None
        for size in reversed(self._sizes):
            prepare(size)
            for with_lora in (True, False):
                # before the capture: kernels are compiled, and libraries allocate their workspaces
                self._run(size, with_lora)
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                # threads that load adapters may allocate pinned memory meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    logits = self._run(size, with_lora)
                pool = graph.pool() if pool is None else pool
                self._graphs[size, with_lora] = graph, borrow(logits)
                # the next capture may take this memory: only one step's logits are alive at a time
                del logits
        seconds = time.monotonic() - started
        logger.info("captured %d decode steps in %.1f s", len(self._graphs), seconds)

    def replay(self, size: int, with_lora: bool) -> Tensor:
        """Run a step; its logits [size, vocab_size] are valid until the next step."""
        captured = self._graphs.get((size, with_lora))
        if captured is None:
            return self._run(size, with_lora)
        graph, logits = captured
        graph.replay()
        return logits


class _Borrowed:
    """Array interface through which ``torch.as_tensor`` sees memory without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrow(tensor: Tensor) -> Tensor:
    """View the same memory as a tensor that doesn't keep it from being reused.

    Args:
        tensor: float32, contiguous, on a CUDA device.

    Raises:
        InvariantViolation: the tensor is none of that kind.
    """
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or not tensor.is_cuda:
        raise InvariantViolation(f"logits are {tensor.dtype} on {tensor.device}; expected contiguous float32 on a GPU")
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device)
