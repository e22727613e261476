"""Who waits for the device: in turn, with patience, and as long as somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraserve.memory.residency.load_queue import HEAD_OF_LINE_GRACE_S, STALE_AFTER_S, LoadQueue
from loraserve.types import Digest, TenantId

A, B, C = Digest("a"), Digest("b"), Digest("c")


@pytest.fixture
def line() -> Iterator[LoadQueue]:
    made = LoadQueue()
    yield made
    assert made.check() == []


def always(_: Digest) -> bool:
    return True


def digests(line: LoadQueue) -> list[Digest]:
    return [wait.ref.digest for wait in line]


def serve(line: LoadQueue, fits: set[Digest], now_s: float, **answers: Callable[[Digest], bool]) -> list[Digest]:
    """Who got a place, where those in `fits` have room."""
    placed = []

    def place(digest: Digest) -> bool:
        if digest not in fits:
            return False
        line.leave_placed(digest)
        placed.append(digest)
        return True

    line.serve(answers.get("is_ready", always), place, answers.get("can_ever_place", always), now_s)
    return placed


def test_an_adapter_waits_once_for_all_who_ask_for_it(make: Any, line: LoadQueue) -> None:
    first = line.join(make.ref(A, "x"), 1.0)
    again = line.join(make.ref(A, "y"), 2.0)
    assert first is again
    assert (first.since_s, first.asked_s, first.tenants) == (1.0, 2.0, {"x", "y"})
    assert (len(line), A in line) == (1, True)
    line.leave(A)
    assert (len(line), A in line) == (0, False)
    line.leave(A)


def test_those_that_nobody_has_asked_for_in_a_while_are_told_and_stay_until_they_leave(
    make: Any, line: LoadQueue
) -> None:
    line.join(make.ref(A), 0.0)
    line.join(make.ref(B), 0.0)
    line.join(make.ref(B), 1.0)
    assert line.stale(STALE_AFTER_S) == []
    assert line.stale(STALE_AFTER_S + 0.1) == [A]
    assert digests(line) == [A, B]


def test_whoever_fits_passes_the_first_until_its_patience_is_over(make: Any, line: LoadQueue) -> None:
    for name in (A, B, C):
        line.join(make.ref(name), 0.0)
    assert serve(line, {B}, HEAD_OF_LINE_GRACE_S) == [B]
    assert line.reserved_for is None
    assert serve(line, {C}, HEAD_OF_LINE_GRACE_S + 0.1) == []
    assert line.reserved_for == A
    assert serve(line, {A, C}, HEAD_OF_LINE_GRACE_S + 0.2) == [A, C]
    assert line.reserved_for is None


def test_the_line_opens_again_once_whom_it_was_closed_for_has_left(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A), 0.0)
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1)
    assert line.reserved_for == A
    line.leave(A)
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.2)
    assert line.reserved_for is None


def test_whom_the_line_is_closed_for_stays_its_first_whosever_turn_it_is(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A, "x"), 0.0)
    line.join(make.ref(C, "x"), 0.0)
    assert serve(line, {A}, 0.0) == [A], "x has had its turn"
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1)
    assert line.reserved_for == C
    line.join(make.ref(B, "y"), HEAD_OF_LINE_GRACE_S + 0.1)
    assert serve(line, {B, C}, HEAD_OF_LINE_GRACE_S + 0.2) == [C, B]


def test_nobody_is_held_up_for_one_that_no_waiting_gets_a_place(make: Any, line: LoadQueue) -> None:
    for name in (A, B, C):
        line.join(make.ref(name), 0.0)
    assert serve(line, {C}, HEAD_OF_LINE_GRACE_S, can_ever_place=lambda digest: digest != A) == [C]
    # the first whom waiting helps is the one with patience
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1, can_ever_place=lambda digest: digest != A)
    assert line.reserved_for == B


def test_one_that_is_not_ready_neither_gets_a_place_nor_closes_the_line(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A), 0.0)
    line.join(make.ref(B), 0.0)
    assert serve(line, {A, B}, HEAD_OF_LINE_GRACE_S + 0.1, is_ready=lambda digest: digest != A) == [B]
    assert line.reserved_for is None
    assert digests(line) == [A]


def test_tenants_have_turns_at_places(make: Any, line: LoadQueue) -> None:
    for name in ("x1", "x2", "x3"):
        line.join(make.ref(name, "x"), 0.0)
    line.join(make.ref("y1", "y"), 0.0)
    assert serve(line, {Digest("x1")}, 0.0) == ["x1"]
    assert serve(line, {Digest(name) for name in ("x2", "x3", "y1")}, 0.0) == ["y1", "x2", "x3"]


def test_tenants_have_turns_at_the_loaders_those_with_fewer_loads_first(make: Any, line: LoadQueue) -> None:
    x1, x2 = (line.join(make.ref(name, "x"), 0.0) for name in ("x1", "x2"))
    y1 = line.join(make.ref("y1", "y"), 0.0)
    assert line.next_to_load([x1, x2, y1], Counter()) is x1
    line.note_load(x1)
    assert line.next_to_load([x2, y1], Counter()) is y1
    assert line.next_to_load([x2, y1], Counter({TenantId("y"): 1})) is x2


def test_an_adapter_that_waits_for_nobody_is_found_by_check(make: Any) -> None:
    line = LoadQueue()
    line.join(make.ref(A), 0.0).tenants.clear()
    assert line.check() == [
        "load queue: an adapter is queued for no tenant",
        "load queue: tenants are listed that wait for no adapter",
    ]
