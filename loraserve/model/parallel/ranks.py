"""Messages that the ranks of a group send to each other while a step is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(minutes=10)
"""A rank that is that late has died, which its group's watch notices at once, or was stopped."""


class Ranks:
    """End of one rank of a group. One thread at a time calls it, in the order of all other ranks.

    A sum adds the ranks' terms in their order, element by element: every rank has the same bits,
    and a row's don't depend on how many rows there are, as those of a ring's would. It moves
    (size − 1) times the tensor where a ring moves less than twice: little, for a decode step's rows
    and few ranks.

    Attributes:
        rank, size: of the group.
        num_calls: collectives so far.
        seconds: time that this rank spent in them, waiting for others included.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        """Join the group; returns once all ranks have.

        Only this machine's processes can: it is bound to the loopback interface.

        Raises:
            RuntimeError: another rank didn't come.
        """
        self.rank, self.size = rank, size
        self.num_calls, self.seconds = 0, 0.0
        # not every build of torch has it
        from torch.distributed import GatherOptions, ProcessGroupGloo

        # as torch's stubs lack what its extension has
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        self._group: Any = gloo(store, rank, size, options)
        self._to_first = GatherOptions()
        self._to_first.rootRank = 0

    def sum(self, x: Tensor) -> Tensor:
        """Replace x, contiguous, by the sum of all ranks'; return it."""
        if not x.numel():
            return x
        with self._timed():
            parts = self._all(x)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x.add_(part)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return all ranks' tensors, of one shape, on rank 0; None on the others."""
        x = x.contiguous()
        with self._timed():
            parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
            self._group.gather([parts] if self.rank == 0 else [], [x], self._to_first).wait()
        return parts if self.rank == 0 else None

    def _all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
        self.num_calls += 1
