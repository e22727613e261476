"""A GPU's memory as copies and steps see it, on CPU tensors: two queues, joined by events, that go
on when the test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from loraserve_kernels.gpu.paged.layout import A_UNITS, B_UNITS, MULTIPLIERS, RANK_TILE, UNIT_BYTES
from loraserve_kernels.gpu.paged.pool import PagedPool

T = TypeVar("T")


@dataclass(slots=True)
class _Copy:
    after_step: int
    writes: list[tuple[Tensor, Tensor, Tensor]]
    has_landed: bool = False


@dataclass(slots=True)
class SimulatedCopies:
    """Copies that are written when `run_copy` is called, in order, each not before the step that it
    has to wait for has run.
    """

    pool: PagedPool
    needs_pinned: bool = False
    num_launched: int = 0
    num_done: int = 0
    _marked: int = 0
    _steps: deque[Callable[[], None]] = field(default_factory=deque)
    _copies: deque[_Copy] = field(default_factory=deque)

    def host_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def trim(self) -> None:
        pass

    def step_launched(self) -> None:
        self._marked = self.num_launched

    def start(self, copy: Callable[[], T]) -> tuple[T, Callable[[], bool]]:
        memory = (self.pool.data, self.pool.records.view(-1))
        before = [tensor.clone() for tensor in memory]
        result = copy()
        writes = []
        for tensor, old in zip(memory, before, strict=True):
            places = (tensor != old).nonzero().squeeze(1)
            writes.append((tensor, places, tensor[places].clone()))
            tensor.copy_(old)
        queued = _Copy(self._marked, writes)
        self._copies.append(queued)
        return result, lambda: queued.has_landed

    def launch(self, step: Callable[[], None]) -> None:
        """Queue a step, which reads the memory when it runs."""
        self._steps.append(step)
        self.num_launched += 1

    def run_step(self) -> bool:
        """Whether there was one to run."""
        if not self._steps:
            return False
        self._steps.popleft()()
        self.num_done += 1
        return True

    def run_copy(self) -> bool:
        """Whether there was one that may run."""
        if not self._copies or self._copies[0].after_step > self.num_done:
            return False
        copy = self._copies.popleft()
        for tensor, places, values in copy.writes:
            tensor[places] = values
        copy.has_landed = True
        return True

    def run_all(self) -> None:
        while self.run_copy() or self.run_step():
            pass


def read_module(
    pool: PagedPool, first_tile: int, layer: int, rank: int, in_features: int, out_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A module's A [rank, in], B [rank, out] and multipliers [rank],
    as the kernels find them in the pool's memory.
    """
    records = pool.records[first_tile : first_tile + -(-rank // RANK_TILE), layer]

    def rows(column: int, width: int) -> Tensor:
        units = records[:, column : column + RANK_TILE].reshape(-1)[:rank].long()
        places = (units * UNIT_BYTES)[:, None] + torch.arange(width * pool.dtype.itemsize, device=units.device)
        return pool.data[places].view(pool.dtype)

    multipliers = records.view(torch.float32)[:, MULTIPLIERS:].reshape(-1)[:rank]
    return rows(A_UNITS, in_features), rows(B_UNITS, out_features), multipliers
