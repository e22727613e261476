"""The value of idle content, by which the arena's caches choose what to evict.

It is the seconds to restore the content × uses per second ÷ bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from loraserve.types import Digest

USE_DECAY_S = 300.0
"""Seconds after which a use counts 1/e."""
MAX_NAMES = 65_536
"""Adapters whose uses are remembered."""
_KEPT_SHARE = 0.95
"""Weight that earlier measurements keep with each new one: about twenty count."""


@dataclass(frozen=True, slots=True)
class Uses:
    """A number of uses that decays with their age.

    Attributes:
        count: uses, each decayed by its age at `at_s`.
        at_s: when they were counted.
    """

    count: float = 0.0
    at_s: float = 0.0

    def used(self, now_s: float, count: float = 1.0) -> Uses:
        """Add a use, or the number of uses that are expected."""
        return Uses(self._decayed(now_s) + count, now_s)

    def per_second(self, now_s: float) -> float:
        """Compute the uses per second, averaged over about `USE_DECAY_S`."""
        return self._decayed(now_s) / USE_DECAY_S

    def _decayed(self, now_s: float) -> float:
        # never above what was counted, even if a clock goes back
        return self.count * math.exp(-max(0.0, now_s - self.at_s) / USE_DECAY_S)


NEVER = Uses()


class Popularity:
    """Uses of adapters by digest, wherever those are now. One thread at a time.

    It remembers `max_names` adapters and forgets those that were not used for the longest time.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        # the most recently used last
        self._uses: OrderedDict[Digest, Uses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, digest: Digest, now_s: float) -> None:
        """Count a use of the adapter now."""
        self._uses[digest] = self._uses.get(digest, NEVER).used(now_s)
        self._uses.move_to_end(digest)
        if len(self._uses) > self._max_names:
            self._uses.popitem(last=False)

    def per_second(self, digest: Digest, now_s: float) -> float:
        """Look up the adapter's recent uses per second; 0 if it was never used, or is forgotten."""
        return self._uses.get(digest, NEVER).per_second(now_s)


class CostEstimate:
    """Seconds per unit, byte or token, averaged over the last measurements by their units.

    One thread at a time.
    """

    def __init__(self, assumed_s: float) -> None:
        """Start from an assumed cost.

        Args:
            assumed_s: seconds per unit, until something is measured.
        """
        self._assumed_s = assumed_s
        self._seconds = 0.0
        self._units = 0.0

    @property
    def seconds_per_unit(self) -> float:
        return self._seconds / self._units if self._units else self._assumed_s

    def note(self, units: int, seconds: float) -> None:
        """Add a measurement: this many units took this long."""
        if units > 0 and seconds > 0:
            self._seconds = self._seconds * _KEPT_SHARE + seconds
            self._units = self._units * _KEPT_SHARE + units
