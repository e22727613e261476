"""Hidden states on their way from one stage of a pipeline to the next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loraserve.model.parallel.ranks import join_group
from loraserve.model.parallel.traffic import Traffic

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MAX_UNRECEIVED = 16
"""Micro-batches that a stage may be ahead of the next one: more than a step has."""
_NUM_TAGS = 1 << 16


class Arrival:
    """Hidden states that the stage before sends. They arrive while other things are done."""

    def __init__(self, rows: Tensor, work: Any, traffic: Traffic) -> None:
        self._rows, self._traffic = rows, traffic
        self._work: Any | None = work

    def wait(self) -> Tensor:
        """Wait for the rows, [num_rows, hidden_size] float32.

        Raises:
            RuntimeError: the stage before has ended.
        """
        if self._work is not None:
            with self._traffic.transferring(self._rows.nbytes):
                self._work.wait()
            # a second wait for the same rows would have no end
            self._work = None
        return self._rows


class Pipe:
    """End of one stage. One thread at a time calls it; each stage sends in the order of the steps.

    Nothing waits for the other end: a stage computes the next micro-batch while the one before is
    on its way.

    Attributes:
        index: of the stage, from the embedding on.
        size: stages.
        traffic: counts what arrives.
    """

    def __init__(self, index: int, size: int, store: Store, traffic: Traffic | None = None) -> None:
        """Join the pipeline; returns once all stages have.

        Raises:
            RuntimeError: another stage didn't come.
        """
        self.index, self.size = index, size
        self.traffic = Traffic() if traffic is None else traffic
        self._group: Any = join_group(store, index, size)
        # the rows of what is sent live until they are received
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._num_sent = self._num_expected = 0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def expect(self, num_rows: int, hidden_size: int) -> Arrival:
        """Expect what the stage before sends next, before or after it has."""
        rows = torch.empty(num_rows, hidden_size)
        work = self._group.recv([rows], self.index - 1, self._num_expected % _NUM_TAGS)
        self._num_expected += 1
        return Arrival(rows, work, self.traffic)

    def send(self, rows: Tensor) -> None:
        """Send rows to the next stage; they must not change."""
        while len(self._sent) >= _MAX_UNRECEIVED:
            self._sent.popleft()[0].wait()
        work = self._group.send([rows], self.index + 1, self._num_sent % _NUM_TAGS)
        self._num_sent += 1
        self._sent.append((work, rows))
