"""Views of an evaluation: its metrics, and the data that they were measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraserve.cli.evaluation.metrics import ACCURACY, EXACT_MATCH, JSON_MATCH, METRICS, REGEX_MATCH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loraserve.contract.adapter import Evaluation

_SHARES = frozenset({EXACT_MATCH, ACCURACY, REGEX_MATCH, JSON_MATCH})
"""Metrics that are parts of the lines."""


def shown_metric(name: str, value: float | None) -> str | None:
    """Format a metric's value: parts of the lines in per cent."""
    if value is None:
        return None
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.4g}"


def in_words(name: str) -> str:
    return name.replace("_", " ")


def in_order(names: Iterable[str]) -> list[str]:
    """Sort the metrics: those of this program first, in its own order."""
    known = {name: place for place, name in enumerate(METRICS)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


def shown_evaluation(evaluation: Evaluation | None) -> str | None:
    """Format the first metric: ``exact match 71.0 %``."""
    if evaluation is None or not evaluation.metrics:
        return None
    name = in_order(evaluation.metrics)[0]
    return f"{in_words(name)} {shown_metric(name, evaluation.metrics[name])}"


def evaluation_details(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Format the evaluation as lines of title and text."""
    settings = "".join(f", {in_words(name)} {value}" for name, value in evaluation.settings.items())
    pairs = [
        (
            "evaluated",
            f"on {evaluation.num_lines:,} lines of {evaluation.data_name} (sha256:{evaluation.data_sha256[:12]})"
            f"{settings}, {evaluation.created_at.astimezone():%Y-%m-%d %H:%M}, by {evaluation.created_by}",
        )
    ]
    for name in in_order(evaluation.metrics):
        base = shown_metric(name, evaluation.base_metrics.get(name))
        text = shown_metric(name, evaluation.metrics[name])
        pairs.append((f"  {in_words(name)}", f"{text}; the base {base}" if base is not None else str(text)))
    return pairs
