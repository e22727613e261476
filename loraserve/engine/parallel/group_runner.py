"""Rank 0's steps: sent to all ranks, computed with them, sampled here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from loraserve.engine.execution.cpu_runner import CpuRunner
from loraserve.engine.execution.runner import DeviceLost
from loraserve.engine.parallel.messages import ComputeStep, ToRank
from loraserve.engine.parallel.micro_batches import cut_step
from loraserve.memory.devices.base import AdapterHandle
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.parallel.pipe import Pipe

logger = logging.getLogger(__name__)


class Numbered(Protocol):
    """Register of adapters by the numbers that ranks have for them."""

    def number(self, handle: AdapterHandle) -> int: ...


class GroupForward:
    """Forward passes with all ranks.

    All micro-batches of a step are sent to all ranks before the first one is awaited: while this
    process, of the last stage, computes one, the stage before computes the next.

    Args:
        pipe: this process's end of the pipeline; None: there is one stage.
        send: sends a message to every other rank.

    Attributes:
        num_micro_batches: that were computed.
    """

    def __init__(self, decoder: Decoder, pipe: Pipe | None, adapters: Numbered, send: Callable[[ToRank], None]) -> None:
        self._decoder, self._pipe, self._adapters, self._send = decoder, pipe, adapters, send
        self.num_micro_batches = 0

    def __call__(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor, Tensor | None]:
        """Compute what `Decoder.forward_pooled` does."""
        pipe = self._pipe
        if pipe is None:
            self._send(step_message(inputs, self._adapters))
            self.num_micro_batches += 1
            return self._decoder.forward_pooled(inputs, kv)
        parts = cut_step(inputs, pipe.size)
        width = self._decoder.config.hidden_size
        # before other ranks are notified of them: what they send is received while this one sends
        arrivals = [pipe.expect(part.token_ids.shape[0], width) for part in parts]
        for part in parts:
            self._send(step_message(part, self._adapters))
        results = list[tuple[Tensor, Tensor | None]]()
        for part, arrival in zip(parts, arrivals, strict=True):
            results.append(self._decoder.forward_pooled(part, kv, arrival.wait()))
            self.num_micro_batches += 1
        if len(results) == 1:
            return results[0]
        logits = torch.cat([logits for logits, _ in results])
        if inputs.pooled is None:
            return logits, None
        return logits, torch.cat([hidden for _, hidden in results if hidden is not None])


class GroupRunner(CpuRunner):
    """Compute steps with all ranks, each one while it is launched.

    Logits come together on rank 0, of the rows that are sampled, scored or proposed for alone.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, forward: GroupForward) -> None:
        super().__init__(decoder, kv)
        self._group_forward = forward

    def _forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        """Compute the rows on all ranks.

        Raises:
            DeviceLost: the step failed on one. The others wait within it, and no step can follow:
                the group is restarted.
        """
        try:
            with torch.inference_mode():
                return self._group_forward(inputs, self._kv)
        except Exception as error:
            logger.exception("a step of several ranks failed: this engine ends, and another takes its requests over")
            raise DeviceLost(f"a step of several ranks failed: {error}") from error


def step_message(inputs: ModelInputs, adapters: Numbered) -> ComputeStep:
    """Build the message that announces a step to other ranks."""
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
