"""What routers are told of memory, against what the allocator gives at that moment."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from prometheus_client.core import Metric

from loraserve.api.metrics import engine_tables
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.kv.block_pool import BlockLayout, BlockPool
from loraserve.memory.kv.prefix_cache import BlockId
from loraserve.memory.residency.device_cache import DeviceCache, Pin
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.snapshot import adapter_usage, memory_usage
from loraserve.types import EngineStats

RANKS = (1, 2, 4, 7, 3, 5, 8)
PAGE = 256
NUM_PAGES = 60
LONGEST = 5


class Memory:
    """An arena with KV blocks and adapters, changed at random."""

    def __init__(self, make: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.arena = Arena(NUM_PAGES, PAGE)
        layout = BlockLayout(self.arena.client(Owner.KV), 3 * PAGE, pages_per_group=3)
        self.kv = BlockPool(NUM_PAGES // 3, 2, layout=layout, clock=lambda: self.now_s)
        most = (NUM_PAGES - 3 * LONGEST) * PAGE
        self.device = CpuDevice(make.base, most, arena_client=self.arena.client(Owner.ADAPTERS))
        self.pool = DeviceCache(self.device, lambda: self.now_s)
        self.host = HostCache(6 * PAGE)
        self.loaded = {make.digest(rank): make.loaded(rank) for rank in RANKS}
        self.blocks: list[list[BlockId]] = []
        self.pins: list[Pin] = []

    def change(self) -> None:
        self.now_s += self.random.choice([0.1, 30.0, 5000.0])
        digest = self.random.choice(list(self.loaded))
        match self.random.randrange(7):
            case 0:
                adapter = self.loaded[digest]
                if digest not in self.pool and self.pool.can_admit(self.device.footprint_of(adapter.host)):
                    self.pool.admit(digest, adapter, self.now_s)
            case 1:
                if self.pool.has_landed(digest):
                    self.pins.append(self.pool.pin(digest, self.now_s))
            case 2 if self.pins:
                self.pins.pop(self.random.randrange(len(self.pins))).release()
            case 3:
                blocks = self.kv.allocate(self.random.randint(1, LONGEST))
                if blocks is not None:
                    self.blocks.append(blocks)
            case 4 if self.blocks:
                self.kv.release(self.blocks.pop(self.random.randrange(len(self.blocks))))
            case 5:
                if not self.host.put(digest, self.loaded[digest], self.now_s):
                    self.host.take(digest)
            case 6:
                self.pool.set_operator_pin(digest, self.random.random() < 0.3)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_kv_blocks=self.kv.num_blocks,
            num_kv_blocks_used=self.kv.num_held,
            num_kv_blocks_available=self.kv.num_available,
            kv_block_size=self.kv.block_size,
            **adapter_usage(self.pool, self.host),
            **memory_usage(self.arena),
        )

    def most_blocks(self) -> int:
        """Return how many blocks the allocator gives, by taking them all."""
        held: list[BlockId] = []
        while (more := self.kv.allocate(1)) is not None:
            held.extend(more)
        self.kv.release(held)
        return len(held)


def gauge(name: str, stats: EngineStats) -> float:
    (row,) = (row for row in engine_tables.VLLM if row.name == name)
    metric: Metric = row.collect(stats)
    return float(metric.samples[0].value)


def check(memory: Memory) -> None:
    stats = memory.stats()
    residents = dict(memory.pool.items())
    sizes = [resident.footprint.num_bytes for resident in residents.values()]
    # as vllm:num_gpu_loaded_lora_adapters has it
    assert stats.device_adapters - stats.num_arriving_adapters == sum(r.has_landed for r in residents.values())
    assert gauge("vllm:num_cpu_loaded_lora_adapters", stats) == len(memory.host)
    if not sizes:
        assert stats.max_device_adapters == 0
    else:
        mean = Fraction(sum(sizes), len(sizes))
        budget = memory.pool.budget_bytes
        assert stats.max_device_adapters * mean <= budget < (stats.max_device_adapters + 1) * mean
        assert stats.max_device_adapters >= len(sizes)
    usage = gauge("vllm:kv_cache_usage_perc", stats)
    # taking them evicts idle adapters
    most = memory.most_blocks()
    assert most == stats.num_kv_blocks_available
    used = sum(len(blocks) for blocks in memory.blocks)
    assert usage == pytest.approx(used / (used + most) if most else 1.0)
    assert (usage == 1.0) == (most == 0)


@pytest.mark.parametrize("num_samples", [1_000, pytest.param(10_000, marks=pytest.mark.campaign)])
def test_gauges_match_allocator_after_any_operations(make: Any, num_samples: int) -> None:
    memory = Memory(make, seed=19)
    has_been_full = has_had_adapters = False
    for _ in range(num_samples):
        memory.change()
        # a check takes what is idle, which then is no more for the operations after it
        if memory.random.randrange(3) == 0:
            check(memory)
        stats = memory.stats()
        has_been_full |= stats.num_kv_blocks_available == 0
        has_had_adapters |= stats.max_device_adapters > 0
    assert has_had_adapters
    assert has_been_full


def test_reported_number_of_equal_adapters_fits(make: Any) -> None:
    for rank in RANKS:
        arena = Arena(360, PAGE)
        device = CpuDevice(make.base, 360 * PAGE, arena_client=arena.client(Owner.ADAPTERS))
        pool, adapter, num = DeviceCache(device), make.loaded(rank), 0
        while pool.can_admit(device.footprint_of(adapter.host)):
            digest = make.digest(num)
            pool.admit(digest, adapter, 0.0)
            pool.pin(digest, 0.0)
            num += 1
            assert pool.max_residents >= num
        assert pool.max_residents == num > 0
