"""KV blocks and adapters take memory from each other by what it's worth,
in pages that are all alike.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from loraserve.errors import ConfigError
from loraserve.limits import MIB
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.cpu import CpuDevice, HostMemory
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.kv.block_pool import BlockLayout, BlockPool
from loraserve.memory.kv.prefix_cache import BlockId, prefix_root
from loraserve.memory.memory_plan import plan_cpu_memory, plan_gpu_memory
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.types import Digest, TenantId

ROOT = prefix_root(TenantId("t"), Digest("b"), "float32")


class Shared:
    """Sixteen pages of 1 KiB of a CPU: a KV block takes one, an adapter of rank 7 takes four.

    Adapters may have twelve.
    """

    def __init__(self, make: Any, clock: Callable[[], float], num_pages: int = 16) -> None:
        self.make, self.clock = make, clock
        self.freed: list[int] = []
        self.arena = Arena(num_pages, 1024)
        layout = BlockLayout(self.arena.client(Owner.KV), 1024, on_freed=self.freed.extend)
        self.kv = BlockPool(num_pages, 2, layout=layout, clock=clock)
        client = self.arena.client(Owner.ADAPTERS)
        self.pool = DeviceCache(CpuDevice(make.base, (num_pages - 4) * 1024, arena_client=client), clock)
        self.left: list[Digest] = []
        self.pool.on_evicted = lambda evicted: self.left.append(evicted.digest)
        # a block costs as much as a KiB of an adapter
        self.kv.prefix_cache.prefill_cost.note(2000, 1.0)
        self.pool.load_cost.note(1024 * 1000, 1.0)

    def admit(self, name: str) -> list[Digest]:
        evicted = self.pool.admit(self.make.digest(name), self.make.loaded(7), self.clock())
        return [e.digest for e in evicted]

    def cache(self, first: int, num_blocks: int, *, is_hit: bool = True) -> list[BlockId]:
        """Idle blocks of tokens that start with this one, hit once or never."""
        blocks = self.kv.allocate(num_blocks)
        assert blocks is not None
        parent = ROOT
        for i, block in enumerate(blocks):
            parent = self.kv.prefix_cache.publish(block, parent, [first + i, 0])
        self.kv.release(blocks)
        if is_hit:
            tokens = [token for i in range(num_blocks) for token in (first + i, 0)]
            self.kv.release(self.kv.match_prefix(ROOT, tokens, len(tokens))[0])
        return blocks


@pytest.fixture
def shared(make: Any, clock: Any) -> Shared:
    return Shared(make, clock)


def test_less_valuable_idle_adapter_yields_to_kv(shared: Shared, clock: Any) -> None:
    shared.admit("old")
    clock.advance(100.0)
    shared.cache(0, 10)
    assert shared.kv.allocate(4) is not None
    assert shared.left == [shared.make.digest("old")]
    assert shared.pool.num_evictions_for == {Owner.KV: 1}
    assert shared.kv.num_idle == 10
    assert shared.kv.check() == shared.pool.check() == []


def test_less_valuable_kv_yields_to_kv(shared: Shared, clock: Any) -> None:
    shared.cache(0, 10)
    clock.advance(100.0)
    shared.admit("new")
    assert shared.kv.allocate(6) is not None
    assert shared.left == []
    assert (shared.kv.num_idle, shared.kv.num_evictions_for) == (6, {Owner.KV: 4})
    assert shared.kv.check() == shared.pool.check() == []


def test_less_valuable_kv_is_freed_for_adapter(shared: Shared, clock: Any) -> None:
    blocks = shared.cache(0, 14)
    clock.advance(100.0)
    assert shared.admit("new") == []
    assert shared.kv.num_evictions_for == {Owner.ADAPTERS: 2}
    # the end of the prefix
    assert sorted(shared.freed) == sorted(blocks[-2:])
    assert shared.kv.check() == shared.pool.check() == []


def test_less_valuable_adapter_yields_to_adapter(shared: Shared, clock: Any) -> None:
    shared.admit("old")
    clock.advance(100.0)
    shared.cache(0, 12)
    assert shared.admit("new") == [shared.make.digest("old")]
    assert shared.pool.num_evictions_for == {Owner.ADAPTERS: 1}
    assert shared.kv.num_idle == 12


def test_unhit_cache_is_cheap_at_low_hit_rate(shared: Shared, clock: Any) -> None:
    shared.admit("old")
    clock.advance(100.0)
    shared.cache(0, 12, is_hit=False)
    assert shared.kv.allocate(4) is not None
    assert (shared.left, shared.kv.num_evictions_for) == ([], {Owner.KV: 4})


def test_unhit_cache_is_valuable_at_high_hit_rate(shared: Shared, clock: Any) -> None:
    shared.cache(0, 4)
    for _ in range(50):
        shared.kv.release(shared.kv.match_prefix(ROOT, [0, 0, 1, 0, 2, 0, 3, 0], 8)[0])
    shared.admit("old")
    clock.advance(100.0)
    shared.cache(50, 8, is_hit=False)
    assert shared.kv.allocate(1) is not None
    assert (shared.left, shared.kv.num_evictions_for) == ([shared.make.digest("old")], {})


def test_costlier_to_restore_memory_is_kept(shared: Shared, clock: Any) -> None:
    shared.cache(0, 12)
    shared.admit("same age")
    shared.kv.prefix_cache.prefill_cost.note(1000, 100.0)
    assert shared.kv.allocate(1) is not None
    assert shared.left == [shared.make.digest("same age")]


def test_free_blocks_are_freed_before_any_eviction(shared: Shared) -> None:
    shared.admit("a")
    blocks = shared.kv.allocate(12)
    assert blocks is not None
    shared.kv.release(blocks[4:])
    assert shared.admit("b") == []
    assert len(shared.freed) == 4
    assert shared.pool.num_evictions == shared.kv.num_evictions_for.total() == 0


def test_page_is_freed_once_no_block_is_held() -> None:
    arena = Arena(2, 1024, is_indexed=True)
    kv = BlockPool(4, 2, layout=BlockLayout(arena.client(Owner.KV), 512, blocks_per_group=2))
    adapters = arena.client(Owner.ADAPTERS)
    first, second = kv.allocate(1) or [], kv.allocate(1) or []
    assert first[0] // 2 == second[0] // 2
    kv.prefix_cache.publish(first[0], ROOT, [1, 2])
    kv.release(first)
    assert not adapters.make_room(2)
    kv.release(second)
    # one is cached, the other free
    assert (kv.num_idle, kv.num_available) == (1, 4)
    assert adapters.make_room(2)
    assert (kv.num_idle, kv.num_evictions_for) == (0, {Owner.ADAPTERS: 1})
    assert kv.check() == arena.check() == []
    adapters.allocate_pages(1)
    assert kv.num_available == 2
    assert len(set(kv.allocate(2) or [])) == 2
    assert kv.check() == arena.check() == []


def test_pages_owned_by_kv_alone_are_not_surrendered() -> None:
    arena = Arena(1, 1024, is_indexed=True)
    kv = BlockPool(3, 2, layout=BlockLayout(arena.client(Owner.KV), 1024))
    blocks = kv.allocate(3)
    assert blocks == [1, 2, 0]
    parent = ROOT
    for i, block in enumerate(blocks):
        parent = kv.prefix_cache.publish(block, parent, [i, i])
    # the arena's is the last to have been used
    kv.release([blocks[2], blocks[0], blocks[1]])
    assert kv.num_idle_pages == 1
    assert not arena.client(Owner.ADAPTERS).make_room(2)
    assert arena.client(Owner.ADAPTERS).make_room(1)
    assert kv.num_idle == 2
    assert kv.check() == arena.check() == []


def test_page_without_held_block_is_offered_first() -> None:
    arena = Arena(2, 1024, is_indexed=True)
    kv = BlockPool(4, 2, layout=BlockLayout(arena.client(Owner.KV), 512, blocks_per_group=2))
    blocks = kv.allocate(3) or []
    for i in (0, 2):
        kv.prefix_cache.publish(blocks[i], ROOT, [i, i])
        kv.release([blocks[i]])
    assert arena.client(Owner.ADAPTERS).make_room(1)
    assert arena.client(Owner.KV).pages == {blocks[1] // 2}
    assert kv.num_held == kv.num_idle == 1
    assert kv.check() == arena.check() == []


def test_holding_block_without_use_adds_no_value(shared: Shared) -> None:
    shared.cache(0, 2)
    before = shared.kv.victim_value()
    shared.kv.release(shared.kv.match_prefix(ROOT, [0, 0, 1, 0], 4)[0], is_use=False)
    assert shared.kv.victim_value() == before
    shared.kv.release(shared.kv.match_prefix(ROOT, [0, 0, 1, 0], 4)[0])
    assert (shared.kv.victim_value() or 0.0) > (before or 0.0)


def test_pinning_counts_as_adapter_use(shared: Shared, clock: Any) -> None:
    shared.admit("a")
    before = shared.pool.victim_value()
    for _ in range(3):
        shared.pool.touch(shared.make.digest("a"), clock())
    assert shared.pool.victim_value() == before
    for _ in range(3):
        shared.pool.pin(shared.make.digest("a"), clock()).release()
    assert shared.pool.victim_value() == pytest.approx(3 * (before or 0.0))


def test_adapters_leave_memory_for_single_sequence(shared: Shared) -> None:
    for name in "abc":
        shared.admit(name)
        shared.pool.set_operator_pin(shared.make.digest(name), True)
    footprint = shared.pool.device.footprint_of(shared.make.packed(1))
    assert not shared.pool.can_admit(footprint)
    assert not shared.pool.can_ever_admit(footprint)
    assert shared.kv.num_available == 4
    assert len(shared.kv.allocate(4) or []) == 4
    assert shared.kv.allocate(1) is None


def test_awaited_adapter_is_not_evicted_for_kv(shared: Shared) -> None:
    shared.admit("a")
    shared.pool.protect([shared.make.digest("a")])
    assert shared.kv.num_available == 12
    assert shared.kv.allocate(13) is None
    shared.pool.protect(())
    assert len(shared.kv.allocate(13) or []) == 13


def test_random_adapter_churn_loses_no_page(make: Any) -> None:
    pool, rng = make.pool(num_pages=96, max_tiles=400, max_slots=97), random.Random(0)
    arena = Arena(96, make.page_bytes, is_indexed=True)
    kv = BlockPool(96, 2, layout=BlockLayout(arena.client(Owner.KV), make.page_bytes))
    device = GpuDevice(make.base, pool, DirectCopies(), arena_client=arena.client(Owner.ADAPTERS), max_pages=88)
    adapters = DeviceCache(device)
    packed = [device.pack(make.modules(rank), make.modules(1)[0].lora_a.dtype) for rank in range(1, 33)]
    held: list[list[BlockId]] = []
    num_evicted = 0
    for i in range(5000):
        if i % 3 == 0:
            held.append(kv.allocate(rng.randint(1, 4)) or [])
        while sum(map(len, held)) > 32:
            kv.release(held.pop(rng.randrange(len(held))))
        host = packed[rng.randrange(len(packed))]
        count, num_free = host.pages.num_pages, arena.num_free
        assert adapters.can_admit(device.footprint_of(host))
        evicted = adapters.admit(make.digest(i), make.loaded(host), float(i))
        # pages that are free anywhere are a place for anybody
        assert not evicted or num_free + kv.num_idle_pages < count or adapters.used.num_bytes + count > 88
        num_evicted += len(evicted)
        if i % 100 == 0:
            assert adapters.check() == kv.check() == []
    assert num_evicted > 3000
    assert adapters.check() == kv.check() == []


def test_memory_is_freed_with_the_blocks(make: Any, clock: Any) -> None:
    num_blocks, block = 64, MIB
    assert block % mmap.PAGESIZE == 0
    memory = HostMemory(num_blocks * block)
    arena = Arena(num_blocks, block)

    def release(blocks: Any) -> None:
        for b in blocks:
            memory.release(b * block, block)

    kv = BlockPool(num_blocks, 2, layout=BlockLayout(arena.client(Owner.KV), block, on_freed=release))
    process = psutil.Process()
    before = process.memory_info().rss
    blocks = kv.allocate(num_blocks)
    assert blocks is not None
    memory.data.fill_(1)
    full = process.memory_info().rss
    # other allocations of this process meanwhile are far below a sixteenth of it
    assert full - before > 60 * MIB
    kv.release(blocks)
    assert process.memory_info().rss - before > 60 * MIB
    assert arena.client(Owner.ADAPTERS).make_room(48)
    left = process.memory_info().rss
    assert full - left > 44 * MIB
    # what is there still has its bytes
    kept = kv.allocate(16)
    assert kept is not None
    assert all(int(memory.data[b * block]) == 1 for b in kept)


def test_cpu_budget_is_divided_into_pages() -> None:
    division = plan_cpu_memory(100 * 4096 + 5, 3 * 4096 - 7, num_needed_blocks=10, page_num_bytes=4096)
    assert (division.num_pages, division.pages_per_block, division.block_num_bytes) == (100, 3, 3 * 4096)
    assert (division.num_blocks, division.max_adapter_pages) == (33, 70)
    with pytest.raises(ConfigError, match=r"holds 33 KV blocks.*takes 34"):
        plan_cpu_memory(100 * 4096, 3 * 4096, num_needed_blocks=34, page_num_bytes=4096)


def test_gpu_pages_hold_whole_blocks_and_rows() -> None:
    small = plan_gpu_memory(1000 * 512, 500, 10, widest_row_bytes=1200, max_pool_bytes=1 << 30)
    assert (small.block_num_bytes, small.blocks_per_page, small.page_num_bytes) == (512, 3, 1536)
    assert (small.num_pages, small.num_blocks, small.max_adapter_pages) == (333, 999, 329)
    # the kernels of adapters reach the first pages alone
    large = plan_gpu_memory(1000 * 512, 512, 10, widest_row_bytes=100, max_pool_bytes=600 * 512 + 1)
    assert (large.num_pages, large.num_dedicated_pages, large.num_blocks) == (600, 400, 1000)
    assert large.max_adapter_pages == 600
    some = plan_gpu_memory(1000 * 512, 512, 500, widest_row_bytes=100, max_pool_bytes=600 * 512)
    assert some.max_adapter_pages == 500
    with pytest.raises(ConfigError, match=r"holds 999 KV blocks.*takes 1000"):
        plan_gpu_memory(1000 * 512, 500, 1000, widest_row_bytes=1200, max_pool_bytes=1 << 30)
