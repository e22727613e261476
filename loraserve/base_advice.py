"""Bounds on what rounding a base may cost without a warning, and the better choice."""

from __future__ import annotations

import re

_ROUNDED_ACTIVATIONS = re.compile(r"a[78]\b")
"""In the name of an arithmetic: ``w8a8-row``."""
MIN_AGREEMENT, MAX_DIVERGENCE = 0.92, 0.02
"""Part of positions with the float base's likeliest token, and nats of divergence from it.

On a base of 135M parameters llama.cpp's Q8_0 has 0.96 and 0.004, its Q4_K_M 0.88 and 0.05.
"""
CALIBRATION_GAIN = (
    "--quantize int4 rounds each weight for itself. Calibrated, SmolLM2-135M diverges by 0.05 nats on English prose "
    "instead of 0.31, in 0.2 bits more a weight: loraserve quantize DIR --out OUT, then --model OUT."
)
"""Line of a start that rounds float weights to int4."""


def is_low(top1_agreement: float, mean_divergence: float) -> bool:
    """Return whether rounding costs enough to warn of."""
    return not (top1_agreement >= MIN_AGREEMENT and mean_divergence <= MAX_DIVERGENCE)


def better_choice(quantization: str, arithmetic: str, *, is_of_activations: bool | None = None) -> str:
    """Return the flags that keep more of a base's answers, for the next start.

    Args:
        arithmetic: of the linears, as `BaseSpec.arithmetic`; empty: it isn't known.
        is_of_activations: whether rounding activations costs more than rounding weights; None: it
            isn't known.
    """
    if is_of_activations is None:
        is_of_activations = quantization == "int8" and _ROUNDED_ACTIVATIONS.search(arithmetic) is not None
    if is_of_activations:
        return "--activation-dtype float"
    return "--quantize int8" if quantization in ("int4", "nf4") else "--quantize none"
