"""Runs the model over batches, and what the engine asks of whoever does. This one runs it on a CPU; `gpu_runner` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch, Resident
from loraserve.engine.execution.sampler import Sampler, has_penalties
from loraserve.engine.request import Request
from loraserve.engine.scheduled import StepResult
from loraserve.errors import InvariantViolation
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import PackedAdapter


class DeviceLost(BaseException):
    """The device computes nothing any more. Ends the engine process, whose requests another one takes over.

    Not an Exception: no step is halved and no request is failed for it.
    """


class StepHandle(Protocol):
    """A step that was launched."""

    def results(self) -> list[StepResult]:
        """Wait for the device, and return one result per entry of the step's batch, in its order. Asked for once, in the order of launches.

        Raises:
            DeviceLost: no step can be computed any more.
            Exception: this step couldn't be; nor what was launched after it.
        """
        ...


class StepRunner(Protocol):
    """What the engine asks of whatever computes its steps.

    Steps are computed in the order in which they were launched, each after the one before: the engine gives a step's KV
    blocks to the next one while it still runs.
    """

    num_blocks: int
    """KV blocks that slots may name."""

    def launch(self, batch: Batch) -> StepHandle:
        """The step runs, or will; nothing of the batch's host tensors is read after this call.

        Called again before the handle's results were taken at most once: two steps are in flight, no more. ``batch.feeds``
        names the tokens that are the results of the step launched before.
        """
        ...

    def needs_results_first(self, request: Request) -> bool:
        """Whether the request's tokens must all be known to the host before its next one can be chosen."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step whose results are there."""

    step_results: list[StepResult]

    def results(self) -> list[StepResult]:
        return self.step_results


def kv_block_bytes(decoder: Decoder, block_size: int) -> int:
    """Bytes of one KV block, keys and values of all layers."""
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    return 2 * num_layers * num_kv_heads * block_size * head_dim * decoder.kv_dtype.itemsize


def view_kv(decoder: Decoder, data: Tensor, block_num_bytes: int, block_size: int) -> KVTensors:
    """Return the cache of as many blocks as lie in `data`, each in one piece: keys and values of all layers side by side.

    Nothing is written: nothing reads a slot that wasn't written.

    Args:
        data: [any number of bytes] uint8, on the decoder's device.
        block_num_bytes: from one block to the next; a multiple of what a number takes.
    """
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    numbers = data[: data.numel() // block_num_bytes * block_num_bytes].view(decoder.kv_dtype)
    block = block_num_bytes // decoder.kv_dtype.itemsize
    head = block_size * head_dim
    layer = num_kv_heads * head
    shape, strides = (numbers.numel() // block, num_kv_heads, block_size, head_dim), (block, head, head_dim, 1)
    first = numbers.storage_offset()
    return KVTensors(
        k=tuple(numbers.as_strided(shape, strides, first + 2 * i * layer) for i in range(num_layers)),
        v=tuple(numbers.as_strided(shape, strides, first + (2 * i + 1) * layer) for i in range(num_layers)),
        block_size=block_size,
    )


def allocate_kv(decoder: Decoder, num_blocks: int, block_size: int) -> KVTensors:
    """Return a cache of so many blocks on the decoder's device, in memory of its own."""
    num_bytes = kv_block_bytes(decoder, block_size)
    data = torch.empty(num_blocks * num_bytes, dtype=torch.uint8, device=decoder.backend.device)
    return view_kv(decoder, data, num_bytes, block_size)


class Runner:
    """The base model on a CPU, with its paged KV cache: a step is computed when it's launched."""

    def __init__(self, decoder: Decoder, kv: KVTensors) -> None:
        self._decoder, self._kv = decoder, kv
        self.num_blocks = kv.k[0].shape[0]
        self._sampler = Sampler(decoder.spec.eos_token_ids)
        # of the step before, for the rows that the next one is fed
        self._token_ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def launch(self, batch: Batch) -> FinishedStep:
        """Compute the step here and now."""
        if len(batch.feeds.rows):
            batch.token_ids[batch.feeds.rows] = self._token_ids[batch.feeds.previous_entries]
        results = self._sampler.sample(self.forward(batch), batch)
        # a row without a token feeds nobody, or a row whose result is dropped
        self._token_ids = np.array([result.token_id or 0 for result in results], dtype=np.int64)
        return FinishedStep(results)

    def needs_results_first(self, request: Request) -> bool:
        """Whether the request's tokens must all be known to the host before its next one can be chosen."""
        return has_penalties(request.params) or request.probe is not None

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch's rows, write their KV, and return [num_logits, vocab_size] float32."""
        inputs = ModelInputs(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            slot_mapping=torch.from_numpy(batch.slots),
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=torch.from_numpy(batch.block_tables),
            logits_rows=torch.from_numpy(batch.logits_rows),
            lora=make_plan([_packed(*segment) for segment in batch.adapters], len(batch.token_ids)),
        )
        with torch.inference_mode():
            return self._decoder.forward(inputs, self._kv)


def _packed(adapter: Resident, row_start: int, row_end: int) -> tuple[PackedAdapter, int, int]:
    if not isinstance(adapter, PackedAdapter):
        raise InvariantViolation(f"the adapter of rows {row_start}:{row_end} is not in this device's memory")
    return adapter, row_start, row_end
