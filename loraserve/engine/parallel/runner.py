"""Rank 0's steps: told to all ranks, computed with them, sampled here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.execution.cpu_runner import CpuRunner
from loraserve.engine.execution.runner import DeviceLost
from loraserve.engine.parallel.messages import ComputeStep, ToRank
from loraserve.memory.devices.base import AdapterHandle
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs, PooledRows

logger = logging.getLogger(__name__)


class Numbered(Protocol):
    """What knows adapters by the numbers that ranks have for them."""

    def number(self, handle: AdapterHandle) -> int: ...


class GroupRunner(CpuRunner):
    """Compute steps with all ranks, each one while it is launched.

    Logits come together on rank 0, of the rows that are sampled, scored or proposed for alone.

    Args:
        send: sends a message to every other rank.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, adapters: Numbered, send: Callable[[ToRank], None]) -> None:
        super().__init__(decoder, kv)
        self._adapters, self._send = adapters, send

    def _compute(self, batch: Batch, pooled: PooledRows | None) -> tuple[Tensor, Tensor | None]:
        """Compute the rows on all ranks.

        Raises:
            DeviceLost: the step failed on one. The others wait within it, and no step can follow:
                the group is started anew.
        """
        inputs = self._inputs(batch, pooled)
        message = self._message(batch, inputs)
        try:
            self._send(message)
            return self._forward(inputs)
        except Exception as error:
            logger.exception("a step of several ranks failed: this engine ends, and another takes its requests over")
            raise DeviceLost(f"a step of several ranks failed: {error}") from error

    def _message(self, batch: Batch, inputs: ModelInputs) -> ComputeStep:
        pooled = inputs.pooled
        return ComputeStep(
            token_ids=batch.token_ids.tobytes(),
            positions=batch.positions.tobytes(),
            slots=batch.slots.tobytes(),
            query_starts=[int(start) for start in batch.query_starts],
            context_lens=[int(length) for length in batch.context_lens],
            block_tables=batch.block_tables.tobytes(),
            max_blocks=batch.block_tables.shape[1],
            logits_rows=batch.logits_rows.tobytes(),
            adapters=[(self._adapters.number(adapter), int(start), int(end)) for adapter, start, end in batch.adapters],
            pooled=None if pooled is None else tuple(_bytes(numbers) for numbers in pooled.tensors),
        )


def _bytes(numbers: Tensor) -> bytes:
    return numbers.to(torch.int64).numpy().tobytes()
