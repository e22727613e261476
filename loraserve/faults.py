"""Named points where a test can inject failures: ``faults.hit("blob.after_fsync")``.

Tests arm points in their own process with `arm`, and in a process that they start with the variable
``LORASERVE_FAULTS``, which is read once, at import. A point that isn't armed costs one lookup in an
empty dict.

    LORASERVE_FAULTS="blob.after_fsync=kill, blob.write=ENOSPC@3, blob.read=delay:0.2"

Actions: ``kill`` (SIGKILL to this process), the name of an errno (raises that OSError), and
``delay:SECONDS``. With ``@n`` only the n-th hit acts; without it every hit does.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraserve.errors import ConfigError

VARIABLE = "LORASERVE_FAULTS"


@dataclass(slots=True)
class _Armed:
    action: Callable[[], None]
    nth: int | None
    num_hits: int = 0


_armed: dict[str, _Armed] = {}


def hit(point: str) -> None:
    """Run the action that a test armed this point with; no-op otherwise."""
    armed = _armed.get(point)
    if armed is None:
        return
    armed.num_hits += 1
    if armed.nth is None or armed.num_hits == armed.nth:
        armed.action()


def is_armed(point: str) -> bool:
    """Return whether a test armed this point."""
    return point in _armed


@contextmanager
def arm(point: str, action: str | Callable[[], None]) -> Iterator[None]:
    """Arm `point` for the length of a with block.

    `action` is a callable, or text as in ``LORASERVE_FAULTS``.
    """
    armed = _parse_action(action) if isinstance(action, str) else _Armed(action, None)
    _armed[point] = armed
    try:
        yield
    finally:
        _armed.pop(point, None)


def _parse_action(text: str) -> _Armed:
    name, _, nth_text = text.partition("@")
    nth = int(nth_text) if nth_text else None
    kind, _, argument = name.partition(":")
    if kind == "kill":
        return _Armed(lambda: os.kill(os.getpid(), signal.SIGKILL), nth)
    if kind == "delay":
        seconds = float(argument)
        return _Armed(lambda: time.sleep(seconds), nth)
    code = getattr(errno, kind, None)
    if not isinstance(code, int):
        raise ConfigError(
            f'{VARIABLE}: unknown action "{text}".', hint="Use kill, delay:SECONDS or an errno such as ENOSPC."
        )
    return _Armed(lambda: _raise(code), nth)


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


def _arm_from_environment() -> None:
    for entry in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        point, _, action = entry.partition("=")
        _armed[point.strip()] = _parse_action(action.strip())


_arm_from_environment()
