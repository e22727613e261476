"""Runs the model over a batch: owns the base and the KV cache's bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from loraserve.config import EngineConfig
from loraserve.engine.batch import Batch
from loraserve.errors import ConfigError
from loraserve.limits import MIB
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors


class Runner:
    """The base model, resident, with its paged KV cache.

    Raises:
        ConfigError: the memory budget can't hold one sequence of the model's full length.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self._decoder = decoder
        num_layers, num_kv_heads, head_dim = decoder.kv_shape
        dtype = decoder.kv_dtype
        block_bytes = 2 * num_layers * num_kv_heads * config.block_size * head_dim * dtype.itemsize
        budget = int(config.memory_budget_bytes * (1 - config.adapter_share))
        self.num_blocks = budget // block_bytes
        self.adapter_budget_bytes = config.memory_budget_bytes - self.num_blocks * block_bytes
        needed = -(-decoder.spec.max_model_len // config.block_size)
        if self.num_blocks < needed:
            raise ConfigError(
                f"The KV cache's part of the memory budget, {budget / MIB:.0f} MiB, holds {self.num_blocks * config.block_size} "
                f"tokens; one sequence of the model's {decoder.spec.max_model_len} takes {needed * block_bytes / MIB:.0f} MiB.",
                hint="Raise --memory-budget or lower --max-model-len.",
            )
        shape = (self.num_blocks, num_kv_heads, config.block_size, head_dim)
        # empty, not zeros: nothing reads a slot that wasn't written, and untouched pages cost no memory
        self._kv = KVTensors(
            k=tuple(torch.empty(shape, dtype=dtype) for _ in range(num_layers)),
            v=tuple(torch.empty(shape, dtype=dtype) for _ in range(num_layers)),
            block_size=config.block_size,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch's rows, write their KV, and return [num_logits, vocab_size] float32."""
        with torch.inference_mode():
            return self._decoder.forward(batch.inputs, self._kv)
