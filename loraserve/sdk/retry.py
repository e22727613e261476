"""Retries: when a request is repeated, and after which delay."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from loraserve.errors import LoraserveError

OnWait = Callable[[float, LoraserveError], object]
"""Function that is called before each wait for another try, with its seconds and the reason."""

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 120.0
"""A server that asks for a longer wait than this gets no second try: the caller should know."""

_ALWAYS = frozenset({408, 429, 502, 503, 504})
_WHEN_ASKED = frozenset({409, 500, 507})
"""Worth another try only where the server says so, with a time to wait or ``x-should-retry``."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of retries and their delays.

    A delay is the server's own, else doubling from half a second with jitter.
    """

    max_retries: int = 2
    random: Callable[[], float] = random.random
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def delay_after_failure(self, attempt: int) -> float | None:
        """Return the seconds to wait after try number `attempt` (from 0) got no answer.

        None: give up.
        """
        return None if attempt >= self.max_retries else self._backoff(attempt)

    def delay_after_answer(self, attempt: int, status_code: int, headers: Mapping[str, str]) -> float | None:
        """Return the seconds to wait after try number `attempt` (from 0) was refused.

        None: the refusal stands.
        """
        if attempt >= self.max_retries:
            return None
        asked = retry_after_s(headers, self.now())
        match headers.get("x-should-retry"):
            case "false":
                return None
            case "true":
                pass
            case _ if status_code not in _ALWAYS and not (status_code in _WHEN_ASKED and asked is not None):
                return None
        if asked is None:
            return self._backoff(attempt)
        return asked if asked <= MAX_RETRY_AFTER_S else None

    def _backoff(self, attempt: int) -> float:
        # Up to a quarter less: clients that failed together shouldn't come back together.
        return min(FIRST_DELAY_S * 2.0**attempt, MAX_DELAY_S) * (1 - 0.25 * self.random())


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the delay that the server requests.

    It is in ``retry-after-ms``, else in ``retry-after`` (seconds or a date).
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    if text is None:
        return None
    seconds = _number(text)
    if seconds is not None:
        return seconds
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (date - now).total_seconds()) if date.tzinfo is not None else None


def _number(text: str | None) -> float | None:
    """Return a finite number that isn't negative; None for anything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
