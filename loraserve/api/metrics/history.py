"""The last hour of each tenant's requests in points, so that a chart needn't begin empty."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from loraserve.api.metrics.activity import Activity, RequestTally
from loraserve.api.metrics.durations import empty_counts, quantile
from loraserve.background import BackgroundTask
from loraserve.limits import LIMITS, Limits
from loraserve.types import EngineStats, TenantId

logger = logging.getLogger(__name__)

QUANTILES = (0.5, 0.95, 0.99)
NONE = math.nan
"""Figure of a point that there isn't."""


class HistoryPoint(NamedTuple):
    """Figures of requests at an instant; `NONE` stands for what wasn't measured.

    Attributes:
        tokens_per_s: since the point before.
        requests_per_minute: ended over the last minute.
        num_waiting, num_running: at the instant.
        first_p50, first_p95, first_p99: seconds to the first token, over the last minute.
        token_p50, token_p95, token_p99: seconds between tokens, likewise.
        kv_share, adapters_share: parts of the device's memory, of all tenants together.
    """

    tokens_per_s: float
    requests_per_minute: float
    num_waiting: float
    num_running: float
    first_p50: float
    first_p95: float
    first_p99: float
    token_p50: float
    token_p95: float
    token_p99: float
    kv_share: float = NONE
    adapters_share: float = NONE


_WIDTH = 1 + len(HistoryPoint._fields)
_IDLE = HistoryPoint(0.0, 0.0, 0, 0, *[NONE] * 6)
_TENANTS_AT_ONCE = 32
"""Tenants whose points are made before other work of the event loop has its turn: a millisecond."""


class _Counts(NamedTuple):
    """Counts of a tally at an instant."""

    at_s: float
    num_ended: int
    completion_tokens: int
    first_token: list[int]
    per_token: list[int]


class ActivityHistory:
    """Points of all requests, and of each tenant's that had any of late.

    A tenant takes some 20 KiB; those whose tally `Activity` has dropped are dropped here too.
    """

    def __init__(
        self,
        activity: Activity,
        engine_stats: Callable[[], EngineStats],
        *,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without points.

        Args:
            engine_stats: returns the engine's last figures.
        """
        self._activity, self._engine_stats, self._clock = activity, engine_stats, clock
        self._window_s = limits.history_window_s
        self._max_numbers = _WIDTH * round(limits.history_s / limits.history_interval_s)
        # None: all tenants. Instants in seconds since 1970 and points, `_WIDTH` numbers for each
        self._points: dict[TenantId | None, array[float]] = {}
        self._counts: dict[TenantId | None, deque[_Counts]] = {}
        self._taken_s: float | None = None
        self._task = BackgroundTask(
            "live-history",
            self.take,
            limits.history_interval_s,
            failure="the live figures' history can't go on",
            logger=logger,
        )

    def start(self) -> None:
        """Add points from now on, on the running event loop."""
        self._task.start()

    async def close(self) -> None:
        """Add no more of them."""
        await self._task.close()

    async def take(self) -> None:
        """Add a point for now."""
        now, tallies = self._clock(), dict(self._activity.tallies())
        # a tally that is new has counted since the last points
        before = now if self._taken_s is None else self._taken_s
        self._taken_s = now
        for gone in self._points.keys() - tallies.keys():
            del self._points[gone], self._counts[gone]
        for number, (tenant, tally) in enumerate(tallies.items(), start=1):
            points = self._points.setdefault(tenant, array("d"))
            counts = self._counts.setdefault(tenant, deque())
            if not counts or counts[-1].num_ended > tally.num_ended:
                # dropped, and begun again since
                counts.clear()
                counts.append(_Counts(before, 0, 0, empty_counts(), empty_counts()))
            point = self._point(tally, counts, now)
            points.extend((now, *(self._with_memory(point) if tenant is None else point)))
            del points[: -self._max_numbers]
            if number % _TENANTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _with_memory(self, point: HistoryPoint) -> HistoryPoint:
        stats = self._engine_stats()
        if not stats.device_bytes:
            return point
        adapter_bytes = stats.adapter_bytes_used + stats.adapter_bytes_idle
        return point._replace(
            kv_share=stats.kv_bytes_used / stats.device_bytes, adapters_share=adapter_bytes / stats.device_bytes
        )

    def of(self, tenant: TenantId | None) -> list[tuple[float, HistoryPoint]]:
        """Return a tenant's instants (seconds since 1970) and points; with None all requests'."""
        numbers = self._points.get(tenant, array("d"))
        rows = (numbers[at : at + _WIDTH] for at in range(0, len(numbers), _WIDTH))
        return [(row[0], HistoryPoint(*row[1:])) for row in rows]

    def _point(self, tally: RequestTally, counts: deque[_Counts], now: float) -> HistoryPoint:
        """Compare a tally with what it had, and note what it has."""
        last = counts[-1]
        while len(counts) > 1 and counts[1].at_s <= now - self._window_s:
            counts.popleft()
        first = counts[0]
        has_changed = (tally.num_ended, tally.completion_tokens) != (first.num_ended, first.completion_tokens)
        if not (has_changed or tally.num_waiting or tally.num_running):
            # nothing for a minute: what it had is what it has
            counts.append(last._replace(at_s=now))
            return _IDLE
        first_token, per_token = list(tally.first_token_counts), list(tally.per_token_counts)
        counts.append(_Counts(now, tally.num_ended, tally.completion_tokens, first_token, per_token))
        return HistoryPoint(
            _rate(tally.completion_tokens - last.completion_tokens, now - last.at_s),
            60 * _rate(tally.num_ended - first.num_ended, now - first.at_s),
            tally.num_waiting,
            tally.num_running,
            *_quantiles(first_token, first.first_token),
            *_quantiles(per_token, first.per_token),
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else NONE


def _quantiles(after: list[int], before: list[int]) -> list[float]:
    counts = [now - then for now, then in zip(after, before, strict=True)]
    found = [quantile(counts, part) for part in QUANTILES]
    return [NONE if one is None else one for one in found]
