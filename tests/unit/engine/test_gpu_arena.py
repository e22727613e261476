"""A GPU's engine whose KV blocks and adapters are pages of one small tensor,
its kernels in Triton's interpreter.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from loraserve.engine.worker.startup import build_engine
from loraserve.memory.arena import Owner
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.memory_plan import plan_gpu_arena
from loraserve.types import TokenOutput

from .conftest import World
from .test_engine import add, prompts, run

pytestmark = pytest.mark.interpreted

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 2


def test_adapter_pages_hold_kv_later_and_vice_versa(world: World) -> None:
    budget = 18 * BLOCK_BYTES
    parts = build_engine(
        world.config(
            device="cuda",
            dtype="float16",
            max_num_seqs=2,
            max_num_batched_tokens=24,
            max_model_len=48,
            memory_budget_bytes=budget,
        )
    )
    engine, ready = parts.engine, parts.ready
    kv, pool, plan = engine._kv, engine.pager._pool, plan_gpu_arena(engine.base, budget, BLOCK_BYTES, 3)
    assert isinstance(pool.device, GpuDevice)
    assert ready.num_kv_blocks == kv.num_blocks == plan.num_blocks
    assert ready.adapter_budget_bytes == plan.max_adapter_bytes
    assert pool.device.num_bytes <= budget
    prompt = prompts(1, seed=5, low=17, high=17)[0]
    before: list[TokenOutput] = []
    add(engine, world, prompt, "r8", max_tokens=1, logprobs=320)
    run(engine, before)
    pages = set(pool.device.arena_client.pages)
    # a sequence that takes whatever anybody can give up
    blocks = kv.allocate(kv.num_available)
    assert blocks is not None
    assert pool.num_evictions_for == {Owner.KV: 1}
    assert pages <= set(blocks)
    pool.device.pool.data.fill_(0xFF)
    kv.release(blocks)
    after: list[TokenOutput] = []
    add(engine, world, prompt, "r8", max_tokens=1, logprobs=320)
    run(engine, after)
    assert after[-1].token_ids == before[-1].token_ids
    assert after[-1].logprobs == before[-1].logprobs
    assert len(pool.device.arena_client.pages) == len(pages)
    engine.pager.close()
    assert engine.check() == []
