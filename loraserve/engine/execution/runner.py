"""Interface of the devices that compute steps, and the layout of their KV caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.request import Request
from loraserve.engine.scheduled import StepResult
from loraserve.model.base_model import BaseModel
from loraserve.model.inputs import KVTensors


class DeviceLost(BaseException):
    """Report that the device computes nothing any more, which ends the engine process.

    It is no Exception: no step is recomputed and no request fails for it.
    """


class StepHandle(Protocol):
    """A launched step."""

    def results(self) -> list[StepResult]:
        """Wait for the device; return one result per entry of the step's batch, in its order.

        Called once, in the order of launches.

        Raises:
            DeviceLost: no step can be computed any more.
            Exception: this step failed, and so do those launched after it.
        """
        ...


class StepRunner(Protocol):
    """A device that computes steps in the order of their launches.

    The engine may give a step's KV blocks to the next one while the former still runs.

    Attributes:
        num_blocks: KV blocks that slots may name.
    """

    num_blocks: int

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step; the batch's host tensors aren't read after this call.

        At most two steps are in flight. ``batch.deferred_tokens`` names the tokens that the step
        launched before this one samples.
        """
        ...

    def needs_results_first(self, request: Request) -> bool:
        """Check whether the next token depends on the host knowing all tokens before it."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed while it was launched."""

    step_results: list[StepResult]

    def results(self) -> list[StepResult]:
        """Return one result per entry of the step's batch."""
        return self.step_results


def kv_block_bytes(decoder: BaseModel, block_size: int) -> int:
    """Compute the bytes of one KV block: keys and values of all layers."""
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    return 2 * num_layers * num_kv_heads * block_size * head_dim * decoder.kv_dtype.itemsize


def view_kv(decoder: BaseModel, data: Tensor, block_num_bytes: int, block_size: int) -> KVTensors:
    """View `data` as a cache of the blocks that fit, each contiguous with all its layers.

    The memory isn't initialized: no slot is read before it is written.

    Args:
        data: [any number of bytes] uint8, on the decoder's device.
        block_num_bytes: distance of one block to the next; a multiple of the dtype's size.
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


def allocate_kv(decoder: BaseModel, num_blocks: int, block_size: int) -> KVTensors:
    """Allocate a cache of that many blocks on the decoder's device, in memory of its own."""
    num_bytes = kv_block_bytes(decoder, block_size)
    data = torch.empty(num_blocks * num_bytes, dtype=torch.uint8, device=decoder.device)
    return view_kv(decoder, data, num_bytes, block_size)
