"""Row arrays of a step in the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch


class StepRows:
    """Hold a step's rows at a fixed device address, filled from two alternating pinned buffers."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._rows = torch.zeros((6, size), dtype=torch.int64, device=device)
        self._staged = [torch.zeros((6, size), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._hosts = [staged.numpy() for staged in self._staged]
        self._turn = 0

    def token_ids(self, count: int, sampled: Tensor) -> Tensor:
        """Read the rows' tokens, [count] int64.

        Those that the host didn't have are taken from `sampled`.
        """
        tokens, feeds = self._rows[0, :count], self._rows[3, :count]
        return torch.where(feeds >= 0, sampled[feeds.clamp_min(0)], tokens)

    def positions(self, count: int) -> Tensor:
        """View the rows' positions, [count] int64."""
        return self._rows[1, :count]

    def slots(self, count: int) -> Tensor:
        """View the rows' KV slots, [count] int64."""
        return self._rows[2, :count]

    def logits_rows(self, count: int) -> Tensor:
        """View the indices of the rows that need logits, [count] int64."""
        return self._rows[4, :count]

    def sampled(self, logits: Tensor, count: int) -> Tensor:
        """Select the logits to sample from, [count, vocab_size]."""
        return logits if count == logits.shape[0] else logits[self._rows[5, :count]]

    def fill(self, batch: Batch, places: npt.NDArray[np.int64], sampled_rows: Sequence[int], num_rows: int) -> None:
        """Copy a batch to the device, padded to `num_rows`.

        Args:
            places: index of each entry's token among those that the previous step samples.
            sampled_rows: rows of the logits to sample from.
        """
        host, count = self._hosts[self._turn], len(batch.token_ids)
        host[0, :count], host[1, :count], host[2, :count] = batch.token_ids, batch.positions, batch.slots
        host[3, :count] = -1
        host[3, batch.deferred_tokens.rows] = places[batch.deferred_tokens.previous_entries]
        host[4, : len(batch.logits_rows)] = batch.logits_rows
        host[5, : len(sampled_rows)] = sampled_rows
        self._send(count, num_rows)

    def clear(self, num_rows: int) -> None:
        """Make all rows padding."""
        self._send(0, num_rows)

    def _send(self, count: int, num_rows: int) -> None:
        host = self._hosts[self._turn]
        host[:2, count:num_rows] = 0
        host[2:4, count:num_rows] = -1
        self._rows.copy_(self._staged[self._turn], non_blocking=True)
        self._turn = 1 - self._turn
