"""A step launched on a GPU: copies on their way to the host, then its results."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.execution.pooled_rows import with_hidden
from loraserve.engine.execution.runner import DeviceLost
from loraserve.engine.execution.sampler import Sampler
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.types import TokenLogprobs
from loraserve_kernels.gpu.sampling.sampling import top_logprobs

logger = logging.getLogger(__name__)


class Top(NamedTuple):
    """Log probabilities of a step's sampled rows, in the host's memory.

    Attributes:
        chosen: [num_sampled], those of the sampled tokens.
        values: [num_sampled, k], those of the likeliest tokens.
        ids: [num_sampled, k], the likeliest tokens.
    """

    chosen: Tensor
    values: Tensor
    ids: Tensor


def send_logprobs(entries: list[ScheduledRequest], logits: Tensor, tokens: Tensor) -> Top | None:
    """Compute and send the log probabilities that the entries require; return None if none does."""
    counts = [entry.request.params.logprobs for entry in entries if entry.request.params.logprobs is not None]
    if not counts:
        return None
    chosen, values, ids = top_logprobs(logits, tokens, min(max(*counts, 1), logits.shape[1]))
    return Top(*(to_host(part) for part in (chosen, values, ids)))


def to_host(tensor: Tensor) -> Tensor:
    """Copy to pinned host memory, complete once everything launched so far is done."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return out.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, which nothing waits for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class HostResults:
    """Pinned memory for a step's sampled tokens."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned)
        self.finite = torch.zeros(max_num_seqs, dtype=torch.bool, pin_memory=pinned)


@dataclass(frozen=True, slots=True)
class GpuStepHandle:
    """A launched step. The runner reuses its host memory for the step after the next."""

    batch: Batch
    sampled: list[int]
    host: HostResults
    top: Top | None
    logits: dict[int, Tensor]
    refused: dict[int, StepResult]
    """Results of entries whose mask of allowed tokens wasn't there."""
    hidden: Tensor | None
    sampler: Sampler
    event: torch.cuda.Event | None

    def results(self) -> list[StepResult]:
        """Wait for the device; return one result per entry of the batch."""
        if self.event is not None:
            try:
                self.event.synchronize()
            except torch.AcceleratorError as error:
                raise lost(error) from error
        tokens: list[int] = self.host.tokens[: len(self.sampled)].tolist()
        finite: list[bool] = self.host.finite[: len(self.sampled)].tolist()
        results = [StepResult() for _ in self.batch.entries]
        for place, i in enumerate(self.sampled):
            entry = self.batch.entries[i]
            if i in self.refused:
                results[i] = self.refused[i]
            elif not finite[place]:
                results[i] = StepResult(is_finite=False)
            elif entry.request.params.max_tokens > 0:
                results[i] = StepResult((tokens[place],), self._logprobs(place, entry, tokens[place]))
        for i, logits in self.logits.items():
            results[i] = self.sampler.sample_entry(self.batch.entries[i], logits)
        return results if self.hidden is None else with_hidden(results, self.hidden, self.batch.pooled_ranges)

    def _logprobs(self, place: int, entry: ScheduledRequest, token_id: int) -> tuple[TokenLogprobs] | None:
        count = entry.request.params.logprobs
        if self.top is None or count is None:
            return None
        ids, values = self.top.ids[place, :count].tolist(), self.top.values[place, :count].tolist()
        return (TokenLogprobs(token_id, float(self.top.chosen[place]), tuple(zip(ids, values, strict=True))),)


def lost(error: RuntimeError) -> DeviceLost:
    """Log a device error, which every later call would raise too; return it as DeviceLost."""
    logger.error("the device failed: %s", str(error).splitlines()[0])
    return DeviceLost(str(error))
