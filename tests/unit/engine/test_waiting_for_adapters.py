"""Requests whose adapter isn't there: they wait up to a deadline, hold up nobody, and are passed by few."""

from __future__ import annotations

import pytest

from loraserve.engine.scheduler import LOOK_AHEAD
from loraserve.errors import AdapterNotReady, error_from_code
from loraserve.limits import LIMITS
from loraserve.memory.pager import Residency
from loraserve.types import FinishReason, TokenOutput

from .conftest import Harness, make_request

DEADLINE_S = LIMITS.adapter_load_deadline_s


def errors(outputs: list[TokenOutput]) -> dict[str, str | None]:
    return {output.request_id: output.error_message for output in outputs if output.finish_reason is FinishReason.ERROR}


@pytest.mark.parametrize(
    ("state", "why"),
    [(Residency.LOADING, "still being read"), (Residency.WAITING_FOR_SPACE, "everything on the device is in use")],
)
def test_a_request_waits_for_its_adapter_up_to_the_deadline_and_is_told_what_for(
    harness: Harness, state: Residency, why: str
) -> None:
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


def test_the_deadline_of_one_is_not_that_of_those_who_came_later(harness: Harness) -> None:
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


def test_who_waits_for_a_place_in_a_step_with_its_adapter_there_is_not_overdue() -> None:
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


def test_a_request_whose_adapter_failed_while_no_place_was_free_is_told_at_its_deadline() -> None:
    harness = Harness(max_num_seqs=1)
    cold, running = make_request(adapter="cold"), make_request(max_tokens=50)
    harness.add(cold, running)
    harness.step()
    harness.adapters.set("cold", Residency.FAILED)
    harness.now = DEADLINE_S
    assert list(errors(harness.step()[1])) == [cold.request_id]


def test_the_refusal_says_when_to_come_back_also_from_another_process() -> None:
    error = error_from_code("adapter_not_ready", "x")
    assert isinstance(error, AdapterNotReady)
    assert error.retry_after_s == AdapterNotReady.retry_after_s > 0


def test_adapters_of_requests_that_wait_for_a_place_in_a_step_are_looked_for_ahead() -> None:
    harness = Harness(max_num_seqs=1)
    harness.adapters.set("hot", Residency.RESIDENT)
    harness.add(make_request(adapter="hot", max_tokens=50), make_request(max_tokens=50))
    harness.step()
    assert harness.adapters.ahead == []
    harness.add(*[make_request(adapter=f"cold{number}") for number in range(LOOK_AHEAD + 5)])
    harness.adapters.asked.clear()
    harness.step()
    # the base's request is among the first, and needs none
    assert harness.adapters.ahead == [f"cold{number}" for number in range(LOOK_AHEAD - 1)]
    assert harness.adapters.asked == []


def test_the_next_sequence_to_begin_is_the_cold_ones_once_its_adapter_is_there() -> None:
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
