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


def test_adapter_waits_once_for_all_tenants(make: Any, line: LoadQueue) -> None:
    first = line.join(make.ref(A, "x"), 1.0)
    again = line.join(make.ref(A, "y"), 2.0)
    assert first is again
    assert (first.since_s, first.asked_s, first.tenants) == (1.0, 2.0, {"x", "y"})
    assert (len(line), A in line) == (1, True)
    line.leave(A)
    assert (len(line), A in line) == (0, False)
    line.leave(A)


def test_stale_adapters_are_reported_and_stay_queued(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A), 0.0)
    line.join(make.ref(B), 0.0)
    line.join(make.ref(B), 1.0)
    assert line.stale(STALE_AFTER_S) == []
    assert line.stale(STALE_AFTER_S + 0.1) == [A]
    assert digests(line) == [A, B]


def test_fitting_adapter_passes_head_until_grace_ends(make: Any, line: LoadQueue) -> None:
    for name in (A, B, C):
        line.join(make.ref(name), 0.0)
    assert serve(line, {B}, HEAD_OF_LINE_GRACE_S) == [B]
    assert line.reserved_for is None
    assert serve(line, {C}, HEAD_OF_LINE_GRACE_S + 0.1) == []
    assert line.reserved_for == A
    assert serve(line, {A, C}, HEAD_OF_LINE_GRACE_S + 0.2) == [A, C]
    assert line.reserved_for is None


def test_queue_reopens_once_reserved_adapter_leaves(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A), 0.0)
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1)
    assert line.reserved_for == A
    line.leave(A)
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.2)
    assert line.reserved_for is None


def test_reserved_adapter_stays_first_despite_tenant_rotation(make: Any, line: LoadQueue) -> None:
    line.join(make.ref(A, "x"), 0.0)
    line.join(make.ref(C, "x"), 0.0)
    assert serve(line, {A}, 0.0) == [A], "x has had its turn"
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1)
    assert line.reserved_for == C
    line.join(make.ref(B, "y"), HEAD_OF_LINE_GRACE_S + 0.1)
    assert serve(line, {B, C}, HEAD_OF_LINE_GRACE_S + 0.2) == [C, B]


def test_never_fitting_adapter_holds_up_no_queue(make: Any, line: LoadQueue) -> None:
    for name in (A, B, C):
        line.join(make.ref(name), 0.0)
    assert serve(line, {C}, HEAD_OF_LINE_GRACE_S, can_ever_place=lambda digest: digest != A) == [C]
    # the first whom waiting helps is the one with patience
    serve(line, set(), HEAD_OF_LINE_GRACE_S + 0.1, can_ever_place=lambda digest: digest != A)
    assert line.reserved_for == B


def test_unready_adapter_neither_loads_nor_reserves_queue(make: Any, line: LoadQueue) -> None:
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


def test_loaders_alternate_tenants_with_fewest_loads_first(make: Any, line: LoadQueue) -> None:
    x1, x2 = (line.join(make.ref(name, "x"), 0.0) for name in ("x1", "x2"))
    y1 = line.join(make.ref("y1", "y"), 0.0)
    assert line.next_to_load([x1, x2, y1], Counter()) is x1
    line.note_load(x1)
    assert line.next_to_load([x2, y1], Counter()) is y1
    assert line.next_to_load([x2, y1], Counter({TenantId("y"): 1})) is x2


def test_check_finds_queued_adapter_without_tenant(make: Any) -> None:
    line = LoadQueue()
    line.join(make.ref(A), 0.0).tenants.clear()
    assert line.check() == [
        "load queue: an adapter is queued for no tenant",
        "load queue: tenants are listed that wait for no adapter",
    ]
