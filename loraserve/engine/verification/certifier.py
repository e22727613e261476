"""Certificates of verifications whose probes are over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from loraserve.adapters.format.tensor_names import modelled_names
from loraserve.engine.probe import Probe
from loraserve.engine.verification.comparison import (
    FAILED,
    NOT_POSSIBLE,
    PASSED,
    Answers,
    judge,
    judge_extra,
    spread_of,
    unanswered,
)
from loraserve.engine.verification.float_base import FloatsUnavailable
from loraserve.engine.verification.module_changes import worst_difference
from loraserve.engine.verification.rounding_loss import add_loss, measure
from loraserve.engine.verification.verification import BaseLogits, Verification
from loraserve.errors import AdapterNumerics, AdapterUnavailable, InvariantViolation, error_from_code
from loraserve.memory.loading.base_weights import background_compute
from loraserve.model.reference_pass import Evaluation
from loraserve.types import BaseSpec, Certificate
from loraserve_kernels.common.sites import label_of

logger = logging.getLogger(__name__)


_EXACT_MODULE = 1e-4
"""Cap on the relative difference of a module's change: two dot products, summed in float32."""
_LOSS_FACTOR = 4.0
"""Factor by which a random input may show more of a precision loss than its mean."""


class Certifier:
    """Make certificates for one base and the arithmetic it is computed with."""

    def __init__(self, base: BaseSpec, device: torch.device, clock: Callable[[], float], note: str) -> None:
        """Keep the base's facts for its certificates.

        Args:
            device: where the reference model computes.
            clock: monotonic seconds.
            note: reason why no certificate says what rounding costs; empty if they do.
        """
        self._base, self._device, self._clock, self._note = base, device, clock, note

    def compare(self, v: Verification, reference: Evaluation) -> Certificate:
        """Compare the probes' logits with their reference, on a background thread."""
        base = self._base
        with background_compute(self._device):
            if v.known_base is None:
                spread = spread_of(reference)
                v.known_base = BaseLogits(tuple(_logits(v.base)), reference.base, spread)
            rounds = [_logits(probes) for probes in (v.alone, v.mixed) if probes]
            certificate = judge(
                Answers(v.known_base.engine, rounds),
                reference,
                spread=v.known_base.spread,
                dtype=base.dtype,
                is_quantized=base.quantization != "none",
                precision_loss=v.precision_loss or 0.0,
                seconds=self._clock() - v.started_s,
            )
            if v.own and certificate.verdict == PASSED:
                certificate = judge_extra(certificate, _logits(v.own), reference.own, dtype=base.dtype)
            certificate = self._with_modules(v, certificate)
        if certificate.verdict == NOT_POSSIBLE:
            logger.error("no adapter can be verified on this base: %s", certificate.reason)
        return self._signed(msgspec.structs.replace(certificate, rounding_note=self._note))

    def _with_modules(self, v: Verification, certificate: Certificate) -> Certificate:
        """Add the comparison of each module's change to the certificate."""
        packed, expected, v.packed = v.packed, v.reference.changes, None
        if packed is None or expected is None or certificate.verdict != PASSED:
            return certificate
        found, (layer, module, expert) = worst_difference(packed, expected, self._base)
        certificate = msgspec.structs.replace(certificate, module_difference=found)
        allowed = _EXACT_MODULE + _LOSS_FACTOR * certificate.precision_loss
        if found <= allowed:
            return certificate
        linear = modelled_names(self._base).get(module, label_of(module, expert))
        reason = f"What {linear} of layer {layer} adds is off by {found:.4g} of it; {allowed:.4g} is allowed."
        return msgspec.structs.replace(certificate, verdict=FAILED, reason=reason)

    def price(self, v: Verification, certificate: Certificate, floats: Evaluation) -> Certificate:
        """Add what rounding costs the adapter to the certificate, on a background thread.

        Args:
            certificate: the engine computes the adapter right.
            floats: the answers' logits by the checkpoint's own weights.
        """
        with background_compute(self._device):
            loss = measure(_logits(v.base_answers), _logits(v.answers), floats.base, floats.adapted)
        return msgspec.structs.replace(add_loss(certificate, loss), seconds=self._clock() - v.started_s)

    def leave_open(self, v: Verification, certificate: Certificate, error: BaseException) -> Certificate:
        """Note in the certificate why what rounding costs the adapter is open.

        Raises:
            AdapterCorrupt: the adapter's files can't be read.
        """
        if isinstance(error, AdapterUnavailable):
            raise error
        why = "The checkpoint's own weights can't be read."
        if isinstance(error, FloatsUnavailable):
            why = error.message
        else:
            # it may name the server's folders, which are none of tenants' business
            logger.error("the checkpoint's own weights can't be evaluated", exc_info=error)
        return msgspec.structs.replace(
            certificate,
            verdict=NOT_POSSIBLE,
            reason=f"The cost of rounding can't be measured. {why}",
            seconds=self._clock() - v.started_s,
        )

    def certify_failure(self, v: Verification, probe: Probe) -> Certificate:
        """Fail the certificate if the adapter's logits aren't finite.

        Raises:
            LoraserveError: the probe ended with another error, which may not be the adapter's
                fault.
        """
        output = probe.output
        code, message = (output.error_code, output.error_message) if output is not None else (None, None)
        error = error_from_code(code or "", message or "The adapter could not be verified.")
        if isinstance(error, AdapterNumerics):
            return self._signed(
                unanswered(error.message, precision_loss=v.precision_loss or 0.0, seconds=self._clock() - v.started_s)
            )
        raise error

    def _signed(self, certificate: Certificate) -> Certificate:
        """Add the base and the arithmetic that it holds for to the certificate."""
        return msgspec.structs.replace(
            certificate,
            base_digest=self._base.digest,
            quantization=self._base.quantization,
            arithmetic=self._base.arithmetic,
            instructions=self._base.instructions,
            device=self._base.device,
        )


def _logits(probes: Sequence[Probe]) -> list[Tensor]:
    """Collect the logits of probes that all ended well."""
    logits = [probe.logits() for probe in probes]
    if any(rows is None for rows in logits):
        raise InvariantViolation("A probe ended before all of its rows were computed.")
    return [rows for rows in logits if rows is not None]
