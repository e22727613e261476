"""Checks of a version: what was found of it, and the state that follows.

The refusal of a version in quarantine is here too. A check is a mapping with ``name``, ``status``
and ``detail``; some have more. The version's state is a function of its checks alone (`state_of`):
whatever changes them calls `set_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loraserve.db.models import AdapterVersion
from loraserve.errors import AdapterQuarantined
from loraserve.registry.records import QUARANTINED, READY

CERTIFICATE = "parity"
"""Name of the check that holds the version's certificate."""
STORED = "stored"
"""Name of the check that exists, failed, while the version's stored bytes are known to be
corrupt.
"""
NUMERICS = "numerics"
"""Name of the check that counts the version's answers with NaN or infinite logits."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WARNED = "warned"
"""Status of a check that found something but doesn't keep the version from being served."""
DEGRADED, NOT_POSSIBLE = "degraded", "not_possible"
"""Statuses of a certificate that isn't passed, of a version that is served all the same."""
WARNINGS = (WARNED, DEGRADED, NOT_POSSIBLE)
"""Statuses of checks that are reported as warnings."""


def state_of(checks: Iterable[Mapping[str, Any]]) -> str:
    """Decide the state of a version with these checks.

    It is `QUARANTINED` if one has failed, else `READY`.
    """
    return QUARANTINED if any(check["status"] == FAILED for check in checks) else READY


def set_checks(row: AdapterVersion, checks: Iterable[Mapping[str, Any]]) -> None:
    """Replace the version's checks, and set the state that follows from them."""
    # A new list: SQLAlchemy doesn't notice a change inside the old one.
    row.checks = [dict(check) for check in checks]
    row.state = state_of(row.checks)


def replace_check(checks: Iterable[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Put `new` at the end of the checks.

    It replaces the one of the same name if there is one.
    """
    return [*(check for check in checks if check["name"] != new["name"]), new]


def find_check(checks: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Find the check of this name; None if there is none."""
    return next((check for check in checks if check["name"] == name), None)


def is_corrupt(checks: Iterable[Mapping[str, Any]]) -> bool:
    """Check whether the version's stored bytes are known to be corrupt."""
    return any(check["name"] == STORED and check["status"] == FAILED for check in checks)


def quarantine_error(name: str, version: int, checks: Iterable[Mapping[str, Any]]) -> AdapterQuarantined:
    """Build the refusal of a version in quarantine.

    Its message has the detail of the check that failed.
    """
    names = (STORED, CERTIFICATE, NUMERICS)
    failed = (check["detail"] for check in checks if check["name"] in names and check["status"] == FAILED)
    detail = next(failed, "its certificate failed")
    return AdapterQuarantined(
        f"{name}@{version} is quarantined: {detail}.", hint=f"See: loraserve adapter show {name}@{version}"
    )
