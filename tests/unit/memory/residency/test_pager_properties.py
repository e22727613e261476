"""Whatever happens in whatever order: budgets hold, pins hold, weights are right, and everyone who
waits is served in the end.
"""

from __future__ import annotations

import tempfile
import threading
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

from adapters_store import LocalStore
from loraserve import faults
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.residency.device_cache import DeviceCache, Pin
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.types import AdapterRef, Residency

RANKS = (1, 2, 3, 4, 6, 12)
DEVICE_RANKS = 8


def make_machine(make: Any, store: LocalStore, refs: list[AdapterRef]) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        """Adapters of several sizes, the last too large for the device; requests, pins,
        releases, damage, time.
        """

        @initialize(host_ranks=st.sampled_from([0, 5, 30]), num_threads=st.integers(1, 3))
        def start(self, host_ranks: int, num_threads: int) -> None:
            self.clock = make.Clock()
            self.pool = DeviceCache(CpuDevice(make.base, DEVICE_RANKS * make.rank_bytes))
            host = HostCache(host_ranks * make.rank_bytes)
            self.pager = Pager(store, make.base, self.pool, host, num_threads, clock=self.clock)
            self.pins: list[Pin] = []
            self.operator_pins: set[int] = set()
            self.damaged: dict[int, bytes] = {}
            # Loads end when the machine says so, or else a thread's speed would decide what an
            # example does.
            self.gate = threading.Event()
            self.armed = faults.arm("pager.load", lambda: self.gate.wait(10) and None)
            self.armed.__enter__()

        @rule(index=st.integers(0, 5), pin=st.booleans())
        def request(self, index: int, pin: bool) -> None:
            ref = refs[index]
            state = self.pager.request(ref)
            if state is Residency.RESIDENT:
                assert RANKS[index] <= DEVICE_RANKS
                packed = self.pager.handle(ref.digest)
                generator = torch.Generator().manual_seed(index)
                assert torch.equal(packed.lora_a(0, "q_proj"), torch.randn(RANKS[index], 32, generator=generator))
                if pin:
                    self.pins.append(self.pager.pin(ref.digest))
            elif state is Residency.FAILED:
                assert self.pager.error(ref.digest) is not None

        @precondition(lambda self: self.pins)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).release()

        @rule()
        def poll(self) -> None:
            self.pager.poll()

        @rule()
        def loads_end(self) -> None:
            self.gate.set()
            make.settle(self.pager)
            self.gate.clear()

        @rule(seconds=st.sampled_from([0.3, 1.5, 6.0, 100.0]))
        def time_passes(self, seconds: float) -> None:
            self.clock.advance(seconds)

        @rule(index=st.integers(0, 4), is_pinned=st.booleans())
        def operator_pins(self, index: int, is_pinned: bool) -> None:
            self.pager.set_operator_pin(refs[index], is_pinned)
            (self.operator_pins.add if is_pinned else self.operator_pins.discard)(index)

        @rule(index=st.integers(0, 4))
        def bytes_are_damaged_or_restored(self, index: int) -> None:
            if index in self.damaged:
                make.restore(store, self.damaged.pop(index))
            else:
                self.damaged[index] = make.damage(store, refs[index].weights_blob)

        @invariant()
        def everything_adds_up(self) -> None:
            if not hasattr(self, "pager"):
                return
            assert self.pager.check() == []
            assert self.pool.num_pins == len(self.pins)
            assert all(pin.digest in self.pool for pin in self.pins)

        def teardown(self) -> None:
            if not hasattr(self, "pager"):
                return
            self.gate.set()
            try:
                self.everyone_is_served()
            finally:
                for data in self.damaged.values():
                    make.restore(store, data)
                self.pager.close()
                self.armed.__exit__(None, None, None)

        def everyone_is_served(self) -> None:
            """With sound bytes and pins that end, each adapter that fits gets its turn,
            one running request at a time.
            """
            for data in self.damaged.values():
                make.restore(store, data)
            self.damaged.clear()
            for index in self.operator_pins:
                self.pager.set_operator_pin(refs[index], False)
            for pin in self.pins:
                pin.release()
            self.clock.advance(100.0)
            wanted = {index for index, rank in enumerate(RANKS) if rank <= DEVICE_RANKS}
            running: list[Pin] = []
            for _ in range(200):
                make.settle(self.pager)
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
def test_random_operations_keep_invariants_and_serve_requests(make: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        refs = [make.publish(store, rank=rank, seed=seed) for seed, rank in enumerate(RANKS)]
        run_state_machine_as_test(
            make_machine(make, store, refs),
            settings=settings(
                max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        store.close()
