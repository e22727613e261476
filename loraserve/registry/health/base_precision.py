"""Cost of rounding for the served base: measured once for a base and its arithmetic, and kept."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from loraserve.background import BackgroundTask
from loraserve.base_advice import better_choice, is_low
from loraserve.db.models import BasePrecisionRow
from loraserve.db.session import Clock, Database
from loraserve.db.upsert import upsert
from loraserve.errors import EngineError, EngineUnavailable
from loraserve.limits import LIMITS
from loraserve.types import BasePrecision, BaseSpec

logger = logging.getLogger(__name__)

MeasureBase = Callable[[], Awaitable[BasePrecision | str]]

_MAX_FAILURES = 3
"""Measurements of a base that may fail before it stays unmeasured until the next start."""
_FIELDS = ("num_positions", "top1_agreement", "mean_divergence", "loss", "served_loss")


@dataclass(frozen=True, slots=True)
class MeasuredPrecision:
    """Measurement, and its time."""

    precision: BasePrecision
    at: datetime


@dataclass(frozen=True, slots=True)
class KnownPrecision:
    """Rounding cost of the served base.

    Attributes:
        quantization: format that its weights are served in.
        measured: None: nothing is measured, for the reason in `note`.
        advice: flags that keep more of the base's answers; empty where rounding costs little.
    """

    quantization: str
    measured: MeasuredPrecision | None
    note: str = ""
    advice: str = ""


class BasePrecisions:
    """Look up, and measure where it isn't known, what rounding costs the served base.

    Args:
        base: returns the resident base; raises `EngineUnavailable` while there is none.
        measure: has the engine measure it while it serves, or returns the reason why there is
            nothing to measure; None: what isn't known stays so.
    """

    def __init__(
        self,
        database: Database,
        base: Callable[[], BaseSpec],
        measure: MeasureBase | None,
        *,
        clock: Clock,
    ) -> None:
        self.num_measured = 0
        """Measurements since the start."""
        self._database, self._base, self._measure, self._clock = database, base, measure, clock
        self._known: tuple[tuple[str, ...], KnownPrecision] | None = None
        self._num_failures = 0
        self._task = BackgroundTask(
            "base precision",
            self.look,
            lambda: LIMITS.base_precision_interval_s,
            failure="what rounding costs the base can't be measured now",
            logger=logger,
            level=logging.INFO,
            logs_once=True,
        )

    def start(self) -> None:
        """Look from now on, until `close`."""
        self._task.start()

    async def close(self) -> None:
        """Stop; a measurement under way is abandoned."""
        await self._task.close()

    @property
    def current(self) -> KnownPrecision | None:
        """Rounding cost of the base that is served now; None: unknown yet."""
        try:
            key = _key(self._base())
        except EngineUnavailable:
            return None
        return self._known[1] if self._known is not None and self._known[0] == key else None

    async def look(self) -> None:
        """Find out about the served base, unless that is known.

        Raises:
            DatabaseUnavailable
            EngineUnavailable: it can't be measured now.
            EngineError: a measurement failed; the last of `_MAX_FAILURES` is kept as a note.
        """
        try:
            base = self._base()
        except EngineUnavailable:
            return
        if self.current is not None:
            return
        key = _key(base)
        async with self._database.read() as session:
            row = await session.scalar(select(BasePrecisionRow).filter_by(**_columns(key)))
        if row is not None:
            found = BasePrecision(**{field: getattr(row, field) for field in _FIELDS})
            self._keep(base, found, row.measured_at)
            return
        if self._measure is None:
            return
        try:
            measured = await self._measure()
        except EngineUnavailable:
            raise
        except EngineError as error:
            self._num_failures += 1
            if self._num_failures < _MAX_FAILURES:
                raise
            self._num_failures = 0
            measured = f"its measurement failed {_MAX_FAILURES} times; the last time: {error.message}"
        if isinstance(measured, str):
            self._known = key, KnownPrecision(base.quantization, None, note=measured)
            return
        self.num_measured += 1
        now = self._clock()
        values = {field: getattr(measured, field) for field in _FIELDS}
        async with self._database.write() as session:
            # another server may have been first
            await upsert(session, BasePrecisionRow, [{**_columns(key), **values, "measured_at": now}])
        self._keep(base, measured, now)

    def _keep(self, base: BaseSpec, found: BasePrecision, at: datetime) -> None:
        low = is_low(found.top1_agreement, found.mean_divergence)
        advice = better_choice(base.quantization, base.arithmetic) if low else ""
        known = KnownPrecision(base.quantization, MeasuredPrecision(found, at), advice=advice)
        self._known = _key(base), known
        if low:
            logger.warning(
                "rounding base %s to %s (%s) changes its answers: the same likeliest token at %.1f %% of positions, "
                "%.2g nats of divergence from float32. Start with %s to keep more of them.",
                base.id,
                base.quantization,
                base.arithmetic or base.dtype,
                100 * found.top1_agreement,
                found.mean_divergence,
                known.advice,
            )


def _key(base: BaseSpec) -> tuple[str, ...]:
    return base.digest, base.quantization, base.dtype, base.arithmetic, base.device


def _columns(key: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(("base_digest", "quantization", "dtype", "arithmetic", "device"), key, strict=True))
