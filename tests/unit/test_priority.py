"""Threads that stand back, as far as they can."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from loraserve.priority import BACKGROUND, LOADER, stand_back

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_who_has_idle_time_alone_gives_way_at_once() -> None:
    def run() -> tuple[int, int]:
        stand_back(BACKGROUND, is_idle=True)
        return os.sched_getscheduler(threading.get_native_id()), niceness()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result() == (os.SCHED_IDLE, BACKGROUND)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@linux
def test_who_is_as_nice_as_can_be_stays_so() -> None:
    def run() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 18)
        stand_back(LOADER)
        return niceness()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result() == 19


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with ThreadPoolExecutor(1, initializer=stand_back, initargs=(BACKGROUND,)) as executor:
        assert executor.submit(niceness).result() == niceness()
