"""How a budget is divided: the same numbers as the engine's,
and never less than one sequence for the KV.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraserve.config import AUTO_DTYPES, CPU_BUDGET_BYTES
from loraserve.engine.worker import startup as assembly
from loraserve.errors import ConfigError
from loraserve.limits import GIB, MIB
from loraserve.memory.memory_plan import MemoryPlan
from loraserve.model.backends.step_sizes import buffer_bytes
from loraserve.planning.memory import ArenaPlan, plan_arena, plan_step
from loraserve_kernels.gpu.paged.pool import PagedPool


def test_automatic_values_match_engine_resolution(make: Any) -> None:
    resolved = assembly.resolve(make.config(device="cpu"))
    assert (resolved.dtype, resolved.memory_budget_bytes) == (AUTO_DTYPES["cpu"], CPU_BUDGET_BYTES)


def test_a_cpu_rents_a_block_in_small_pages(make: Any) -> None:
    base, config = make.base(), make.config(memory_budget_bytes=MIB)
    arena = plan_arena(base, config, plan_step(base, config), None)
    # 2 layers of 2 heads of 18 numbers, keys and values, 16 tokens of float32
    assert arena.kv_block_bytes == 2 * 2 * 2 * 18 * 16 * 4
    assert (arena.division.pages_per_block, arena.sequence_blocks) == (3, 8)
    assert arena.num_pages == MIB // arena.page_bytes
    assert arena.max_adapter_pages == arena.num_pages - 24
    assert arena.kv_tokens_beside(0) == arena.num_pages // 3 * 16
    assert arena.kv_bytes(17) == 6 * 4096


@pytest.mark.parametrize("budget", [MIB, 100 * MIB, 3 * GIB])
@pytest.mark.parametrize("width", [1058, 4000])
def test_gpu_memory_division_matches_engine(make: Any, budget: int, width: int) -> None:
    base, config = make.base("cuda", intermediate_size=width), make.config(memory_budget_bytes=budget)
    arena = plan_arena(base, config, plan_step(base, config), None)
    pages = PagedPool(
        num_pages=1,
        page_num_bytes=arena.page_bytes,
        num_layers=2,
        max_tiles=arena.max_tiles,
        max_slots=2,
        module_shapes=base.spec.modules,
        dtype=torch.bfloat16,
        device="cpu",
    )
    left = budget - arena.division.num_pages * arena.page_bytes
    # what is left has room for the tables, and for less than a page more
    assert pages.records.nbytes <= left < pages.records.nbytes + arena.page_bytes


def test_blocks_sharing_page_are_rented_together(make: Any) -> None:
    base, config = make.base("cuda", intermediate_size=2000), make.config(memory_budget_bytes=MIB)
    arena = plan_arena(base, config, plan_step(base, config), None)
    assert arena.division.blocks_per_page == 2
    assert (arena.kv_pages(8), arena.kv_pages(9)) == (4, 5)
    assert arena.kv_tokens_beside(arena.num_pages - 1) == 32


def test_pages_of_the_caches_own_are_taken_first(make: Any) -> None:
    division = MemoryPlan(100, 4096, 4096, num_dedicated_pages=10, num_kv_pages=0)
    arena = ArenaPlan(110 * 4096, "a test", division, 4096, 16, 8)
    assert (arena.kv_pages(8), arena.kv_pages(12)) == (0, 2)
    assert arena.adapter_pages_beside(1, 128) == 100
    assert arena.kv_tokens_beside(100) == 160


def test_gpu_budget_excludes_base_and_step_memory(make: Any) -> None:
    base, config = make.base("cuda", num_bytes=2 * GIB), make.config(memory_utilization=0.5)
    step = plan_step(base, config)
    arena = plan_arena(base, config, step, 8 * GIB)
    assert arena.budget_bytes == 4 * GIB - 2 * GIB - step.reserved_bytes
    with pytest.raises(ConfigError, match="leaves no memory"):
        plan_arena(base, config, step, 4 * GIB)
    with pytest.raises(ConfigError, match="memory is unknown"):
        plan_arena(base, config, step, None)


def test_budget_below_single_sequence_is_refused(make: Any) -> None:
    base = make.base()
    needed = 24 * 4096
    config = make.config(memory_budget_bytes=needed)
    assert plan_arena(base, config, plan_step(base, config), None).max_adapter_pages == 0
    config = make.config(memory_budget_bytes=needed - 1)
    with pytest.raises(ConfigError, match="one sequence of the model's full length"):
        plan_arena(base, config, plan_step(base, config), None)


def test_adapters_share_memory_left_by_running_sequences(make: Any) -> None:
    arena = make.arena(100, sequence_blocks=8)
    assert arena.adapter_pages_beside(1, 128) == 92
    # less than one sequence is kept free for another of full length
    assert arena.adapter_pages_beside(1, 16) == 92
    assert arena.adapter_pages_beside(4, 100) == 100 - 4 * 7
    assert arena.adapter_pages_beside(12, 128) == 4
    assert arena.adapter_pages_beside(13, 128) is None
    assert arena.max_sequences(128) == 12


def test_cpu_reserves_step_buffers(make: Any) -> None:
    step = plan_step(make.base(), make.config(max_num_batched_tokens=2048))
    assert step.buffers_bytes == buffer_bytes(make.base().config, 2048)
    assert step.reserved_bytes == step.activations_bytes + step.buffers_bytes
    assert plan_step(make.base("cuda"), make.config()).buffers_bytes == 0


def test_step_memory_grows_with_rows_and_sequences(make: Any) -> None:
    def bytes_of(**fields: Any) -> int:
        return int(plan_step(make.base("cuda"), make.config(**fields)).activations_bytes)

    assert bytes_of(max_num_batched_tokens=1024) > bytes_of(max_num_batched_tokens=512)
    assert bytes_of(max_num_seqs=128) > bytes_of(max_num_seqs=64)
