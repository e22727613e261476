"""Figures from measurements: percentiles, the metrics of a scrape, how they changed, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

Scrape = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of all don't exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Prometheus's text as (name, sorted labels) → value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(scrape: Scrape, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0 if there are none."""
    wanted = labels.items()
    return sum(value for (found, has), value in scrape.items() if found == name and wanted <= dict(has).items())


def increase(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f}"


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def number(value: float, digits: int = 1) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"
