"""What the engine tells operators of requests that wait for adapters,
and of steps that wait for the pager.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from loraserve.memory.arena import Owner
from loraserve.types import Residency

from .conftest import Harness, as_probe, make_ref, make_request
from .simulated import Simulation


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(overlap=False)


def test_lookups_are_counted_by_where_the_adapter_was(simulation: Simulation) -> None:
    simulation.pager.states[make_ref("here").digest] = Residency.RESIDENT
    simulation.add("a", [1, 2, 3], "here")
    simulation.add("b", [1, 2, 3], "far")
    simulation.add("c", [1, 2, 3], "far")
    simulation.add("base", [1, 2, 3])
    stats = simulation.engine.stats()
    assert (stats.adapter_lookups_device, stats.adapter_lookups_host, stats.adapter_lookups_disk) == (1, 0, 2)
    simulation.run()
    stats = simulation.engine.stats()
    # asking again while waiting is no other request
    assert stats.adapter_lookups_device + stats.adapter_lookups_host + stats.adapter_lookups_disk == 3


def waits(harness: Harness) -> tuple[int, float]:
    histogram = harness.scheduler.adapter_wait_s.histogram
    return histogram.num, histogram.sum_s


def test_wait_is_counted_once_with_duration(harness: Harness) -> None:
    harness.add(make_request(adapter="slow"))
    harness.schedule()
    assert waits(harness) == (0, 0.0)
    harness.now = 3.0
    harness.adapters.set("slow", Residency.RESIDENT)
    harness.run()
    assert waits(harness) == (1, 3.0)


def test_resident_adapter_counts_zero_wait(harness: Harness) -> None:
    harness.adapters.set("here", Residency.RESIDENT)
    harness.add(make_request(adapter="here"), make_request())
    harness.run()
    assert waits(harness) == (1, 0.0)


@pytest.mark.parametrize("ending", ["fails", "leaves"])
def test_wait_ended_without_adapter_is_counted(harness: Harness, ending: str) -> None:
    request = make_request(adapter="never")
    harness.add(request)
    harness.schedule()
    harness.now = 7.0
    if ending == "fails":
        harness.adapters.set("never", Residency.FAILED)
        harness.schedule()
    else:
        harness.scheduler.abort(request.request_id)
    assert waits(harness) == (1, 7.0)


def test_wait_ended_before_free_slot_is_counted() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(make_request(max_tokens=50))
    harness.schedule()
    request = make_request(adapter="slow", priority=-1)
    harness.add(request)
    harness.scheduler._waits.begin(request, make_ref("slow").digest)
    harness.now = 2.0
    harness.adapters.set("slow", Residency.RESIDENT)
    harness.scheduler._waits.end(request)
    harness.now = 9.0
    harness.scheduler.abort(request.request_id)
    assert waits(harness) == (1, 2.0)


def test_waits_of_probes_are_not_counted(harness: Harness) -> None:
    harness.adapters.set("here", Residency.RESIDENT)
    probe, gone = as_probe(make_request(adapter="here")), as_probe(make_request(adapter="never"))
    harness.add(probe, gone)
    harness.schedule()
    harness.now = 4.0
    for request in (probe, gone):
        harness.scheduler.abort(request.request_id)
    assert waits(harness) == (0, 0.0)


def test_a_preempted_request_waited_once() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    harness.adapters.set("here", Residency.RESIDENT)
    harness.add(*(make_request(6, adapter="here", max_tokens=8) for _ in range(2)))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert waits(harness)[0] == 2


def slow_polls(simulation: Simulation, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    def poll(real: Any = simulation.pager.poll) -> Any:
        with simulation.pager.stopwatch:
            time.sleep(seconds)
        return real()

    monkeypatch.setattr(simulation.pager, "poll", poll)


def test_pager_time_within_step_is_measured(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_polls(simulation, monkeypatch, 0.003)
    simulation.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
    simulation.run()
    stats = simulation.engine.stats()
    assert stats.step_adapter_s.num == stats.num_steps == 4
    assert stats.step_adapter_s.sum_s >= 4 * 0.003


def test_pager_work_without_requests_delays_no_step(simulation: Simulation) -> None:
    with simulation.pager.stopwatch:
        time.sleep(0.05)
    simulation.add("a", [1, 2, 3])
    simulation.run()
    assert simulation.engine.stats().step_adapter_s.sum_s < 0.05


def test_pager_work_between_steps_delays_next_step(simulation: Simulation) -> None:
    simulation.add("a", [1, 2, 3], max_tokens=3, ignore_eos=True)
    simulation.step()
    with simulation.pager.stopwatch:
        time.sleep(0.01)
    simulation.step()
    assert simulation.engine.stats().step_adapter_s.sum_s >= 0.01
    simulation.run()


def test_evicted_kv_blocks_are_counted_by_cause(simulation: Simulation) -> None:
    for number in range(12):
        simulation.add(f"r{number}", [100 * number + i for i in range(30)], max_tokens=1)
        simulation.run()
    kv = simulation.engine._kv
    before = simulation.engine.stats()
    assert before.kv_evictions > 0
    assert before.kv_evictions_for_adapters == 0
    kv.num_evictions_for[Owner.ADAPTERS] += 2
    stats = simulation.engine.stats()
    assert (stats.kv_evictions - before.kv_evictions, stats.kv_evictions_for_adapters) == (2, 2)
