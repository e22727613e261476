"""Checks and how they are run: one that raises has failed, and the others continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loraserve.errors import LoraserveError


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: stable, for programs.
        found, expected: in words; `expected` empty where there is nothing to compare with.
        next: what to do; empty where it is fine.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    next: str = ""


def ok(name: str, found: str, expected: str = "") -> Check:
    return Check(name, Status.OK, found, expected)


def warn(name: str, found: str, expected: str, next: str) -> Check:
    return Check(name, Status.WARN, found, expected, next)


def fail(name: str, found: str, expected: str, next: str) -> Check:
    return Check(name, Status.FAIL, found, expected, next)


def run(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """Run a check, and collect its outcomes.

    If an error of ours or the system's ends it, a failure named `name` is last.
    """
    try:
        return list(check())
    except LoraserveError as error:
        return [fail(name, error.message, "", error.hint or "")]
    except OSError as error:
        return [fail(name, f"{error.strerror or error}", "", "")]


def masked(checks: Iterable[Check], secrets: Sequence[str]) -> list[Check]:
    """Yield the checks with every secret masked."""

    def mask(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "…")
        return text

    return [replace(c, found=mask(c.found), expected=mask(c.expected), next=mask(c.next)) for c in checks]
