"""What a certificate means for a version: its entry among the checks, its state, and the refusal of a version in quarantine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loraserve.errors import AdapterQuarantined
from loraserve.registry.records import QUARANTINED, READY
from loraserve.types import BaseSpec, Certificate

PARITY = "parity"
"""The name of the check that a certificate is."""
STORED = "stored"
"""The name of the check that is there, failed, while the version's bytes are known to be damaged."""
NUMERICS = "numerics"
"""The name of the check that counts the version's answers which were not finite."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WARNED = "warned"
"""The status of a check that found something, though the version is served."""
ON_REQUEST = "this server verifies versions when it is asked to"
"""The detail of a certificate that was skipped by the operator's wish; any other one was since the engine gave none."""
MAX_SETUPS = 16
"""Setups that a version's check remembers; of more, the oldest is verified again."""
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
    holds_for: tuple[str, ...] = ()
    """The setups (`setup_of`) that it passed on, the last one being the certificate's."""

    @classmethod
    def of(cls, certificate: Certificate, setup: str) -> Parity:
        """Return what a certificate that was made on this setup says."""
        # Whatever isn't said to have passed has not.
        if certificate.verdict == PASSED:
            return cls(PASSED, _numbers(certificate), certificate, (setup,))
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
        check = {"name": PARITY, "status": self.status, "detail": self.detail, "certificate": certificate}
        return {**check, "holds_for": list(self.holds_for)} if self.holds_for else check

    def after(self, checks: Iterable[Mapping[str, Any]]) -> Parity:
        """Return the same outcome with the setups that the version, which had these checks, passed on before.

        Servers that compute one base in different ways would otherwise verify the version in turns, without end. A failure ends all
        of them: what is verified after it begins anew.
        """
        if self.status != PASSED:
            return self
        before = next((check.get("holds_for", ()) for check in checks if check["name"] == PARITY), ())
        others = [setup for setup in before if setup not in self.holds_for]
        return replace(self, holds_for=(*others, *self.holds_for)[-MAX_SETUPS:])


def setup_of(base: BaseSpec) -> str:
    """Return how a server computes its base, in words that are the same for servers whose certificates hold for each other."""
    return f"{base.quantization} {base.dtype}, {base.arithmetic} ({base.instructions}) on {base.device}"


def is_due(check: Mapping[str, Any], setup: str) -> bool:
    """Return whether the check is a certificate that the engine should be asked for.

    That is one that is missing against the operator's wish, or of other setups than this one.
    """
    if check["name"] != PARITY:
        return False
    if check["status"] == PASSED:
        return setup not in check.get("holds_for", ())
    return check["status"] == SKIPPED and check["detail"] not in (ON_REQUEST, DIED_TWICE)


def after_death(check: Mapping[str, Any], setup: str) -> dict[str, Any]:
    """The same check, after the engine died while it verified the version. After two such tries it isn't due any more."""
    if not is_due(check, setup):
        return dict(check)
    return Parity(SKIPPED, DIED_TWICE if check["detail"] == DIED_ONCE else DIED_ONCE).as_check()


def _numbers(one: Certificate) -> str:
    return (
        f"logits differ from the reference's by at most {one.max_difference:.3g} ({one.tolerance:.3g} is allowed), "
        f"the likeliest token is the same at {one.top1_agreement:.1%} of {one.num_probe_tokens} positions"
    )


def quarantine_error(name: str, version: int, checks: Iterable[Mapping[str, Any]]) -> AdapterQuarantined:
    """Why this version isn't served: its certificate's numbers, or that its bytes are damaged, or its answers no numbers."""
    names = (STORED, PARITY, NUMERICS)
    failed = (check["detail"] for check in checks if check["name"] in names and check["status"] == FAILED)
    detail = next(failed, "its certificate failed")
    return AdapterQuarantined(
        f"{name}@{version} is quarantined: {detail}.", hint=f"See: loraserve adapter show {name}@{version}"
    )
