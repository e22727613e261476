"""Outcome of asking the engine for a certificate.

It has its entry among a version's checks, and when to verify again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loraserve.registry.health.checks import (
    CERTIFICATE,
    DEGRADED,
    FAILED,
    NOT_POSSIBLE,
    PASSED,
    SKIPPED,
    find_check,
)
from loraserve.types import BaseSpec, Certificate

ON_REQUEST = "this server verifies versions on request only"
"""Detail of a certificate that the operator chose to skip; any other skip is the engine's."""
_RULES = "certificate 2"
"""Rules of certificates: those by other rules, as of older releases, are renewed once."""
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
    """`PASSED`, `DEGRADED`, `NOT_POSSIBLE`, `FAILED`, or `SKIPPED` if there is no certificate."""
    detail: str
    certificate: Certificate | None = None
    holds_for: tuple[str, ...] = ()
    """Setups (`setup_of`) on which the version was verified and didn't fail, the certificate's own
    last.
    """

    @classmethod
    def of(cls, certificate: Certificate, setup: str) -> CertificateOutcome:
        """Read the outcome that a certificate from this setup states."""
        why = certificate.reason.rstrip(".")
        detail = ": ".join(part for part in (why, words_of(certificate)) if part)
        if certificate.verdict in (PASSED, DEGRADED, NOT_POSSIBLE):
            return cls(certificate.verdict, detail, certificate, (setup,))
        # any other verdict is a failure
        return cls(FAILED, detail, certificate)

    def as_check(self) -> dict[str, Any]:
        """Build the entry among a version's checks.

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
        """Add the setups on which the version was verified before to the outcome.

        They are in its old checks. Otherwise servers that compute one base in different ways would
        verify the version in turns, forever. A failure clears all of them.
        """
        if not self.holds_for:
            return self
        before = (find_check(checks, CERTIFICATE) or {}).get("holds_for", ())
        others = [setup for setup in before if setup not in self.holds_for]
        return replace(self, holds_for=(*others, *self.holds_for)[-MAX_SETUPS:])


def setup_of(base: BaseSpec) -> str:
    """Describe how a server computes its base, and by which rules it certifies.

    Certificates hold for each other where the description is the same.
    """
    return f"{_RULES}: {base.quantization} {base.dtype}, {base.arithmetic} ({base.instructions}) on {base.device}"


def is_due(check: Mapping[str, Any], setup: str) -> bool:
    """Check whether the check is a certificate that the engine should issue again.

    It is if the certificate is missing against the operator's wish, or was issued on other setups
    than this one.
    """
    if check["name"] != CERTIFICATE:
        return False
    if check["status"] in (PASSED, DEGRADED, NOT_POSSIBLE):
        return setup not in check.get("holds_for", ())
    return check["status"] == SKIPPED and check["detail"] not in (ON_REQUEST, DIED_TWICE)


def after_death(check: Mapping[str, Any], setup: str) -> dict[str, Any]:
    """Update the check after the engine died while verifying the version.

    After two deaths it isn't due any more.
    """
    if not is_due(check, setup):
        return dict(check)
    return CertificateOutcome(SKIPPED, DIED_TWICE if check["detail"] == DIED_ONCE else DIED_ONCE).as_check()


def words_of(one: Certificate) -> str:
    """Describe what a certificate found, in figures; empty if it compared nothing."""
    if not one.num_probe_tokens:
        return ""
    computed = (
        f"on the weights that are served its logits are within {one.max_difference:.2g} of a float32 evaluation's"
        f" ({one.tolerance:.2g} is allowed"
        + (
            f"; where activations are rounded, next codes alone make {one.base_spread:.2g} rms)"
            if one.base_spread
            else ")"
        )
    )
    if one.module_difference is not None:
        computed = f"what a module adds is off by at most {one.module_difference:.2g} of it; {computed}"
    if one.answer_divergence is None or one.base_divergence is None:
        return f"{computed}; {one.rounding_note}" if one.rounding_note else computed
    kept = (
        "it changes no answer"
        if one.effect_kept is None
        else f"rounding the base leaves {one.effect_kept:.0%} of its effect"
    )
    return (
        f"{computed}; {kept}: over {one.num_answer_tokens} tokens of its own answers, {one.answer_agreement:.0%} of the"
        f" likeliest tokens stay ({one.base_agreement:.0%} without it), at {one.answer_divergence:.2g} nats of"
        f" divergence ({one.base_divergence:.2g} without it)"
    )
