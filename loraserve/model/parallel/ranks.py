"""Messages that the ranks of a stage send to each other while a step is computed."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loraserve.model.parallel.traffic import Traffic

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(minutes=10)
"""A rank that is that late has died, which its group's watch notices at once, or was stopped."""


def join_group(store: Store, rank: int, size: int) -> Any:
    """Join gloo's group as this rank; wait until all ranks have joined.

    Only this machine's processes can: it is bound to the loopback interface.

    Raises:
        RuntimeError: another rank didn't come.
    """
    # not every build of torch has it
    from torch.distributed import ProcessGroupGloo

    # as torch's stubs lack what its extension has
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return gloo(store, rank, size, options)


class Ranks:
    """End of one rank of a stage. One thread at a time calls it, in the order of all other ranks.

    A sum adds the ranks' terms in their order, element by element: every rank has the same bits,
    and a row's don't depend on how many rows there are, as those of a ring's would. It moves
    (size − 1) times the tensor where a ring moves less than twice: little, for a decode step's rows
    and few ranks.

    Attributes:
        rank, size: of the group.
        traffic: counts what it exchanges.
    """

    def __init__(self, rank: int, size: int, store: Store, traffic: Traffic | None = None) -> None:
        """Join the group; returns once all ranks have.

        Raises:
            RuntimeError: another rank didn't come.
        """
        from torch.distributed import GatherOptions

        self.rank, self.size = rank, size
        self.traffic = Traffic() if traffic is None else traffic
        self._group: Any = join_group(store, rank, size)
        self._to_first = GatherOptions()
        self._to_first.rootRank = 0

    def sum(self, x: Tensor) -> Tensor:
        """Replace x, contiguous, by the sum of all ranks'; return it."""
        if not x.numel():
            return x
        with self.traffic.summing((self.size - 1) * x.nbytes):
            parts = self._all(x)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x.add_(part)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Find the largest of all ranks' for each number of x; NaN where any of them is."""
        if not x.numel():
            return x
        with self.traffic.summing((self.size - 1) * x.nbytes):
            parts = self._all(x)
        return torch.stack(parts).amax(0)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Gather all ranks' tensors, of one shape, on rank 0; None on the others."""
        x = x.contiguous()
        is_first = self.rank == 0
        with self.traffic.summing((self.size - 1) * x.nbytes if is_first else 0):
            parts = [torch.empty_like(x) for _ in range(self.size)] if is_first else []
            self._group.gather([parts] if is_first else [], [x], self._to_first).wait()
        return parts if is_first else None

    def _all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts
