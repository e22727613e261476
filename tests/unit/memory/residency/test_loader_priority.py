"""Loaders come after the steps, and don't stand still."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve import faults
from loraserve.background import LOADER_NICENESS
from loraserve.memory.residency.pager import Pager

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
    assert found == [min(before + LOADER_NICENESS, 19)]
    assert niceness() == before
