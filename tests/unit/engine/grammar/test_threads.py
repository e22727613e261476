"""Threads of masks: lanes that don't wait for each other, and waits that end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
from core_clock import scheduled_s

from loraserve.engine.grammar import threads as threads_module
from loraserve.engine.grammar.threads import Lane, MaskThreads

from .conftest import Gate


@dataclass
class FakeMask:
    is_ready: bool = False
    mask_s: float = 0.001
    is_late: bool = False

    def note_late(self) -> None:
        self.is_late = True


def make_ready(mask: FakeMask, after: Gate | None = None):
    def job() -> None:
        if after is not None:
            after()
        mask.is_ready = True

    return job


def test_a_wait_ends_with_the_last_mask(threads: MaskThreads) -> None:
    gate, masks = Gate(), [FakeMask(), FakeMask()]
    threads.submit(make_ready(masks[0]), Lane.FAST)
    threads.submit(make_ready(masks[1], gate), Lane.FAST)
    gate.until_begun()
    threading.Timer(0.05, gate.open).start()
    threads.wait(masks, 10)
    assert all(mask.is_ready and not mask.is_late for mask in masks)
    assert threads.num_late == 0
    assert threads.mask_s.histogram.num == 2


def test_wait_ends_without_late_mask(threads: MaskThreads) -> None:
    gate, slow, fast = Gate(), FakeMask(), FakeMask()
    threads.submit(make_ready(slow, gate), Lane.FAST)
    threads.submit(make_ready(fast), Lane.FAST)
    started = scheduled_s()
    threads.wait([slow, fast], 0.05)
    assert scheduled_s() - started < 5
    assert slow.is_late
    assert not fast.is_late
    assert threads.num_late == 1
    assert threads.wait_s.histogram.num == 1
    gate.open()


@pytest.mark.parametrize("lane", [Lane.SLOW, Lane.COMPILE])
def test_long_jobs_delay_no_short_jobs(threads: MaskThreads, lane: Lane) -> None:
    gate = Gate()
    for _ in range(3):
        threads.submit(gate, lane)
    gate.until_begun()
    for other in set(Lane) - {lane}:
        mask = FakeMask()
        threads.submit(make_ready(mask), other)
        threads.wait([mask], 10)
        assert mask.is_ready
    gate.open()


@pytest.mark.parametrize("lane", [Lane.SLOW, Lane.COMPILE])
def test_long_jobs_delay_foreign_tenant_by_single_job(threads: MaskThreads, lane: Lane) -> None:
    gate, done = Gate(), list[str]()
    for _ in range(2):
        threads.submit(gate, lane, "greedy")
    gate.until_begun()
    for number in range(20):
        threads.submit(lambda name=f"greedy {number}": done.append(name), lane, "greedy")  # type: ignore[misc]
    mask = FakeMask()
    threads.submit(lambda: done.append("other"), lane, "other")
    threads.submit(make_ready(mask), lane, "last")
    gate.open()
    threads.wait([mask], 10)
    threads.close()
    assert done.index("other") <= 3
    assert len(done) == 21


def test_failing_job_ends_no_thread(threads: MaskThreads, caplog) -> None:
    for _ in range(4):
        threads.submit(lambda: 1 // 0, Lane.FAST)
    mask = FakeMask()
    threads.submit(make_ready(mask), Lane.FAST)
    threads.wait([mask], 10)
    assert mask.is_ready
    assert "ZeroDivisionError" in caplog.text


def test_closing_waits_for_the_jobs() -> None:
    threads, masks = MaskThreads(1), [FakeMask() for _ in range(20)]
    for mask in masks:
        threads.submit(make_ready(mask), Lane.FAST)
    threads.close()
    assert all(mask.is_ready for mask in masks)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mask-")]


@dataclass
class FakeGathered(FakeMask):
    gate: Gate | None = None
    together: int = 0
    is_easy: bool = False
    is_gathered: bool = False

    def follow_at_once(self) -> bool:
        self.is_ready |= self.is_easy
        return self.is_easy

    def follow_together(self, masks: list[FakeGathered]) -> None:
        if self.gate is not None:
            self.gate()
        for mask in masks:
            mask.is_ready, mask.together = True, len(masks)


@pytest.fixture
def between_steps():
    made = MaskThreads(2, are_beside_steps=False)
    yield made
    made.close()


def test_masks_are_grouped_by_tenant_after_pass(between_steps: MaskThreads) -> None:
    masks = [FakeGathered() for _ in range(5)]
    assert all(between_steps.gather(mask, tenant) for mask, tenant in zip(masks, "ababa", strict=True))
    time.sleep(0.05)
    assert not any(mask.is_ready for mask in masks)
    between_steps.wait(masks, 10)
    assert [mask.together for mask in masks] == [3, 2, 3, 2, 3]
    assert between_steps.num_late == 0


def test_gathered_masks_delay_no_foreign_tenant(between_steps: MaskThreads) -> None:
    slow, fast = FakeGathered(gate=Gate()), FakeGathered()
    between_steps.gather(slow, "a")
    between_steps.gather(fast, "b")
    between_steps.wait([slow, fast], 0.5)
    assert slow.is_late
    assert fast.is_ready
    assert not fast.is_late
    slow.gate.open()


def test_unneeded_masks_are_skipped(between_steps: MaskThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "MAX_AT_ONCE", 4)
    masks = [FakeGathered(is_easy=number % 2 == 0) for number in range(8)]
    for mask in masks:
        between_steps.gather(mask, "a")
    between_steps.wait(masks, 10)
    # the first four are asked
    assert [mask.together for mask in masks] == [0, 6, 0, 6, 6, 6, 6, 6]
    assert all(mask.is_ready for mask in masks)


def test_gathering_stops_during_steps(threads: MaskThreads) -> None:
    assert not threads.gather(FakeGathered(), "a")
