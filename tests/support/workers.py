"""Which tests a run takes, and how pytest-xdist's workers share them
(``pytest -n 4 --dist worksteal``).

Workers begin with equal parts of the list and then take from the ends of each other's, so that a
module's tests mostly stay together. Tests marked ``alone`` come first and have the machine to
themselves: their bounds are times that another worker's load would break.
"""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from zlib import crc32

import pytest


class Machine:
    """The machine, which tests of several processes share, and some want for themselves.

    One that waits for itself is next: no other begins before it.

    Args:
        folder: where all of these processes make their two files.
    """

    def __init__(self, folder: Path) -> None:
        self._queue, self._machine = (
            os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("queue.lock", "machine.lock")
        )
        self._is_kept = False

    def take(self, *, alone: bool) -> None:
        """Wait until the machine can be shared, or is free."""
        if self._is_kept:
            return
        # a test that waits for the machine keeps the queue locked
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)

    def leave(self, *, keep: bool = False) -> None:
        """Let others have the machine, unless the next test is to be alone too."""
        self._is_kept = keep
        if not keep:
            fcntl.flock(self._machine, fcntl.LOCK_UN)


_MACHINE: pytest.StashKey[Machine] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the long campaigns too")
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="of each campaign's cases only every Nth, from the Kth on",
    )


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}; expected K/N with K from 1 to N, such as 2/5")
    return int(number), int(count)


def part_of(names: Sequence[str], number: int, count: int) -> set[str]:
    """Return the cases of a part: of each test's, by the name without parameters, every `count`-th.

    Tests begin at different parts, so that those with a single case are divided among them too.
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(name.partition("[")[0], []).append(name)
    chosen = set()
    for test, cases in tests.items():
        first = (number - 1 + crc32(test.encode())) % count
        chosen.update(cases[first::count])
    return chosen


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests that run alone first; leave out what isn't asked for by a mark or its file.

    Campaigns are asked for by ``--all`` too, or parts of them by ``--part``. The browser's tests
    share one browser and a server a module, one after the other, which ``make browser`` does.
    """
    items.sort(key=lambda item: not _is_alone(item))
    if config.option.markexpr or any(".py" in argument for argument in config.args):
        return
    left_out = set()
    if not config.option.all:
        left_out.add("campaign")
    if not any("browser" in argument for argument in config.args):
        left_out.add("browser")
    campaign = [item.nodeid for item in items if item.get_closest_marker("campaign")]
    others = set(campaign) - part_of(campaign, *config.option.part)
    deselected = [
        item for item in items if item.nodeid in others or any(item.get_closest_marker(mark) for mark in left_out)
    ]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Wait until no other worker runs a test that wants to be alone,
    or any test if this one does.
    """
    config = item.config
    if not hasattr(config, "workerinput"):
        return (yield)
    if _MACHINE not in config.stash:
        config.stash[_MACHINE] = Machine(config._tmp_path_factory.getbasetemp().parent)  # type: ignore[attr-defined]
    machine = config.stash[_MACHINE]
    machine.take(alone=_is_alone(item))
    try:
        return (yield)
    finally:
        machine.leave(keep=_is_alone(item) and _is_alone(nextitem))
