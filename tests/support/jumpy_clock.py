"""A pytest plug-in: clocks that jump forward at random, and steps and callbacks that come late.

It finds tests that compare times, or the order of threads, where they should count steps, bytes or
processor time, or wait for the event itself::

    PYTHONPATH=tests/support python -P -m pytest -p jumpy_clock --jumpy-clock 1 tests/unit

A test that fails under it, and passes without, depends on how busy the machine is. Real deadlines
of some seconds still hold: the clocks gain at most as much as goes by. uvloop's loop has a clock of
its own; what the system waits for (sockets, locks, sleeps) isn't changed.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

_MIN_PAUSE_S = 0.2
"""Least time between two jumps."""
_MAX_JUMP_S = 0.6
_SHARE_OF_CALLBACKS = 0.02
_SHARE_OF_STEPS = 0.2
_MAX_LATE_S = 0.02

OPTION = "--jumpy-clock"


class JumpyClock:
    """Wraps a clock: now and then it is ahead by some more.

    Threads that wait for a core see a clock like this: between two lines, much time has gone by.
    """

    def __init__(self, seed: int, real: Callable[[], float] = time.monotonic) -> None:
        self._random = random.Random(seed)
        self._real = real
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        self._next_s = self._real()

    def ahead_s(self) -> float:
        """Return by how much the clocks are ahead; jump if it is time to."""
        with self._lock:
            now_s = self._real()
            if now_s >= self._next_s and self._random.random() < 0.5:
                jump_s = self._random.uniform(0.0, _MAX_JUMP_S)
                self._ahead_s += jump_s
                self._next_s = now_s + _MIN_PAUSE_S + jump_s
            return self._ahead_s

    def late_s(self, share: float) -> float:
        """Return by how much something is late: mostly by nothing."""
        with self._lock:
            return self._random.uniform(0.0, _MAX_LATE_S) if self._random.random() < share else 0.0

    def install(self) -> None:
        """Replace the clocks of this process, before modules take them by name."""
        for name in ("monotonic", "perf_counter"):
            setattr(time, name, self._ahead(getattr(time, name), 1.0))
            setattr(time, f"{name}_ns", self._ahead(getattr(time, f"{name}_ns"), 1e9))
        self._delay(asyncio.events.Handle, "_run", _SHARE_OF_CALLBACKS)

    def delay_steps(self) -> None:
        """Delay steps of engines; apart, as it imports torch."""
        from loraserve.engine.engine import Engine

        self._delay(Engine, "step", _SHARE_OF_STEPS)

    def _ahead(self, clock: Callable[[], Any], unit: float) -> Callable[[], Any]:
        def jumpy() -> Any:
            value = clock()
            return value + type(value)(self.ahead_s() * unit)

        return jumpy

    def _delay(self, owner: type, name: str, share: float) -> None:
        run, sleep = getattr(owner, name), time.sleep

        def late(*given: Any, **named: Any) -> Any:
            seconds = self.late_s(share)
            if seconds:
                sleep(seconds)
            return run(*given, **named)

        setattr(owner, name, late)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=None, metavar="SEED", help="let clocks jump, by these random numbers")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    seed = early_config.known_args_namespace.jumpy_clock
    if seed is not None:
        clock = JumpyClock(seed)
        clock.install()
        early_config.stash[_CLOCK] = clock


def pytest_collection_finish(session: pytest.Session) -> None:
    clock = session.config.stash.get(_CLOCK, None)
    if clock is not None and any("engine" in item.nodeid for item in session.items):
        clock.delay_steps()


_CLOCK: pytest.StashKey[JumpyClock] = pytest.StashKey()
