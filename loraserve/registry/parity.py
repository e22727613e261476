"""What a certificate means for a version: its entry among the checks, its state, and the refusal of a version in quarantine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from loraserve.errors import AdapterQuarantined
from loraserve.registry.records import QUARANTINED, READY
from loraserve.types import Certificate

PARITY = "parity"
"""The name of the check that a certificate is."""
STORED = "stored"
"""The name of the check that is there, failed, while the version's bytes are known to be damaged."""
NUMERICS = "numerics"
"""The name of the check that counts the version's answers which were not finite."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
ON_REQUEST = "this server verifies versions when it is asked to"
"""The detail of a certificate that was skipped by the operator's wish; any other one was since the engine gave none."""
DIED_ONCE = "the engine died while it verified this version"
DIED_TWICE = "the engine died twice while it verified this version, which isn't verified again but on request"
"""The details of certificates that were skipped since the engine died before it gave one: maybe of the version."""


@dataclass(frozen=True, slots=True)
class Parity:
    """What came of asking for a certificate."""

    status: str
    """`PASSED`, `FAILED`, or `SKIPPED`: there is none."""
    detail: str
    certificate: Certificate | None = None

    @classmethod
    def of(cls, certificate: Certificate) -> Parity:
        # Whatever isn't said to have passed has not.
        if certificate.verdict == PASSED:
            return cls(PASSED, _numbers(certificate), certificate)
        why = f"{certificate.reason.rstrip('.')}: " if certificate.reason else ""
        return cls(FAILED, why + _numbers(certificate), certificate)

    @property
    def state(self) -> str:
        """Of a version with this outcome. Without a certificate it is served: nothing speaks against it."""
        return QUARANTINED if self.status == FAILED else READY

    def as_check(self) -> dict[str, Any]:
        """The entry among a version's `checks`. A number that isn't finite is None: JSON has no word for it."""
        certificate = None
        if self.certificate is not None:
            certificate = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in msgspec.structs.asdict(self.certificate).items()
            }
        return {"name": PARITY, "status": self.status, "detail": self.detail, "certificate": certificate}


def is_due(check: Mapping[str, Any]) -> bool:
    """Whether the check is a certificate that is still missing though nobody wished so, and the engine may be asked for it again."""
    return (check["name"], check["status"]) == (PARITY, SKIPPED) and check["detail"] not in (ON_REQUEST, DIED_TWICE)


def after_death(check: Mapping[str, Any]) -> dict[str, Any]:
    """The same check, after the engine died while it verified the version. After two such tries it isn't due any more."""
    if not is_due(check):
        return dict(check)
    return Parity(SKIPPED, DIED_TWICE if check["detail"] == DIED_ONCE else DIED_ONCE).as_check()


def _numbers(one: Certificate) -> str:
    return (
        f"logits differ from the reference's by at most {one.max_difference:.3g} ({one.tolerance:.3g} is allowed), "
        f"the likeliest token is the same at {one.top1_agreement:.1%} of {one.num_probe_tokens} positions"
    )


def quarantined(name: str, version: int, checks: Iterable[Mapping[str, Any]]) -> AdapterQuarantined:
    """Why this version isn't served: its certificate's numbers, or that its bytes are damaged, or its answers no numbers."""
    names = (STORED, PARITY, NUMERICS)
    failed = (check["detail"] for check in checks if check["name"] in names and check["status"] == FAILED)
    detail = next(failed, "its certificate failed")
    return AdapterQuarantined(
        f"{name}@{version} is quarantined: {detail}.", hint=f"See: loraserve adapter show {name}@{version}"
    )
