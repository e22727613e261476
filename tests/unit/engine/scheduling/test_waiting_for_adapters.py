"""Requests without a resident adapter wait up to a deadline, delay no other,
and few overtake them.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from loraserve.engine.scheduling.blocked import MAX_PARKED_S, MAX_RETRIES
from loraserve.engine.scheduling.queue import SchedulingPass
from loraserve.engine.scheduling.waits import PREFETCH_DEPTH
from loraserve.errors import AdapterNotReady, error_from_code
from loraserve.limits import LIMITS
from loraserve.memory.residency.load_queue import STALE_AFTER_S
from loraserve.types import FinishReason, Residency, TokenOutput

from ..conftest import Harness, make_ref, make_request

DEADLINE_S = LIMITS.adapter_load_deadline_s


def errors(outputs: list[TokenOutput]) -> dict[str, str | None]:
    return {output.request_id: output.error_message for output in outputs if output.finish_reason is FinishReason.ERROR}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (Residency.LOADING, "still loading, or in the queue"),
        (Residency.WAITING_FOR_SPACE, "everything on the device is in use"),
    ],
)
def test_request_for_adapter_fails_at_deadline_with_reason(harness: Harness, state: Residency, why: str) -> None:
    harness.adapters.set("cold", state)
    request, other = make_request(adapter="cold"), make_request(max_tokens=100)
    harness.add(request, other)
    harness.step()
    harness.now = DEADLINE_S - 0.01
    assert errors(harness.step()[1]) == {}
    harness.now = DEADLINE_S
    _, outputs = harness.step()
    (message,) = errors(outputs).values()
    assert message is not None
    assert ("cold@1" in message, why in message, f"{DEADLINE_S:g} s" in message) == (True, True, True)
    assert {output.error_code for output in outputs} == {"adapter_not_ready", None}
    assert harness.scheduler.num_waiting == 0
    assert harness.scheduler.num_running == 1


def test_each_request_has_own_deadline(harness: Harness) -> None:
    early, late = make_request(adapter="cold"), make_request(adapter="cold")
    harness.add(early)
    harness.step()
    harness.now = 10.0
    harness.add(late)
    harness.step()
    harness.now = DEADLINE_S
    assert list(errors(harness.step()[1])) == [early.request_id]
    harness.now = DEADLINE_S + 10.0
    assert list(errors(harness.step()[1])) == [late.request_id]


def test_slot_wait_with_resident_adapter_is_not_overdue() -> None:
    harness = Harness(max_num_seqs=1)
    cold, running = make_request(adapter="cold"), make_request(max_tokens=20)
    harness.add(cold, running)
    harness.step()
    harness.adapters.set("cold", Residency.RESIDENT)
    harness.now = 2 * DEADLINE_S
    assert errors(harness.step()[1]) == {}
    assert cold.adapter_wait_s == 2 * DEADLINE_S
    assert errors(harness.run()) == {}
    assert cold.num_output_tokens == 3


def test_failed_adapter_fails_all_requests_in_step() -> None:
    harness = Harness()
    cold = [make_request(adapter="cold") for _ in range(50)]
    harness.add(*cold)
    harness.step()
    harness.adapters.set("cold", Residency.FAILED)
    assert len(errors(harness.step()[1])) == 50


def test_failed_adapter_without_free_slot_fails_at_deadline() -> None:
    harness = Harness(max_num_seqs=1)
    cold, running = make_request(adapter="cold"), make_request(max_tokens=50)
    harness.add(cold, running)
    harness.step()
    harness.adapters.set("cold", Residency.FAILED)
    harness.now = DEADLINE_S
    assert list(errors(harness.step()[1])) == [cold.request_id]


def test_refusal_reports_retry_time_across_processes() -> None:
    error = error_from_code("adapter_not_ready", "x")
    assert isinstance(error, AdapterNotReady)
    assert error.retry_after_s == AdapterNotReady.retry_after_s > 0


def test_adapters_of_requests_waiting_for_slot_are_prefetched() -> None:
    harness = Harness(max_num_seqs=1)
    harness.adapters.set("hot", Residency.RESIDENT)
    harness.add(make_request(adapter="hot", max_tokens=50), make_request(max_tokens=50))
    harness.step()
    assert harness.adapters.ahead == []
    harness.add(*[make_request(adapter=f"cold{number}") for number in range(PREFETCH_DEPTH + 5)])
    harness.adapters.asked.clear()
    harness.step()
    # the base's request is among the first, and needs none
    assert harness.adapters.ahead == [f"cold{number}" for number in range(PREFETCH_DEPTH - 1)]
    assert harness.adapters.asked == []


def test_cold_request_starts_next_once_adapter_arrives() -> None:
    harness = Harness(max_num_seqs=2)
    harness.adapters.set("hot", Residency.RESIDENT)
    cold = make_request(adapter="cold")
    harness.add(cold)
    num_passed = 0
    for step in range(40):
        harness.add(make_request(adapter="hot", max_tokens=2))
        if step == 20:
            harness.adapters.set("cold", Residency.RESIDENT)
        begun = [entry.request for entry in harness.step()[0] if entry.start == 0]
        num_passed += len(begun) if step < 20 else 0
        if begun and step >= 20:
            assert cold in begun
            break
    assert num_passed > 10
    assert cold.first_scheduled_s is not None


# blocked requests cost a step nothing


def num_visited(monkeypatch: pytest.MonkeyPatch, num_requests: int, num_adapters: int, *, is_paused: bool) -> int:
    """Count visited waiting requests and questions to the pager,
    in ten steps beside a running request.
    """
    harness = Harness(num_blocks=4096, max_num_seqs=4)
    harness.add(make_request(max_tokens=100))
    harness.step()
    harness.add(*[make_request(adapter=f"cold{number % num_adapters}") for number in range(num_requests)])
    harness.adapters.is_admission_paused = is_paused
    harness.step()
    harness.adapters.asked.clear()
    candidates: list[object] = []
    turns = SchedulingPass.__iter__

    def counted(self: SchedulingPass) -> object:
        for candidate in turns(self):
            candidates.append(candidate)
            yield candidate

    monkeypatch.setattr(SchedulingPass, "__iter__", counted)
    for _ in range(10):
        harness.now += 0.01
        assert len(harness.step()[0]) == 1
        assert harness.scheduler.check() == []
    monkeypatch.undo()
    return len(candidates) + len(harness.adapters.asked)


@pytest.mark.parametrize("is_paused", [False, True])
def test_step_visits_bounded_requests_however_many_are_blocked(
    monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    few = num_visited(monkeypatch, 10, 5, is_paused=is_paused)
    assert few <= 10
    assert num_visited(monkeypatch, 800, 5, is_paused=is_paused) == few
    assert num_visited(monkeypatch, 800, 200, is_paused=is_paused) == few


def test_new_request_for_absent_adapter_queries_pager_once(harness: Harness) -> None:
    harness.add(*[make_request(adapter="cold") for _ in range(50)])
    harness.step()
    # and once for the one that has waited longest
    assert harness.adapters.asked == ["cold", "cold"]
    harness.adapters.asked.clear()
    harness.add(make_request(adapter="cold"))
    harness.step()
    assert harness.adapters.asked == ["cold", "cold"]
    assert harness.scheduler.num_waiting_for_adapter == 51


def test_absent_adapters_are_renewed_before_pager_forgets(harness: Harness) -> None:
    names = [f"cold{number}" for number in range(4 * MAX_RETRIES)]
    harness.add(make_request(max_tokens=200), *[make_request(adapter=name) for name in names])
    asked_s = dict.fromkeys(names, 0.0)
    for step_s in [0.01] * 50 + [0.6] * 20:
        harness.now += step_s
        harness.adapters.asked.clear()
        harness.step()
        asked_s |= dict.fromkeys(harness.adapters.asked, harness.now)
        assert harness.now - min(asked_s.values()) <= MAX_PARKED_S + 0.6 < STALE_AFTER_S


def test_arrived_adapter_is_used_in_next_step(harness: Harness) -> None:
    requests = [make_request(adapter=name, max_tokens=1) for name in ("first", "second", "first")]
    harness.add(*requests)
    for _ in range(3):
        harness.step()
    harness.adapters.set("first", Residency.RESIDENT)
    assert [entry.request for entry in harness.step()[0]] == [requests[0], requests[2]]


def test_requests_blocked_by_paused_admission_start_on_resume(harness: Harness) -> None:
    harness.adapters.is_admission_paused = True
    requests = [make_request(max_tokens=1) for _ in range(3)]
    harness.add(*requests)
    assert [harness.step()[0] for _ in range(3)] == [[], [], []]
    harness.adapters.is_admission_paused = False
    assert [entry.request for entry in harness.step()[0]] == requests


def test_parked_flow_advances_to_counter_of_served_flow() -> None:
    harness = Harness(num_blocks=4096, max_num_seqs=1)
    harness.adapters.set("hot", Residency.RESIDENT)
    cold = [make_request(8, adapter=f"cold{number % 3}") for number in range(6)]
    harness.add(*cold, *[make_request(8, adapter="hot", max_tokens=1) for _ in range(30)])
    for _ in range(30):
        scheduled, _ = harness.step()
        before = harness.flow(scheduled[0].request).virtual_counter - 8 - 2
        assert [harness.flow(request).virtual_counter for request in cold] == [before] * 6
        assert harness.scheduler.check() == []


def test_random_arrivals_leave_no_flow_parked_for_good() -> None:
    rng = random.Random(0)
    num_served: Counter[bool] = Counter()
    for _ in range(20):
        harness = Harness(num_blocks=64, max_num_seqs=rng.randint(1, 6))
        names = [f"a{number}" for number in range(6)]
        for _ in range(120):
            harness.now += rng.choice([0.0, 0.1])
            harness.add(
                *[
                    make_request(
                        adapter=rng.choice([None, *names]),
                        tenant=rng.choice("xy"),
                        priority=rng.choice([0, 0, 1]),
                        max_tokens=rng.randint(1, 4),
                    )
                    for _ in range(rng.randint(0, 2))
                ]
            )
            harness.adapters.set(rng.choice(names), rng.choice([Residency.RESIDENT, Residency.LOADING]))
            harness.adapters.is_admission_paused ^= rng.random() < 0.1
            num_served[bool(harness.step()[0])] += 1
            assert harness.scheduler.check() == []
        harness.adapters.is_admission_paused = False
        for name in names:
            harness.adapters.states[make_ref(name).digest] = Residency.RESIDENT
        harness.run()
        assert harness.kv.num_held == 0
    assert min(num_served[True], num_served[False]) > 50
