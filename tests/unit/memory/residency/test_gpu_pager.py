"""With a GPU, copies land while everyone else goes on; the host keeps its copy; and nothing is
written that a step still reads.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
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
from simulated_gpu import SimulatedCopies, read_module

from adapters_store import LocalStore
from loraserve import faults
from loraserve.errors import AdapterTooLarge, AdapterUnservable, InvariantViolation
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.residency.device_cache import DeviceCache, Pin
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import HEAD_OF_LINE_GRACE_S, STALE_AFTER_S
from loraserve.memory.residency.pager import Pager
from loraserve.types import AdapterRef, Digest, Residency, Tier
from loraserve_kernels.gpu.paged.layout import FIRST_SLICE, FIRST_TILE
from loraserve_kernels.gpu.paged.pool import PagedPool

MakePager = Callable[..., Pager]


def first_tile(pool: PagedPool, slot: int) -> int:
    """Of q_proj, which is the first slice of the first site."""
    return int(pool.sites[slot, 0, FIRST_SLICE + FIRST_TILE])


def check_weights(pool: PagedPool, tile: int, *, rank: int, seed: int) -> None:
    """The memory holds what `publish` wrote."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        a, b, multipliers = read_module(pool, tile, layer, rank, 32, 32)
        assert torch.equal(a, torch.randn(rank, 32, generator=generator).bfloat16())
        assert torch.equal(b, torch.randn(32, rank, generator=generator).T.bfloat16())
        assert torch.equal(multipliers, torch.full((rank,), 2.0))


class OnGpu:
    """A pager over a small simulated GPU."""

    def __init__(self, make: Any, make_pager: MakePager, *, host_ranks: float = 100, **pool: int) -> None:
        self.pool = make.pool(**pool)
        self.copies = SimulatedCopies(self.pool)
        self.device = GpuDevice(make.base, self.pool, self.copies)
        self.pager = make_pager(device=self.device, host_ranks=host_ranks)


@pytest.fixture
def gpu(make: Any, make_pager: MakePager) -> OnGpu:
    return OnGpu(make, make_pager, num_pages=8)


def test_adapter_is_resident_once_copy_lands(make: Any, store: LocalStore, gpu: OnGpu) -> None:
    ref = make.publish(store, rank=3, seed=1)
    gpu.pager.request(ref)
    assert make.settle(gpu.pager) == []
    assert gpu.pager.request(ref) is Residency.LOADING
    row = gpu.pager.residency()[0]
    assert (row.tier, row.device_bytes) == (Tier.LOADING, 3 * make.page_bytes)
    assert row.host_bytes > 0
    assert gpu.pager.stats()["device_adapter_bytes"] == 3 * make.page_bytes
    with pytest.raises(InvariantViolation, match="isn't resident"):
        gpu.pager.pin(ref.digest)
    assert gpu.pager.poll() == []
    assert (gpu.pager.tier(ref.digest), gpu.pager.stats()["device_load_s"].num) == (Tier.HOST, 0)
    gpu.copies.run_all()
    assert gpu.pager.poll() == [ref.digest]
    assert gpu.pager.request(ref) is Residency.RESIDENT
    assert (gpu.pager.tier(ref.digest), gpu.pager.stats()["device_load_s"].num) == (Tier.DEVICE, 1)
    assert gpu.pager.residency()[0].tier is Tier.DEVICE
    slot = gpu.pager.handle(ref.digest)
    check_weights(gpu.pool, first_tile(gpu.pool, slot), rank=3, seed=1)


def test_resident_adapter_stays_usable_during_other_copy(make: Any, store: LocalStore, gpu: OnGpu) -> None:
    a, b = make.publish(store, rank=2, seed=1), make.publish(store, rank=2, seed=2)
    gpu.pager.request(a)
    make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    gpu.pager.request(b)
    make.settle(gpu.pager)
    assert gpu.pager.request(a) is Residency.RESIDENT
    gpu.pager.pin(a.digest).release()
    assert gpu.pager.request(b) is Residency.LOADING


