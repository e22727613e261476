"""How a device's memory is divided: the base, what a step takes, and the arena that KV blocks and adapters share."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.config import EngineConfig
from loraserve.errors import ConfigError
from loraserve.limits import GIB, MIB
from loraserve.planning.base import BasePlan
from loraserve_kernels.sizes import UNIT_BYTES

CPU_BUDGET_BYTES = 8 * GIB
"""As `engine.assembly` has it."""

GPU_PLANS_BYTES = 4096 * 16 * 16 * 4 * (16 + 32 + 16) + 64 * MIB
"""As `engine.gpu_budget` has it."""

GPU_CONTEXT_BYTES = 512 * MIB
"""What CUDA, its libraries and compiled kernels take before a tensor is there; between 300 and 600 MiB on the cards that people report of."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the largest step takes beside the budget. An estimate: a GPU's engine measures it at its start.

    Attributes:
        activations_bytes: of one step.
        reserved_bytes: what is held back: on a GPU two steps (graphs keep one of their own), LoRA's plans and CUDA's own; on a CPU one step.
    """

    activations_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Arena:
    """One budget in pages, of which KV blocks and adapters both rent.

    Attributes:
        budget_bytes: of both together.
        source: who said so.
        page_bytes: on a GPU one KV block, or several where an adapter's widest row is longer; on a CPU a small page.
        blocks_per_page, pages_per_block: the one of them that isn't 1 says how a block and a page go together.
        block_bytes, block_size: of a KV block, and its tokens.
        sequence_blocks: of one sequence of full length, which always has its place.
    """

    budget_bytes: int
    source: str
    page_bytes: int
    num_pages: int
    blocks_per_page: int
    pages_per_block: int
    block_bytes: int
    block_size: int
    sequence_blocks: int

    @property
    def max_adapter_pages(self) -> int:
        """What adapters may take at most, together or one alone."""
        return self.num_pages - self.kv_pages(self.sequence_blocks)

    def kv_pages(self, num_blocks: int) -> int:
        """Pages of so many KV blocks."""
        return -(-num_blocks // self.blocks_per_page) * self.pages_per_block

    def blocks_of(self, num_tokens: int) -> int:
        """KV blocks of one sequence of so many tokens."""
        return -(-num_tokens // self.block_size)

    def kv_tokens(self, num_pages: int) -> int:
        """Tokens whose KV so many pages hold."""
        return num_pages // self.pages_per_block * self.blocks_per_page * self.block_size

    def adapter_pages_beside(self, num_sequences: int, num_tokens: int) -> int | None:
        """Pages that are left for adapters while so many sequences of so many tokens run; None: as many can't run at once."""
        num_pages = self.kv_pages(num_sequences * self.blocks_of(num_tokens))
        if num_pages > self.num_pages:
            return None
        return min(self.max_adapter_pages, self.num_pages - num_pages)

    def max_sequences(self, num_tokens: int) -> int:
        """Sequences of so many tokens that can run at once with no adapter resident."""
        num_blocks = self.num_pages // self.pages_per_block * self.blocks_per_page
        return num_blocks // self.blocks_of(num_tokens)


def plan_step(base: BasePlan, config: EngineConfig) -> StepPlan:
    """Estimate what a step of the most rows takes: what is alive at its widest place, and the logits of the sequences."""
    model, on_gpu = base.config, base.device == "cuda"
    num_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    inner = model.intermediate_size if model.experts is None else model.experts.intermediate_size
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = max(heads, 3 * inner)
    # the stream is float32 on both; what passes between linears is as wide as the activations' dtype
    per_row = 4 * 2 * model.hidden_size + (2 if on_gpu else 4) * (2 * model.hidden_size + widest)
    logits = 4 * min(num_rows, config.max_num_seqs) * model.vocab_size
    activations = num_rows * per_row + 2 * logits
    reserved = 2 * activations + GPU_PLANS_BYTES + GPU_CONTEXT_BYTES if on_gpu else activations
    return StepPlan(activations, reserved)


def plan_arena(base: BasePlan, config: EngineConfig, step: StepPlan, device_bytes: int | None) -> Arena:
    """Say what the budget is and how it is divided.

    Args:
        device_bytes: a GPU's memory in all; needed where no budget is given.

    Raises:
        ConfigError: the budget isn't known, or can't hold one sequence of the model's full length.
    """
    budget, source = _budget(base, config, step, device_bytes)
    block = base.kv_block_bytes(config.block_size)
    if base.device == "cpu":
        page, blocks_per_page = CPU_PAGE_BYTES, 1
        pages_per_block = -(-block // page)
    else:
        blocks_per_page, pages_per_block = -(-_widest_row_bytes(base) // block), 1
        page = blocks_per_page * block
    sequence_blocks = -(-base.max_model_len // config.block_size)
    arena = Arena(
        budget,
        source,
        page,
        budget // page,
        blocks_per_page,
        pages_per_block,
        block,
        config.block_size,
        sequence_blocks,
    )
    if arena.num_pages < arena.kv_pages(sequence_blocks):
        raise ConfigError(
            f"The memory budget, {budget / MIB:.0f} MiB, holds {arena.kv_tokens(arena.num_pages)} tokens of KV; one sequence of the model's "
            f"{base.max_model_len} takes {arena.kv_pages(sequence_blocks) * page / MIB:.0f} MiB.",
            hint="Raise --memory-budget or lower --max-model-len.",
        )
    return arena


CPU_PAGE_BYTES = 4096


def _budget(base: BasePlan, config: EngineConfig, step: StepPlan, device_bytes: int | None) -> tuple[int, str]:
    if config.memory_budget_bytes:
        return config.memory_budget_bytes, "--memory-budget"
    if base.device == "cpu":
        return CPU_BUDGET_BYTES, "the default of a CPU"
    if device_bytes is None:
        raise ConfigError(
            "How much memory the GPU has isn't known here.",
            hint="Give --device-memory, such as 24GiB, or --memory-budget.",
        )
    left = int(device_bytes * config.memory_utilization) - base.num_bytes - step.reserved_bytes
    if left <= 0:
        raise ConfigError(
            f"The base leaves no memory: of {device_bytes / GIB:.1f} GiB, {config.memory_utilization:.0%} of which may be taken, it has "
            f"{base.num_bytes / GIB:.1f} and steps about {step.reserved_bytes / GIB:.1f}.",
            hint="Quantize the base, lower --max-num-batched-tokens, or raise --memory-utilization.",
        )
    return left, "what the base and steps leave of --device-memory (an estimate)"


def _widest_row_bytes(base: BasePlan) -> int:
    """Of what may lie in a page: a float32 row as long as any linear's output or input."""
    widest = max(max(shape) for shape in base.spec.modules.values())
    return -(-4 * widest // UNIT_BYTES) * UNIT_BYTES
