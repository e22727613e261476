"""The base model on a CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.execution.pooled_rows import pooled_rows, with_hidden
from loraserve.engine.execution.runner import FinishedStep
from loraserve.engine.execution.sampler import Sampler
from loraserve.engine.greedy import has_penalties
from loraserve.engine.request import Request
from loraserve.errors import InvariantViolation
from loraserve.memory.devices.base import AdapterHandle
from loraserve.model.base_model import BaseModel
from loraserve.model.inputs import KVTensors, ModelInputs, PooledRows
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import PackedAdapter


class CpuRunner:
    """Compute steps on a CPU, each one while it is launched."""

    def __init__(self, decoder: BaseModel, kv: KVTensors) -> None:
        self._decoder, self._kv = decoder, kv
        self.num_blocks = kv.k[0].shape[0]
        self._sampler = Sampler(decoder.spec.eos_token_ids, decoder.spec.vocab_size)
        # sampled by the step before: the next one may be launched without knowing them
        self._token_ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def launch(self, batch: Batch) -> FinishedStep:
        """Compute the step, and return it finished."""
        if len(batch.deferred_tokens.rows):
            batch.token_ids[batch.deferred_tokens.rows] = self._token_ids[batch.deferred_tokens.previous_entries]
        if len(batch.pooled_rows):
            logits, hidden = self.forward_pooled(batch)
            results = with_hidden(self._sampler.sample(logits, batch), hidden, batch.pooled_ranges)
        else:
            results = self._sampler.sample(self.forward(batch), batch)
        # a row that sampled nothing feeds no other, or one whose result is dropped
        self._token_ids = np.array([result.token_ids[-1] if result.token_ids else 0 for result in results], np.int64)
        return FinishedStep(results)

    def needs_results_first(self, request: Request) -> bool:
        """Check whether the next token depends on the host knowing all tokens before it."""
        return has_penalties(request.params) or request.probe is not None

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch's rows, write their KV, and return [num_logits, vocab_size] float32."""
        return self._compute(batch, None)[0]

    def forward_pooled(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the rows of a batch that pools; return the logits, and the pooled hidden states.

        The latter are [num_pooled, hidden_size] float32.
        """
        logits, hidden = self._compute(batch, pooled_rows(batch))
        if hidden is None:
            raise InvariantViolation("A step that pools gave no hidden states.")
        return logits, hidden

    def _compute(self, batch: Batch, pooled: PooledRows | None) -> tuple[Tensor, Tensor | None]:
        return self._forward(self._inputs(batch, pooled))

    def _forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            return self._decoder.forward_pooled(inputs, self._kv)

    def _inputs(self, batch: Batch, pooled: PooledRows | None) -> ModelInputs:
        return ModelInputs(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            slot_mapping=torch.from_numpy(batch.slots),
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=torch.from_numpy(batch.block_tables),
            logits_rows=torch.from_numpy(batch.logits_rows),
            lora=make_plan([_packed(*segment) for segment in batch.adapters], len(batch.token_ids)),
            pooled=pooled,
            states=batch.states,
        )


def _packed(adapter: AdapterHandle, row_start: int, row_end: int) -> tuple[PackedAdapter, int, int]:
    if not isinstance(adapter, PackedAdapter):
        raise InvariantViolation(f"the adapter of rows {row_start}:{row_end} is not in this device's memory")
    return adapter, row_start, row_end
