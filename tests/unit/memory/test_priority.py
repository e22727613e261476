"""Loaders come after the steps, and don't stand still."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve import faults
from loraserve.memory.pager import Pager
from loraserve.priority import BACKGROUND, LOADER, stand_back

MakePager = Callable[..., Pager]

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_loaders_are_nicer_than_the_steps_thread(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, before = make_pager(num_threads=1), niceness()
    found: list[int] = []
    with faults.arm("pager.load", lambda: found.append(niceness())):
        pager.request(make.publish(store))
        make.settle(pager)
    assert found == [min(before + LOADER, 19)]
    assert niceness() == before


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
