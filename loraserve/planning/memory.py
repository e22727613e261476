"""Division of a device's memory.

Its parts are the base, a step, and the arena that KV blocks and adapters share.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from loraserve.config import CPU_BUDGET_BYTES, GPU_PLANS_BYTES, EngineConfig
from loraserve.errors import ConfigError
from loraserve.limits import GIB, LIMITS, MIB
from loraserve.memory.memory_plan import MemoryPlan, beside_draft, max_adapter_tiles, plan_cpu_memory, plan_gpu_arena
from loraserve.model.backends.step_sizes import buffer_bytes
from loraserve.planning.base import BasePlan

GPU_CONTEXT_BYTES = 512 * MIB
"""Bytes that CUDA, its libraries and compiled kernels take before the first tensor;
300 to 600 MiB on cards in reports.
"""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Memory of the largest step, outside the budget.

    An estimate: a GPU's engine measures it at its start.

    Attributes:
        activations_bytes: of one step, which are freed after it.
        buffers_bytes: what a CPU's engine keeps from step to step.
        reserved_bytes: what is held back: on a GPU two steps (graphs keep one of their own), LoRA's
            plans and CUDA's own; on a CPU one step and the buffers.
    """

    activations_bytes: int
    buffers_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """A budget in pages that KV blocks and adapters share.

    Attributes:
        budget_bytes: of both together.
        source: where the budget comes from.
        division: into pages, as the engine divides it.
        kv_block_bytes, block_size: of a KV block, and its tokens.
        sequence_blocks: of one sequence of full length, which always has its place.
        max_tiles: of a GPU's tables, which adapters share; 0 on a CPU.
    """

    budget_bytes: int
    source: str
    division: MemoryPlan
    kv_block_bytes: int
    block_size: int
    sequence_blocks: int
    max_tiles: int = 0

    @property
    def page_bytes(self) -> int:
        return self.division.page_num_bytes

    @property
    def num_pages(self) -> int:
        return self.division.num_pages

    @property
    def num_blocks(self) -> int:
        """KV blocks, if there were no adapters."""
        return self.division.num_blocks

    @property
    def max_adapter_pages(self) -> int:
        """Maximum of pages that adapters may take."""
        return self.division.max_adapter_pages

    def kv_pages(self, num_blocks: int) -> int:
        """Compute the pages of this many KV blocks, less those dedicated to KV."""
        pages = -(-num_blocks // self.division.blocks_per_page) * self.division.pages_per_block
        return max(0, pages - self.division.num_dedicated_pages)

    def kv_bytes(self, num_tokens: int) -> int:
        """Compute the bytes of a sequence's KV, in whole blocks."""
        return self.blocks_of(num_tokens) * self.division.block_num_bytes

    def blocks_of(self, num_tokens: int) -> int:
        """Compute the KV blocks of a sequence."""
        return -(-num_tokens // self.block_size)

    def kv_tokens_beside(self, num_adapter_pages: int) -> int:
        """Compute the tokens whose KV fits next to adapters of this many pages."""
        division = self.division
        num_groups = (self.num_pages - num_adapter_pages) // division.pages_per_block + division.num_dedicated_pages
        return num_groups * division.blocks_per_page * self.block_size

    def adapter_pages_beside(self, num_sequences: int, num_tokens: int) -> int | None:
        """Compute the pages left for adapters while these sequences run.

        None if they can't run at once.
        """
        num_pages = self.kv_pages(num_sequences * self.blocks_of(num_tokens))
        if num_pages > self.num_pages:
            return None
        return min(self.max_adapter_pages, self.num_pages - num_pages)

    def max_sequences(self, num_tokens: int) -> int:
        """Compute how many such sequences can run at once with no adapter resident."""
        return self.num_blocks // self.blocks_of(num_tokens)


def plan_step(base: BasePlan, config: EngineConfig) -> StepPlan:
    """Estimate what a step of the most rows takes.

    That is what is alive at its widest place, and the logits of the sequences.
    """
    on_gpu = base.device == "cuda"
    num_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    # of each process; rank 0 has the logits
    logits = 4 * min(num_rows, config.max_num_seqs) * base.config.vocab_size
    activations, buffers = 2 * logits, 0
    for place in base.places:
        model = place.shard.config
        inner = model.intermediate_size if model.experts is None else model.experts.widest_intermediate_size
        heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        widest = max(heads, 3 * inner)
        # the stream is float32 on both; what passes between linears is as wide as the activations'
        # dtype
        per_row = 4 * 2 * model.hidden_size + (2 if on_gpu else 4) * (2 * model.hidden_size + widest)
        activations += num_rows * per_row
        # also counted for heads that a processor's vectors don't divide, whose steps keep nothing;
        # steps of linears that are cut keep none
        buffers += buffer_bytes(model, num_rows) if base.grid.tensor == 1 else 0
    if on_gpu:
        return StepPlan(activations, 0, 2 * activations + GPU_PLANS_BYTES + GPU_CONTEXT_BYTES)
    return StepPlan(activations, buffers, activations + buffers)


def load_bytes(config: EngineConfig, arena: ArenaPlan) -> int:
    """Compute the host memory that loads of adapters may take at once.

    Each of the largest adapters takes its file, what that unfolds to and a packed copy.
    """
    return min(LIMITS.max_load_bytes, config.loader_threads * 3 * arena.max_adapter_pages * arena.page_bytes)


def plan_arena(
    base: BasePlan, config: EngineConfig, step: StepPlan, device_bytes: int | None, *, draft_kv_bytes: int = 0
) -> ArenaPlan:
    """Describe what the budget is and how it is divided.

    Args:
        device_bytes: a GPU's memory in all; needed where no budget is given.
        draft_kv_bytes: what a draft base's cache takes of the budget.

    Raises:
        ConfigError: the budget isn't known, or can't hold one sequence of the model's full length.
    """
    budget, source = _budget(base, config, step, device_bytes)
    if draft_kv_bytes:
        budget, source = beside_draft(budget, draft_kv_bytes), f"{source}, less the draft base's cache"
    block, sequence_blocks = base.kv_block_bytes(config.block_size), -(-base.max_model_len // config.block_size)
    max_tiles = 0
    if base.device == "cpu":
        # each rank has its part in whole pages
        parts = [-(-part // mmap.PAGESIZE) * mmap.PAGESIZE for part in base.kv_rank_bytes(config.block_size)]
        division = plan_cpu_memory(budget, sum(parts), sequence_blocks, mmap.PAGESIZE)
    else:
        max_tiles = max_adapter_tiles(base.spec, budget)
        division = plan_gpu_arena(base.spec, budget, block, sequence_blocks)
    return ArenaPlan(budget, source, division, block, config.block_size, sequence_blocks, max_tiles)


def _budget(base: BasePlan, config: EngineConfig, step: StepPlan, device_bytes: int | None) -> tuple[int, str]:
    if config.memory_budget_bytes:
        return config.memory_budget_bytes, "--memory-budget"
    if base.device == "cpu":
        return CPU_BUDGET_BYTES, "the default of a CPU"
    if device_bytes is None:
        raise ConfigError(
            "The GPU's memory is unknown: nvidia-smi found no GPU here.",
            hint="Give --device-memory, such as 24GiB, or --memory-budget.",
        )
    left = int(device_bytes * config.memory_utilization) - base.num_bytes - step.reserved_bytes
    if left <= 0:
        raise ConfigError(
            "The base leaves no memory for adapters and KV: "
            f"of {device_bytes / GIB:.1f} GiB, {config.memory_utilization:.0%} may be used; "
            f"the base takes {base.num_bytes / GIB:.1f} and steps about {step.reserved_bytes / GIB:.1f}.",
            hint="Quantize the base, lower --max-num-batched-tokens, or raise --memory-utilization.",
        )
    return left, "the rest of --device-memory beside the base and steps (an estimate)"
