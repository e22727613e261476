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
    """Register that knows adapters by the numbers that ranks have for them."""

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
        message = step_message(inputs, self._adapters)
        try:
            self._send(message)
            return self._forward(inputs)
        except Exception as error:
            logger.exception("a step of several ranks failed: this engine ends, and another takes its requests over")
            raise DeviceLost(f"a step of several ranks failed: {error}") from error


def step_message(inputs: ModelInputs, adapters: Numbered) -> ComputeStep:
    """Return what tells other ranks of a step."""
    rows, pooled = inputs.logits_rows, inputs.pooled
    segments = () if inputs.lora is None else inputs.lora.segments
    return ComputeStep(
        token_ids=_bytes(inputs.token_ids),
        positions=_bytes(inputs.positions),
        slots=_bytes(inputs.slot_mapping),
        query_starts=[int(start) for start in inputs.query_starts],
        context_lens=[int(length) for length in inputs.context_lens],
        block_tables=inputs.block_tables.numpy().tobytes(),
        max_blocks=inputs.block_tables.shape[1],
        logits_rows=None if rows is None else _bytes(rows),
        adapters=[(adapters.number(s.adapter), s.row_start, s.row_end) for s in segments],
        pooled=None
        if pooled is None
        else (_bytes(pooled.kept), _bytes(pooled.logits_places), _bytes(pooled.hidden_places)),
    )


def _bytes(numbers: Tensor) -> bytes:
    return numbers.to(torch.int64).numpy().tobytes()
