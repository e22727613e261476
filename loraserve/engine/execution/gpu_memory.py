"""GPU memory that steps take, and the rest for KV blocks and adapters."""

from __future__ import annotations

import numpy as np
import torch

from loraserve.config import GPU_PLANS_BYTES, EngineConfig
from loraserve.engine.execution.runner import allocate_kv
from loraserve.errors import ConfigError
from loraserve.limits import GIB
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import GpuInputs
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan


def attention_plan(decoder: Decoder, config: EngineConfig) -> GpuAttentionPlan:
    """Build the plan of attention for the largest step that the config allows."""
    shape = decoder.config
    return GpuAttentionPlan(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_num_seqs=config.max_num_seqs,
        max_model_len=decoder.spec.max_model_len,
        device=decoder.backend.device,
    )


def free_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Compute the largest step once; return the bytes left for KV blocks and adapters.

    Raises:
        ConfigError: nothing is left.
    """
    device = decoder.backend.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _compute_largest_step(decoder, config)
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # graphs keep a decode step's memory of their own
    budget = int(total * config.memory_utilization) - (total - free) - 2 * step_bytes - GPU_PLANS_BYTES
    if budget <= 0:
        raise ConfigError(
            f"The base leaves no memory for adapters and KV: of the device's {total / GIB:.1f} GiB, {free / GIB:.1f}"
            f" are free, and a step takes {step_bytes / GIB:.1f}.",
            hint="Quantize the base, lower --max-num-batched-tokens, or raise --memory-utilization.",
        )
    return budget


@torch.inference_mode()
def _compute_largest_step(decoder: Decoder, config: EngineConfig) -> None:
    """Compute a step of the most rows and logits that are possible, all of them padding."""
    device, plan = decoder.backend.device, attention_plan(decoder, config)
    num_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    lengths = [decoder.spec.max_model_len] * (num_rows // decoder.spec.max_model_len)
    lengths += [num_rows - sum(lengths)] if num_rows > sum(lengths) else []
    lengths = lengths[: config.max_num_seqs]
    num_rows = sum(lengths)
    width = -(-max(lengths) // config.block_size)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    plan.fill(starts, np.array(lengths, dtype=np.int32), np.zeros((len(lengths), width), dtype=np.int32))
    inputs = GpuInputs(
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        attention=plan,
        logits_rows=torch.arange(min(num_rows, config.max_num_seqs), device=device),
        lora=None,
        logits_lora=None,
    )
    decoder.forward(inputs, allocate_kv(decoder, 1, config.block_size))
