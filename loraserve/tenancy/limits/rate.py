"""A rate per minute, as a bucket that drains all the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(slots=True)
class LeakyBucket:
    """How much of a rate was used of late: what is taken fills it, and it drains by `per_minute` in a minute.

    So a minute's worth may be taken at once, and never more than the rate in the long run. More than a minute's worth passes when
    the bucket is empty, and is paid off before anything else passes. The rate is told with each call: it may change.

    Args:
        at: when `used` was true, in seconds of a monotonic clock.
    """

    at: float
    used: float = 0.0

    def drain(self, per_minute: float, now: float) -> float:
        """How much counts as used now."""
        # `now` never runs backwards; `at` may be of a caller that read the clock a moment later
        elapsed_s = max(0.0, now - self.at)
        self.used = max(0.0, self.used - per_minute / MINUTE_S * elapsed_s)
        self.at = max(self.at, now)
        return self.used

    def wait_s(self, amount: float, per_minute: float, now: float) -> float:
        """How long until `amount` passes if nothing else is taken: 0, it does now; infinite, it never does."""
        if per_minute <= 0:
            return math.inf
        room = max(0.0, per_minute - amount)
        return max(0.0, (self.drain(per_minute, now) - room) * MINUTE_S / per_minute)

    def take(self, amount: float, per_minute: float, now: float) -> None:
        """`amount` is used; negative, it is given back. Never refuses: ask `wait_s` before."""
        self.used = max(0.0, self.drain(per_minute, now) + amount)

    def remaining(self, per_minute: float, now: float) -> int:
        """How much of it passes now."""
        # what is missing to a whole one by rounding alone counts as there
        return max(0, math.floor(per_minute - self.drain(per_minute, now) + 1e-9))

    def reset_s(self, per_minute: float, now: float) -> float:
        """How long until nothing counts as used any more."""
        return self.drain(per_minute, now) * MINUTE_S / per_minute if per_minute > 0 else MINUTE_S
