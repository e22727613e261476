"""The order in which tests of several workers get the machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from workers import Machine


def test_user_waiting_for_exclusive_machine_is_next(tmp_path: Path) -> None:
    first, alone, later = (Machine(tmp_path) for _ in range(3))
    order: list[str] = []

    def run(machine: Machine, name: str, *, is_alone: bool) -> threading.Thread:
        def use() -> None:
            machine.take(alone=is_alone)
            order.append(name)
            machine.leave()

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(timeout=0.2)
        return thread

    first.take(alone=False)
    waiting = run(alone, "alone", is_alone=True)
    behind = run(later, "later", is_alone=False)
    assert order == []
    first.leave()
    for thread in (waiting, behind):
        thread.join(timeout=30)
    assert order == ["alone", "later"]


def test_no_user_runs_between_two_exclusive_users(tmp_path: Path) -> None:
    alone, other = Machine(tmp_path), Machine(tmp_path)
    order: list[str] = []
    alone.take(alone=True)
    thread = threading.Thread(target=lambda: (other.take(alone=False), order.append("other"), other.leave()))
    thread.start()
    alone.leave(keep=True)
    alone.take(alone=True)
    time.sleep(0.1)
    order.append("second")
    alone.leave()
    thread.join(timeout=30)
    assert order == ["second", "other"]
