"""Copies from host memory to a device, beside the steps that run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from loraserve.limits import MIB

T = TypeVar("T")

MAX_IDLE_PINNED_BYTES = 1024 * MIB
"""Pinned memory that torch's allocator keeps for later use, by size, until it is told to give it back."""


class Copies(Protocol):
    """When a copy starts, and whether it has landed. Nothing here waits for the device."""

    def to_pinned(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The tensor in memory that a device copies from by itself, and the bytes of host memory that this takes. On any thread."""
        ...

    def step_launched(self) -> None:
        """Copies started from now on begin once the step that has just been launched is done."""
        ...

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        """Call `copy`, which launches copies; they begin once the last launched step is done. Returns its result, and what says whether they have landed."""
        ...


class DirectCopies:
    """For tensors in host memory: a copy has landed when its call returns, and no step runs meanwhile."""

    def to_pinned(self, tensor: Tensor) -> tuple[Tensor, int]:
        return tensor, tensor.nbytes

    def step_launched(self) -> None:
        pass

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        return copy(), lambda: True


class CudaCopies:
    """A stream of their own for copies. It waits for the event that is recorded behind each step; one more event behind each copy says when that has landed.

    Copies land in the order in which they were started. Call all but `to_pinned` on the thread that launches the steps, with their stream current.
    """

    def __init__(self, device: torch.device) -> None:
        """From now on; what the current stream does until then, such as clearing the tensors that are copied to, is waited for too."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_step = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.step_launched()

    def to_pinned(self, tensor: Tensor) -> tuple[Tensor, int]:
        pinned = tensor.pin_memory()
        stats = torch.cuda.host_memory_stats()
        idle_bytes = stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0)
        # only torch from 2.12 on can give it back
        give_back = getattr(torch.accelerator, "empty_host_cache", None)
        if idle_bytes > MAX_IDLE_PINNED_BYTES and give_back is not None:
            give_back()
        # the allocator takes powers of two
        return pinned, 1 << max(0, tensor.nbytes - 1).bit_length()

    def step_launched(self) -> None:
        self._last_step.record(torch.cuda.current_stream(self._device))

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        self._stream.wait_event(self._last_step)
        with torch.cuda.stream(self._stream):
            result = copy()
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record(self._stream)
        return result, landed.query