def test_adapter_in_transit_keeps_device_memory(make: Any, store: LocalStore, gpu: OnGpu) -> None:
    a, b = make.publish(store, rank=6, seed=1), make.publish(store, rank=6, seed=2)
    gpu.pager.request(a)
    make.settle(gpu.pager)
    gpu.pager.request(b)
    make.settle(gpu.pager)
    assert gpu.pager.request(b) is Residency.WAITING_FOR_SPACE
    gpu.copies.run_all()
    # it has landed, and its requests have one chance to pin it
    assert gpu.pager.poll() == [a.digest]
    assert gpu.pager.request(b) is Residency.WAITING_FOR_SPACE
    assert gpu.pager.poll() == []
    assert a.digest not in gpu.pager._pool
    gpu.copies.run_all()
    assert gpu.pager.poll() == [b.digest]


def test_adapter_returns_from_host_copy_without_disk_read(make: Any, store: LocalStore, gpu: OnGpu) -> None:
    a, b = make.publish(store, rank=6, seed=1), make.publish(store, rank=6, seed=2)
    for ref in (a, b):
        gpu.pager.request(ref)
        make.settle(gpu.pager)
        gpu.copies.run_all()
        gpu.pager.poll()
        gpu.pager.poll()
    rows = {row.digest: row for row in gpu.pager.residency()}
    assert (rows[a.digest].tier, rows[a.digest].device_bytes) == (Tier.HOST, 0)
    assert rows[b.digest].tier is Tier.DEVICE
    assert rows[a.digest].host_bytes == rows[b.digest].host_bytes > 0
    assert gpu.pager.stats()["host_adapters"] == 2
    assert gpu.pager.request(a) is Residency.LOADING
    gpu.copies.run_all()
    assert gpu.pager.poll() == [a.digest]
    assert gpu.pager.stats()["adapter_loads"] == 2
    check_weights(gpu.pool, first_tile(gpu.pool, gpu.pager.handle(a.digest)), rank=6, seed=1)


