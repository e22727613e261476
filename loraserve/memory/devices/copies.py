"""Copies from host memory to a device, during the steps that run there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from loraserve.limits import MIB

T = TypeVar("T")

MAX_IDLE_PINNED_BYTES = 1024 * MIB
"""Bytes of freed pinned memory that torch's allocator may keep for later use."""


class Copies(Protocol):
    """A way to copy to a device during its steps. Nothing here waits for the device."""

    @property
    def needs_pinned(self) -> bool:
        """Whether the source of a copy must be pinned memory."""
        ...

    def host_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Count the bytes of host memory that such tensors take. Any thread may call it."""
        ...

    def trim(self) -> None:
        """Give unused pinned memory over the bound back to the system.

        It may take a while: for a loader's thread.
        """
        ...

    def step_launched(self) -> None:
        """Make copies that are started from now on begin after the step that was just launched."""
        ...

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        """Call `copy`, which launches copies that begin after the last launched step.

        Returns:
            Its result, and a function that returns whether the copies have landed.
        """
        ...


class DirectCopies:
    """Copies in host memory: each has landed when its call returns, and no step runs meanwhile."""

    needs_pinned = False

    def host_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def trim(self) -> None:
        pass

    def step_launched(self) -> None:
        pass

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        return copy(), lambda: True


class CudaCopies:
    """Copies on a CUDA stream of their own.

    The stream waits for an event behind each step; an event behind each copy shows when that has
    landed.

    Copies land in the order in which they were started. `step_launched` and `start` are for the
    thread that launches the steps, with their stream current.
    """

    needs_pinned = True

    def __init__(self, device: torch.device) -> None:
        """Make the first copy wait for what the current stream has launched.

        That includes clearing the tensors that are copied to.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_step = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.step_launched()

    def host_bytes(self, tensors: Iterable[Tensor]) -> int:
        # torch's allocator of pinned memory takes powers of two
        return sum(1 << max(0, tensor.nbytes - 1).bit_length() for tensor in tensors)

    def trim(self) -> None:
        stats = torch.cuda.host_memory_stats()
        idle_bytes = stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0)
        # not every torch that is supported can give it back
        give_back = getattr(torch.accelerator, "empty_host_cache", None)
        if idle_bytes > MAX_IDLE_PINNED_BYTES and give_back is not None:
            give_back()

    def step_launched(self) -> None:
        self._last_step.record(torch.cuda.current_stream(self._device))

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        self._stream.wait_event(self._last_step)
        with torch.cuda.stream(self._stream):
            result = copy()
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record(self._stream)
        return result, landed.query
