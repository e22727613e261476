"""Divide a device's memory between KV blocks and adapters; make a GPU's runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import torch

from loraserve.config import EngineConfig
from loraserve.engine.execution.runner import StepRunner, kv_block_bytes, view_kv
from loraserve.limits import GIB, MIB
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.base import AdapterDevice
from loraserve.memory.kv.block_pool import BlockLayout, BlockPool
from loraserve.memory.kv.state_snapshots import StateSnapshots
from loraserve.memory.memory_plan import MemoryPlan, plan_gpu_arena, state_slots, state_snapshots
from loraserve.model.base_model import BaseModel
from loraserve.model.decoder import Decoder
from loraserve.model.states import RecurrentStates, StateShapes, state_bytes
from loraserve.progress import Progress

logger = logging.getLogger(__name__)


def num_needed_blocks(decoder: BaseModel, config: EngineConfig) -> int:
    """Count the KV blocks of one sequence of the model's full length."""
    return -(-decoder.spec.max_model_len // config.block_size)


def recurrent_states(shapes: StateShapes, config: EngineConfig) -> tuple[RecurrentStates, EngineConfig]:
    """Allocate recurrent states and snapshots of them; return them, and the config of what is left.

    Fewer sequences run at once where their states would take more than half of the budget.

    Raises:
        ConfigError: the budget is too small for one sequence.
    """
    one = state_bytes(shapes)
    num_slots = state_slots(config.memory_budget_bytes, one, config.max_num_seqs)
    num_snapshots = 0
    if config.enable_prefix_cache:
        num_snapshots = state_snapshots(config.memory_budget_bytes, one, num_slots)
    states = RecurrentStates(shapes, num_slots, num_snapshots)
    logger.info(
        "%d of the base's layers are recurrent: the states of %d sequences (--max-num-seqs %d) and %d snapshots for "
        "the prefix cache take %.1f MiB of the memory budget",
        len(shapes),
        num_slots,
        config.max_num_seqs,
        num_snapshots,
        states.num_bytes / MIB,
    )
    left = config.memory_budget_bytes - states.num_bytes
    return states, msgspec.structs.replace(config, memory_budget_bytes=left, max_num_seqs=num_slots)


def kv_cache(
    config: EngineConfig,
    plan: MemoryPlan,
    arena: Arena,
    on_freed: Callable[[Sequence[int]], None] | None = None,
    num_snapshots: int | None = None,
) -> BlockPool:
    """Build the cache of KV blocks in an arena's pages.

    Args:
        num_snapshots: of recurrent states; None: no layer of the base is recurrent.
        on_freed: called with the blocks whose pages were given back; None: nothing is to be done.
    """
    layout = BlockLayout(
        arena.client(Owner.KV),
        plan.block_num_bytes,
        plan.blocks_per_page,
        plan.pages_per_block,
        on_freed,
    )
    return BlockPool(
        plan.num_blocks,
        config.block_size,
        enable_prefix_cache=config.enable_prefix_cache,
        layout=layout,
        snapshots=None if num_snapshots is None else StateSnapshots(num_snapshots),
    )


def set_up_gpu(
    decoder: Decoder, config: EngineConfig, progress: Progress
) -> tuple[StepRunner, AdapterDevice, BlockPool]:
    """Measure what a GPU's largest step takes, divide what is left, and capture the decode steps.

    Raises:
        ConfigError: nothing is left, or less than one sequence of the model's full length takes.
    """
    # Triton is loaded for GPUs alone
    from loraserve.engine.execution import gpu_memory as gpu_budget
    from loraserve.engine.execution.gpu_runner import GpuRunner
    from loraserve.memory.devices.gpu import GpuDevice, adapter_dtype

    progress.begin("measuring the GPU's memory")
    budget = config.memory_budget_bytes or gpu_budget.free_bytes(decoder, config)
    device = decoder.backend.device
    plan = plan_gpu_arena(
        decoder.spec, budget, kv_block_bytes(decoder, config.block_size), num_needed_blocks(decoder, config)
    )
    data = torch.empty(
        (plan.num_pages + plan.num_dedicated_pages) * plan.page_num_bytes, dtype=torch.uint8, device=device
    )
    dtype = adapter_dtype(config.adapter_dtype, decoder.kv_dtype)
    arena = Arena(plan.num_pages, plan.page_num_bytes, is_indexed=True)
    adapters = GpuDevice.in_arena(decoder.spec, data, arena.client(Owner.ADAPTERS), plan, budget, dtype)
    kv = view_kv(decoder, data, plan.block_num_bytes, config.block_size)
    logger.info(
        "%s: %.1f GiB in pages of %d KV blocks of %d tokens, at most %d blocks or %.1f GiB of adapters in %s",
        device,
        data.nbytes / GIB,
        plan.blocks_per_page,
        config.block_size,
        plan.num_blocks,
        adapters.limits.num_bytes / GIB,
        str(dtype).removeprefix("torch."),
    )
    progress.begin("warming up: compiling kernels with Triton and capturing graphs")
    return GpuRunner(decoder, config, kv, adapters), adapters, kv_cache(config, plan, arena)