def test_adapter_evicted_from_gpu_leaves_host_last(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    # three fit in the host, two on the GPU
    gpu = OnGpu(make, make_pager, host_ranks=10, num_pages=8)
    used, unused, third, fourth = (make.publish(store, rank=4, seed=seed) for seed in range(4))

    def bring(ref: AdapterRef) -> None:
        gpu.pager.request(ref)
        make.settle(gpu.pager)
        gpu.copies.run_all()
        gpu.pager.poll()
        gpu.pager.poll()

    bring(used)
    bring(unused)
    clock.advance(5.0)
    gpu.pager.request(used)
    clock.advance(2.0)
    bring(third)
    bring(fourth)
    rows = {row.digest: row for row in gpu.pager.residency()}
    assert unused.digest not in rows
    assert (rows[used.digest].tier, rows[used.digest].last_used_s) == (Tier.HOST, 2.0)


def test_adapter_in_transit_is_drained_after_landing(make: Any, store: LocalStore, gpu: OnGpu, clock: Any) -> None:
    running, large, small = (make.publish(store, rank=rank, seed=rank) for rank in (4, 8, 2))
    gpu.pager.request(running)
    make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    pin = gpu.pager.pin(running.digest)
    gpu.pager.request(large)
    gpu.pager.request(small)
    make.settle(gpu.pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    gpu.pager.poll()
    assert gpu.pager.request(small) is Residency.LOADING
    assert gpu.pager.request(running) is Residency.WAITING_FOR_SPACE
    gpu.copies.run_all()
    gpu.pager.poll()
    assert gpu.pager.request(small) is not Residency.RESIDENT
    pin.release()
    gpu.pager.poll()
    gpu.copies.run_all()
    assert gpu.pager.poll() == [large.digest]


def test_ended_drain_reports_no_adapter_in_transit_resident(
    make: Any, store: LocalStore, gpu: OnGpu, clock: Any
) -> None:
    running, large, small = (make.publish(store, rank=rank, seed=rank) for rank in (4, 8, 2))
    gpu.pager.request(running)
    make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    pin = gpu.pager.pin(running.digest)
    gpu.pager.request(large)
    gpu.pager.request(small)
    make.settle(gpu.pager)
    clock.advance(STALE_AFTER_S - 0.1)
    gpu.pager.poll()
    gpu.pager.request(small)
    clock.advance(0.2)
    assert gpu.pager.poll() == [large.digest]
    gpu.copies.run_all()
    assert gpu.pager.poll() == [small.digest]
    pin.release()


def test_ended_drain_leaves_no_adapter_held_in_host(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    gpu = OnGpu(make, make_pager, num_pages=4)
    busy, cold = make.publish(store, rank=4, seed=1), make.publish(store, rank=4, seed=2)
    gpu.pager.request(busy)
    make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    pin = gpu.pager.pin(busy.digest)
    gpu.pager.request(cold)
    make.settle(gpu.pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    gpu.pager.poll()
    assert gpu.pager.request(busy) is Residency.WAITING_FOR_SPACE
    clock.advance(STALE_AFTER_S)
    assert gpu.pager.request(busy) is Residency.WAITING_FOR_SPACE
    clock.advance(0.1)
    assert set(gpu.pager.poll()) == {cold.digest, busy.digest}
    assert gpu.pager.check() == []
    assert gpu.pager.request(busy) is Residency.RESIDENT
    pin.release()


def test_adapter_is_read_from_disk_without_host_memory(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    gpu = OnGpu(make, make_pager, host_ranks=0, num_pages=8)
    a, b = make.publish(store, rank=6, seed=1), make.publish(store, rank=6, seed=2)
    for ref in (a, b, a):
        gpu.pager.request(ref)
        make.settle(gpu.pager)
        gpu.copies.run_all()
        assert gpu.pager.poll() == [ref.digest]
        gpu.pager.poll()
    assert gpu.pager.stats()["adapter_loads"] == 3
    assert gpu.pager.stats()["host_adapters"] == 0


def test_copy_is_written_only_after_last_launched_step(make: Any, store: LocalStore, gpu: OnGpu) -> None:
    a, b = make.publish(store, rank=6, seed=1), make.publish(store, rank=6, seed=2)
    gpu.pager.request(a)
    make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    pin = gpu.pager.pin(a.digest)
    tile = first_tile(gpu.pool, gpu.pager.handle(a.digest))
    gpu.copies.launch(lambda: check_weights(gpu.pool, tile, rank=6, seed=1))
    gpu.device.step_launched()
    # the request has ended, and the step that was launched with it hasn't
    pin.release()
    gpu.pager.request(b)
    make.settle(gpu.pager)
    assert a.digest not in gpu.pager._pool
    assert not gpu.copies.run_copy()
    assert gpu.copies.run_step()
    assert gpu.copies.run_copy()
    assert gpu.pager.poll() == [b.digest]


def test_adapter_needing_too_many_tiles_is_refused(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    gpu = OnGpu(make, make_pager, max_tiles=1)
    ref = make.publish(store, rank=17)
    gpu.pager.request(ref)
    make.settle(gpu.pager)
    assert gpu.pager.request(ref) is Residency.FAILED
    error = gpu.pager.error(ref.digest)
    assert isinstance(error, AdapterTooLarge)
    assert "2 rank tiles; the tables for adapters have 1" in str(error)


def test_adapter_beyond_dtype_range_fails_by_name(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(dtype=torch.float16), make.publish(store, lora_alpha=8)
    path = store.root / ref.weights_blob[:2] / ref.weights_blob[2:4] / ref.weights_blob
    raw = bytearray(path.read_bytes())
    raw[-4:] = torch.tensor([1e6]).numpy().tobytes()
    with store.stage() as staged:
        staged.write(bytes(raw))
        blob = staged.commit()
    bad = AdapterRef(
        tenant=ref.tenant, name=ref.name, version=2, digest=Digest(blob), config_blob=ref.config_blob, weights_blob=blob
    )
    pager.request(bad)
    make.settle(pager)
    error = pager.error(bad.digest)
    assert type(error) is AdapterUnservable
    assert "q_proj.lora_" in str(error)
    assert "fp16" in str(error)


def test_a_drain_makes_room_where_tiles_are_scattered(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    gpu = OnGpu(make, make_pager, max_tiles=3)
    small = [make.publish(store, rank=1, seed=seed) for seed in range(3)]
    wide = make.publish(store, rank=17, seed=9)
    for ref in small:
        gpu.pager.request(ref)
        make.settle(gpu.pager)
    gpu.copies.run_all()
    gpu.pager.poll()
    middle = min(small, key=lambda ref: abs(first_tile(gpu.pool, gpu.pager.handle(ref.digest)) - 1))
    pins = [gpu.pager.pin(middle.digest)]
    gpu.pager.request(wide)
    make.settle(gpu.pager)
    num_steps = 0
    # requests for the one in the middle overlap without end
    while gpu.pager.request(wide) is not Residency.RESIDENT:
        num_steps += 1
        assert num_steps < 30
        clock.advance(0.2)
        gpu.copies.run_all()
        gpu.pager.poll()
        if gpu.pager.request(middle) is Residency.RESIDENT:
            pins.append(gpu.pager.pin(middle.digest))
        if pins:
            pins.pop(0).release()
        assert gpu.pager.check() == []
    assert num_steps * 0.2 > HEAD_OF_LINE_GRACE_S


def test_a_host_tensor_device_needs_no_streams(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pool = make.pool()
    pager = make_pager(device=GpuDevice(make.base, pool, DirectCopies()))
    ref = make.publish(store, rank=5, seed=4)
    pager.request(ref)
    assert make.settle(pager) == [ref.digest]
    assert pager.request(ref) is Residency.RESIDENT
    check_weights(pool, first_tile(pool, pager.handle(ref.digest)), rank=5, seed=4)


RANKS = (1, 2, 3, 4, 6, 17, 12)


def make_machine(make: Any, store: LocalStore, refs: list[AdapterRef]) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        """Eight pages, but for one adapter that takes more, and few tiles; steps and copies run in
        any order that the events allow.
        """

        @initialize(
            host_ranks=st.sampled_from([0, 3, 30]),
            num_pages=st.sampled_from([8, 24]),
            max_tiles=st.sampled_from([2, 3, 8]),
        )
        def start(self, host_ranks: int, num_pages: int, max_tiles: int) -> None:
            self.clock = make.Clock()
            self.gpu = make.pool(num_pages=num_pages, max_tiles=max_tiles, max_slots=5)
            self.copies = SimulatedCopies(self.gpu)
            self.device = GpuDevice(make.base, self.gpu, self.copies)
            self.pool = DeviceCache(self.device)
            self.pager = Pager(
                store, make.base, self.pool, HostCache(host_ranks * make.rank_bytes), 2, clock=self.clock
            )
            self.fitting = {i for i, rank in enumerate(RANKS) if rank <= num_pages and -(-rank // 16) <= max_tiles}
            self.pins: list[tuple[int, Pin]] = []
            self.gate = threading.Event()
            self.armed = faults.arm("pager.load", lambda: self.gate.wait(10) and None)
            self.armed.__enter__()

        @rule(index=st.integers(0, len(RANKS) - 1), pin=st.booleans())
        def request(self, index: int, pin: bool) -> None:
            state = self.pager.request(refs[index])
            if state is Residency.RESIDENT:
                assert index in self.fitting
                if pin:
                    self.pins.append((index, self.pager.pin(refs[index].digest)))
            elif state is Residency.FAILED:
                assert index not in self.fitting

        @precondition(lambda self: self.pins)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[1].release()

        @rule()
        def poll(self) -> None:
            self.pager.poll()

        @precondition(lambda self: self.pins)
        @rule()
        def launch(self) -> None:
            """A step of every pinned adapter; it may run long after their pins have gone."""
            reads = {
                index: first_tile(self.gpu, self.pager.handle(refs[index].digest))
                for index in {i for i, _ in self.pins}
            }

            def step() -> None:
                for index, tile in reads.items():
                    check_weights(self.gpu, tile, rank=RANKS[index], seed=index)

            self.copies.launch(step)
            self.device.step_launched()

        @rule(copies_first=st.booleans(), count=st.integers(1, 3))
        def the_device_goes_on(self, copies_first: bool, count: int) -> None:
            for _ in range(count):
                first, second = self.copies.run_copy, self.copies.run_step
                if not copies_first:
                    first, second = second, first
                if not first():
                    second()

        @rule()
        def loads_end(self) -> None:
            self.gate.set()
            make.settle(self.pager)
            self.gate.clear()

        @rule(seconds=st.sampled_from([0.3, 1.5, 6.0]))
        def time_passes(self, seconds: float) -> None:
            self.clock.advance(seconds)

        @rule(index=st.integers(0, len(RANKS) - 1), is_pinned=st.booleans())
        def operator_pins(self, index: int, is_pinned: bool) -> None:
            self.pager.set_operator_pin(refs[index], is_pinned)

        @invariant()
        def everything_adds_up(self) -> None:
            if not hasattr(self, "pager"):
                return
            assert self.pager.check() == []
            assert self.pool.num_pins == len(self.pins)
            pages = [page for in_slot, _ in self.gpu._loaded.values() for page in in_slot]
            assert len(pages) == len(set(pages))
            for index, pin in self.pins:
                assert self.pool.has_landed(pin.digest)
                assert pin.digest == refs[index].digest
            rows = {row.digest: row for row in self.pager.residency()}
            assert sum(row.device_bytes for row in rows.values()) == len(pages) * make.page_bytes
            for index, ref in enumerate(refs):
                if self.pool.has_landed(ref.digest):
                    assert rows[ref.digest].tier is Tier.DEVICE
                    tile = first_tile(self.gpu, self.pager.handle(ref.digest))
                    check_weights(self.gpu, tile, rank=RANKS[index], seed=index)
                elif ref.digest in self.pool:
                    assert rows[ref.digest].tier is Tier.LOADING

        def teardown(self) -> None:
            if not hasattr(self, "pager"):
                return
            self.gate.set()
            try:
                self.everyone_is_served()
            finally:
                self.pager.close()
                self.armed.__exit__(None, None, None)

        def everyone_is_served(self) -> None:
            """With pins that end, each adapter that fits gets its turn,
            one running request at a time.
            """
            for ref in refs:
                self.pager.set_operator_pin(ref, False)
            for _, pin in self.pins:
                pin.release()
            self.clock.advance(100.0)
            wanted, running = set(self.fitting), []
            for _ in range(200):
                make.settle(self.pager)
                self.copies.run_all()
                self.pager.poll()
                for index in sorted(wanted):
                    if self.pager.request(refs[index]) is Residency.RESIDENT:
                        running.append(self.pager.pin(refs[index].digest))
                        wanted.discard(index)
                if running:
                    running.pop(0).release()
                assert self.pager.check() == []
                if not wanted and not running:
                    break
                self.clock.advance(0.1)
            assert not wanted
            assert self.pool.num_pins == 0

    return Machine


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_random_operations_keep_memory_correct_and_requests_served(make: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        refs = [make.publish(store, rank=rank, seed=seed) for seed, rank in enumerate(RANKS)]
        run_state_machine_as_test(
            make_machine(make, store, refs),
            settings=settings(
                max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        store.close()
