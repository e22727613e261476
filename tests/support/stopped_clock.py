"""Clock that shows what a test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoppedClock:
    """Return `now_s` when called, as `time.monotonic` and `time.time` do."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
