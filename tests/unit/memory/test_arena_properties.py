"""KV blocks and adapters come, are shared, pinned and evicted in any order: what is held stays as
it was, and each page has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_gpu import read_module

from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.kv.block_pool import BlockLayout, BlockPool
from loraserve.memory.kv.prefix_cache import BlockId, extend_key, prefix_root
from loraserve.memory.residency.device_cache import DeviceCache, Pin
from loraserve.types import Digest, TenantId
from loraserve_kernels.gpu.paged.layout import FIRST_SLICE, FIRST_TILE
from loraserve_kernels.gpu.paged.pool import PagedPool

ROOT = prefix_root(TenantId("t"), Digest("b"), "float32")
RANKS = (1, 2, 4, 7, 3)
BLOCK_SIZE = 2
LONGEST = 5
"""Blocks of a sequence of full length."""


class Machine(RuleBasedStateMachine):
    """What both kinds of arena share. `_make` sets `arena`, `kv`, `pool` and `packed`."""

    make: Any
    arena: Arena
    kv: BlockPool
    pool: DeviceCache
    packed: list[Any]

    def _prepare(self) -> None:
        self.now_s = 1000.0
        self.sequences: list[tuple[list[int], list[BlockId]]] = []
        self.pins: list[Pin] = []
        self.digests = [self.make.digest(i) for i in range(len(RANKS))]
        self.left: list[Digest] = []

    def clock(self) -> float:
        return self.now_s

    def _write(self, block: BlockId, token_ids: Sequence[int]) -> None:
        """The block's bytes are those of its tokens and of all before them."""

    def _check_bytes(self) -> None:
        """What is held, cached or resident has its bytes."""

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=2 * LONGEST))
    def add(self, token_ids: list[int]) -> None:
        found, *_ = self.kv.match_prefix(ROOT, token_ids, len(token_ids) - 1)
        available = self.kv.num_available
        more = self.kv.allocate(-(-len(token_ids) // BLOCK_SIZE) - len(found))
        if more is None:
            assert available < -(-len(token_ids) // BLOCK_SIZE) - len(found)
            self.kv.release(found, is_use=False)
            return
        blocks = [*found, *more]
        for i in range(len(found), len(blocks)):
            self._write(blocks[i], token_ids[: (i + 1) * BLOCK_SIZE])
        parent = ROOT
        for i in range(len(token_ids) // BLOCK_SIZE):
            parent = self.kv.prefix_cache.publish(blocks[i], parent, token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        self.sequences.append((token_ids, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.kv.release(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))[1])

    @rule()
    def take_all_there_is(self) -> None:
        count = self.kv.num_available
        assert self.kv.allocate(count + 1) is None
        blocks = self.kv.allocate(count)
        assert blocks is not None
        assert len(set(blocks)) == count
        self.kv.release(blocks)
        assert self.kv.num_available == count

    @precondition(lambda self: not self.sequences)
    @rule()
    def run_a_sequence_of_full_length(self) -> None:
        blocks = self.kv.allocate(LONGEST)
        assert blocks is not None
        self.sequences.append(([9] * (LONGEST * BLOCK_SIZE), blocks))
        for i, block in enumerate(blocks):
            self._write(block, [9] * ((i + 1) * BLOCK_SIZE))

    @rule(index=st.integers(0, len(RANKS) - 1))
    def admit(self, index: int) -> None:
        footprint = self.pool.device.footprint_of(self.packed[index])
        if self.digests[index] in self.pool or not self.pool.can_admit(footprint):
            return
        before = {digest for digest, _ in self.pool.items()}
        evicted = self.pool.admit(self.digests[index], self.make.loaded(self.packed[index]), self.now_s)
        after = {digest for digest, _ in self.pool.items()}
        assert {e.digest for e in evicted} == before - after
        assert all(pin.digest in after for pin in self.pins)

    @rule(index=st.integers(0, len(RANKS) - 1))
    def pin(self, index: int) -> None:
        if self.pool.has_landed(self.digests[index]):
            self.pool.touch(self.digests[index], self.now_s)
            self.pins.append(self.pool.pin(self.digests[index], self.now_s))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).release()

    @rule(index=st.integers(0, len(RANKS) - 1), is_pinned=st.booleans())
    def operator_pins(self, index: int, is_pinned: bool) -> None:
        self.pool.set_operator_pin(self.digests[index], is_pinned)

    @rule(indices=st.sets(st.integers(0, len(RANKS) - 1), max_size=2))
    def await_requests_of(self, indices: set[int]) -> None:
        self.pool.protect([self.digests[i] for i in indices])

    @rule(seconds=st.sampled_from([0.1, 30.0, 5000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def everything_adds_up(self) -> None:
        assert self.kv.check() == []
        assert self.pool.check() == []
        assert self.arena.check() == []
        held = {block for _, blocks in self.sequences for block in blocks}
        assert self.kv.num_held == len(held)
        assert all(pin.digest in self.pool for pin in self.pins)
        assert self.pool.num_bytes <= self.pool.budget_bytes
        self._check_bytes()

    def teardown(self) -> None:
        if not hasattr(self, "pins"):
            return
        for pin in self.pins:
            pin.release()
        for _, blocks in self.sequences:
            self.kv.release(blocks)
        assert self.kv.num_held == 0
        self.everything_adds_up_without_holders()

    def everything_adds_up_without_holders(self) -> None:
        """Whoever fits has its place, now that nobody holds anything."""
        self.pool.protect(())
        for digest in self.digests:
            self.pool.set_operator_pin(digest, False)
        for packed in self.packed:
            footprint = self.pool.device.footprint_of(packed)
            assert self.pool.can_admit(footprint) == footprint.fits(self.pool.device.limits)
        assert self.kv.check() == []
        assert self.pool.check() == []


def counted_machine(make: Any) -> type[Machine]:
    class Counted(Machine):
        """Pages of a CPU, three to a KV block."""

        @initialize(num_pages=st.integers(3 * LONGEST, 60))
        def start(self, num_pages: int) -> None:
            self.make = make
            self._prepare()
            self.arena = Arena(num_pages, 256)
            layout = BlockLayout(
                self.arena.client(Owner.KV), 3 * 256, pages_per_group=3, on_freed=self._note_given_back
            )
            self.kv = BlockPool(num_pages // 3, BLOCK_SIZE, layout=layout, clock=self.clock)
            most = (num_pages - 3 * LONGEST) * 256
            device = CpuDevice(make.base, most, arena_client=self.arena.client(Owner.ADAPTERS))
            self.pool = DeviceCache(device, self.clock)
            self.pool.on_evicted = lambda evicted: self.left.append(evicted.digest)
            self.packed = [make.packed(rank) for rank in RANKS]

        def _note_given_back(self, blocks: Sequence[int]) -> None:
            held = {block for _, holds in self.sequences for block in holds}
            assert not held & set(blocks)
            assert not self.kv.prefix_cache._cached.keys() & set(blocks)

    return Counted


def placed_machine(make: Any) -> type[Machine]:
    class PlacedAdapter(Machine):
        """Pages of a GPU with real bytes: one or two KV blocks a page,
        and pages behind the arena for KV alone.
        """

        @initialize(
            num_pages=st.integers(LONGEST, 14),
            num_dedicated_pages=st.sampled_from([0, 0, 2]),
            per_page=st.sampled_from([1, 2]),
            max_tiles=st.sampled_from([2, 8]),
        )
        def start(self, num_pages: int, num_dedicated_pages: int, per_page: int, max_tiles: int) -> None:
            self.make = make
            self._prepare()
            self.block_bytes = make.page_bytes // per_page
            self.data = torch.randint(0, 256, ((num_pages + num_dedicated_pages) * make.page_bytes,), dtype=torch.uint8)
            self.arena = Arena(num_pages, make.page_bytes, is_indexed=True)
            layout = BlockLayout(self.arena.client(Owner.KV), self.block_bytes, blocks_per_group=per_page)
            num_blocks = (num_pages + num_dedicated_pages) * per_page
            self.kv = BlockPool(num_blocks, BLOCK_SIZE, layout=layout, clock=self.clock)
            self.gpu = PagedPool(
                num_pages=num_pages,
                page_num_bytes=make.page_bytes,
                num_layers=make.base.num_layers,
                max_tiles=max_tiles,
                max_slots=5,
                module_shapes=make.base.modules,
                dtype=torch.bfloat16,
                device="cpu",
                data=self.data[: num_pages * make.page_bytes],
            )
            most = num_pages - max(0, -(-LONGEST // per_page) - num_dedicated_pages)
            device = GpuDevice(
                make.base, self.gpu, DirectCopies(), arena_client=self.arena.client(Owner.ADAPTERS), max_pages=most
            )
            self.pool = DeviceCache(device, self.clock)
            self.modules = [make.modules(rank, seed=i) for i, rank in enumerate(RANKS)]
            self.packed = [device.pack(modules, torch.float32) for modules in self.modules]

        def _bytes_of(self, token_ids: Sequence[int]) -> int:
            return extend_key(ROOT, token_ids)[0]

        def _write(self, block: BlockId, token_ids: Sequence[int]) -> None:
            self.data[block * self.block_bytes :][: self.block_bytes] = self._bytes_of(token_ids)

        def _check_bytes(self) -> None:
            for token_ids, blocks in self.sequences:
                for i, block in enumerate(blocks):
                    wanted = self._bytes_of(token_ids[: (i + 1) * BLOCK_SIZE])
                    assert (self.data[block * self.block_bytes :][: self.block_bytes] == wanted).all()
            for index, digest in enumerate(self.digests):
                if self.pool.has_landed(digest):
                    slot = self.pool.handle(digest)
                    tile = int(self.gpu.sites[slot, 0, FIRST_SLICE + FIRST_TILE])
                    a, _, _ = read_module(self.gpu, tile, 1, RANKS[index], 32, 32)
                    assert torch.equal(a, self.modules[index][1].lora_a.bfloat16())

    return PlacedAdapter


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize(("machine", "num_examples"), [(counted_machine, 80), (placed_machine, 60)])
def test_random_operations_keep_held_memory_and_unique_owners(make: Any, machine: Any, num_examples: int) -> None:
    run_state_machine_as_test(
        machine(make),
        settings=settings(
            max_examples=num_examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
