"""Metrics as rows of a table, read again at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loraserve.types import TIME_BOUNDS_S, Histogram

Source = TypeVar("Source")
Sample = float | Histogram
Samples = (
    Sample
    | Mapping[str, Sample]
    | Mapping[tuple[str, str], Sample]
    | Mapping[tuple[str, str, str], Sample]
    | Mapping[tuple[str, str, str, str], Sample]
)
"""The only sample, or by the label's value, or by the values of several labels."""


@dataclass(frozen=True, slots=True)
class Row(Generic[Source]):
    """Metric family: name, help, kind, labels, and the function that reads its samples."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Source], Samples]

    def collect(self, source: Source) -> Metric:
        family: Any = self.family(self.name, self.help, labels=self.labels)
        samples = self.read(source)
        for key, sample in _items(samples):
            labels = [key] if isinstance(key, str) else list(key)
            if isinstance(sample, Histogram):
                family.add_metric(labels, _buckets(sample), sum_value=sample.sum_s)
            else:
                family.add_metric(labels, sample)
        collected: Metric = family
        return collected


Table = Sequence[Row[Source]]


def gauge(name: str, help: str, read: Callable[[Source], Samples], *labels: str) -> Row[Source]:
    """Build the row of a gauge."""
    return Row(GaugeMetricFamily, name, help, labels, read)


def counter(name: str, help: str, read: Callable[[Source], Samples], *labels: str) -> Row[Source]:
    """Build the row of a counter."""
    return Row(CounterMetricFamily, name, help, labels, read)


def histogram(name: str, help: str, read: Callable[[Source], Samples], *labels: str) -> Row[Source]:
    """Build the row of a histogram of times."""
    return Row(HistogramMetricFamily, name, help, labels, read)


class TableCollector(Collector, Generic[Source]):
    """Collect a table's rows at every scrape.

    Args:
        source: returns the object that the rows read; None: there is nothing to show.
    """

    def __init__(self, table: Table[Source], source: Callable[[], Source | None]) -> None:
        self._table = table
        self._source = source

    def collect(self) -> Iterator[Metric]:
        source = self._source()
        if source is not None:
            for row in self._table:
                yield row.collect(source)


def _items(samples: Samples) -> Iterable[tuple[str | tuple[str, ...], Sample]]:
    return samples.items() if isinstance(samples, Mapping) else (((), samples),)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Build Prometheus' buckets, each of which counts the values of the buckets below it too."""
    buckets, num = [], 0
    for bound, count in zip((*TIME_BOUNDS_S, float("inf")), histogram.counts, strict=True):
        num += count
        le: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
        buckets.append((le, float(num)))
    return buckets
