"""Parser of the answer of ``/metrics``."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? ([0-9.eE+-]+|NaN|[+-]Inf)")


def parse_metrics(text: str) -> dict[str, float]:
    """Return the samples of Prometheus' text format.

    They are keyed by name and labels as they are written there.
    """
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples
