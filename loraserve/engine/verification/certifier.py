"""Certificates of verifications whose probes are over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from loraserve.engine.probe import Probe
from loraserve.engine.verification.comparison import Answers, judge, unanswered
from loraserve.engine.verification.verification import BaseLogits, Verification
from loraserve.errors import AdapterNumerics, EngineError, InvariantViolation, error_from_code
from loraserve.memory.loading.base_weights import background_compute
from loraserve.model.reference_model import Evaluation
from loraserve.types import BaseSpec, Certificate

logger = logging.getLogger(__name__)

EXACT_BASE = 1e-3
"""Bound on the difference of a float32 base's logits to their reference.

Ours are within 1e-4 of transformers'.
"""


class Certifier:
    """Make certificates for one base and the arithmetic it is computed with."""

    def __init__(self, base: BaseSpec, device: torch.device, clock: Callable[[], float]) -> None:
        """Keep the base's facts for its certificates.

        Args:
            device: where the reference model computes.
            clock: monotonic seconds.
        """
        self._base, self._device, self._clock = base, device, clock

    def compare(self, v: Verification, reference: Evaluation) -> Certificate:
        """Compare the probes' logits with their reference, on a background thread.

        Raises:
            EngineError: the base alone is too far from its reference, which is no adapter's fault.
        """
        base = self._base
        with background_compute(self._device):
            if v.known_base is None:
                v.known_base = BaseLogits(tuple(_logits(v.base)), reference.base)
            rounds = [_logits(probes) for probes in (v.alone, v.mixed) if probes]
            certificate = judge(
                Answers(v.known_base.engine, rounds),
                reference,
                dtype=base.dtype,
                precision_loss=v.precision_loss or 0.0,
                seconds=self._clock() - v.started_s,
            )
        if (base.dtype, base.quantization) == ("float32", "none") and not certificate.base_difference <= EXACT_BASE:
            found = f"by up to {certificate.base_difference:.3g}; at most {EXACT_BASE:g} was expected in float32"
            logger.error("the base's logits differ from the reference's: %s", found)
            raise EngineError(f"The base's logits differ from the reference's: {found}.", hint="Restart the server.")
        return self._signed(certificate)

    def certify_failure(self, v: Verification, probe: Probe) -> Certificate:
        """Return a failed certificate if the adapter's logits aren't finite.

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
        """Return the certificate with the base and the arithmetic that it holds for."""
        return msgspec.structs.replace(
            certificate,
            base_digest=self._base.digest,
            quantization=self._base.quantization,
            arithmetic=self._base.arithmetic,
            instructions=self._base.instructions,
            device=self._base.device,
        )


def _logits(probes: Sequence[Probe]) -> list[Tensor]:
    """Return the logits of probes that all ended well."""
    logits = [probe.logits() for probe in probes]
    if any(rows is None for rows in logits):
        raise InvariantViolation("A probe ended before all of its rows were computed.")
    return [rows for rows in logits if rows is not None]
