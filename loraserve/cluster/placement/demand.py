"""Measured demand: requests for each version and to each replica, older ones counting less."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class DecayingCounts:
    """Counts by name that lose half of themselves every half-life.

    It remembers `max_names` and forgets those that weren't counted for the longest time. All counts
    are kept as of one moment and scaled together, so that a count costs no exponentiation of each.
    """

    def __init__(self, half_life_s: float, max_names: int) -> None:
        self._half_life_s = half_life_s
        self._max_names = max_names
        self._origin_s = 0.0
        # at the origin's time; the most recently counted last
        self._counts: OrderedDict[str, float] = OrderedDict()
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, name: str, now_s: float) -> None:
        """Count one more of the name now."""
        gain = self._gain(now_s)
        self._counts[name] = self._counts.get(name, 0.0) + gain
        self._counts.move_to_end(name)
        self._total += gain
        if len(self._counts) > self._max_names:
            self._total -= self._counts.popitem(last=False)[1]

    def remove(self, name: str) -> None:
        """Forget the name; no-op if absent."""
        self._total -= self._counts.pop(name, 0.0)

    def names(self) -> list[str]:
        return list(self._counts)

    def count(self, name: str, now_s: float) -> float:
        """Compute the name's decayed count; 0 if it was never counted, or is forgotten."""
        return self._counts.get(name, 0.0) / self._gain(now_s)

    def counts(self, names: Iterable[str], now_s: float) -> list[float]:
        """Compute the names' decayed counts."""
        worth = 1 / self._gain(now_s)
        return [self._counts.get(name, 0.0) * worth for name in names]

    def share(self, name: str) -> float:
        """Compute the name's part of all counts, between 0 and 1."""
        return self._counts.get(name, 0.0) / self._total if self._total > 0 else 0.0

    def _gain(self, now_s: float) -> float:
        """Compute what a count of now is worth at the origin; a clock that goes back adds none."""
        age = max(0.0, now_s - self._origin_s) / self._half_life_s
        if age > 64:
            # long before a float is full: everything is scaled to a new origin
            shrink = 0.5**age
            self._counts = OrderedDict((name, count * shrink) for name, count in self._counts.items())
            self._total = sum(self._counts.values())
            self._origin_s = now_s
            age = 0.0
        return float(2.0**age)
