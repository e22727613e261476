"""What tenants are refused, and how many servers share them, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from loraserve.tenancy.limits.admission import Admissions
    from loraserve.tenancy.limits.shares import Shares


def share_metrics(rooms: Iterable[Shares]) -> Iterator[Metric]:
    refused = CounterMetricFamily(
        "loraserve_share_refusals",
        "What was refused for want of room: a tenant (or an address) had its share, or the room was full.",
        labels=["room", "reason"],
    )
    held = GaugeMetricFamily("loraserve_shares_held", "What is held of each room that is shared.", labels=["room"])
    for shares in rooms:
        held.add_metric([shares.name], shares.total)
        for reason, number in shares.num_refused.items():
            refused.add_metric([shares.name, reason], number)
    yield refused
    yield held


def tenancy_metrics(admissions: Admissions) -> Iterator[Metric]:
    refused = CounterMetricFamily(
        "loraserve_rate_limited",
        "Requests over their tenant's share, by what there was too much of.",
        labels=["reason"],
    )
    for reason, number in admissions.num_refused.items():
        refused.add_metric([reason], number)
    yield refused
    yield GaugeMetricFamily(
        "loraserve_servers",
        "Servers on this database, this one among them: each grants its part of the tenants' limits.",
        value=admissions.num_servers,
    )
