"""Outcome of asking the engine for a certificate.

It has its entry among a version's checks, and when to ask again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loraserve.registry.health.checks import CERTIFICATE, FAILED, PASSED, SKIPPED, find_check
from loraserve.types import BaseSpec, Certificate

ON_REQUEST = "this server verifies versions on request only"
"""Detail of a certificate that the operator chose to skip; any other skip is the engine's."""
MAX_SETUPS = 16
"""Maximum number of setups that a version's check remembers; the oldest is verified again."""
DIED_ONCE = "the engine died while it verified this version"
DIED_TWICE = "the engine died twice while it verified this version, which is verified again on request only"
"""Details of certificates that were skipped because the engine died,
maybe because of the version.
"""


@dataclass(frozen=True, slots=True)
class CertificateOutcome:
    """Outcome of asking the engine for a certificate."""

    status: str
    """`PASSED`, `FAILED`, or `SKIPPED` if there is no certificate."""
    detail: str
    certificate: Certificate | None = None
    holds_for: tuple[str, ...] = ()
    """Setups (`setup_of`) on which the version passed, the certificate's own last."""

    @classmethod
    def of(cls, certificate: Certificate, setup: str) -> CertificateOutcome:
        """Return the outcome that a certificate from this setup states."""
        # Any verdict but PASSED is a failure.
        if certificate.verdict == PASSED:
            return cls(PASSED, _numbers(certificate), certificate, (setup,))
        why = f"{certificate.reason.rstrip('.')}: " if certificate.reason else ""
        return cls(FAILED, why + _numbers(certificate), certificate)

    def as_check(self) -> dict[str, Any]:
        """Return the entry among a version's checks.

        A number that isn't finite is None: JSON can't express it.
        """
        certificate = None
        if self.certificate is not None:
            certificate = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in msgspec.structs.asdict(self.certificate).items()
            }
        check = {"name": CERTIFICATE, "status": self.status, "detail": self.detail, "certificate": certificate}
        return {**check, "holds_for": list(self.holds_for)} if self.holds_for else check

    def after(self, checks: Iterable[Mapping[str, Any]]) -> CertificateOutcome:
        """Return the same outcome with the setups on which the version passed before.

        Its old checks say which. Otherwise servers that compute one base in different ways would
        verify the version in turns, forever. A failure clears all of them.
        """
        if self.status != PASSED:
            return self
        before = (find_check(checks, CERTIFICATE) or {}).get("holds_for", ())
        others = [setup for setup in before if setup not in self.holds_for]
        return replace(self, holds_for=(*others, *self.holds_for)[-MAX_SETUPS:])


def setup_of(base: BaseSpec) -> str:
    """Describe how a server computes its base.

    Certificates hold for each other where the description is the same.
    """
    return f"{base.quantization} {base.dtype}, {base.arithmetic} ({base.instructions}) on {base.device}"


def is_due(check: Mapping[str, Any], setup: str) -> bool:
    """Return whether the check is a certificate for which the engine should be asked again.

    It is if the certificate is missing against the operator's wish, or was issued on other setups
    than this one.
    """
    if check["name"] != CERTIFICATE:
        return False
    if check["status"] == PASSED:
        return setup not in check.get("holds_for", ())
    return check["status"] == SKIPPED and check["detail"] not in (ON_REQUEST, DIED_TWICE)


def after_death(check: Mapping[str, Any], setup: str) -> dict[str, Any]:
    """Return the check after the engine died while verifying the version.

    After two deaths it isn't due any more.
    """
    if not is_due(check, setup):
        return dict(check)
    return CertificateOutcome(SKIPPED, DIED_TWICE if check["detail"] == DIED_ONCE else DIED_ONCE).as_check()


def _numbers(one: Certificate) -> str:
    return (
        f"logits differ from the reference's by at most {one.max_difference:.3g} ({one.tolerance:.3g} is allowed), "
        f"the likeliest token is the same at {one.top1_agreement:.1%} of {one.num_probe_tokens} positions"
    )
