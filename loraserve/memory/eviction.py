"""How likely things are to be used again: uses per second, of which older ones count less and less."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from loraserve.types import Digest

USE_DECAY_S = 300.0
"""A use counts 1/e after so long."""
MAX_NAMES = 65_536


@dataclass(frozen=True, slots=True)
class Uses:
    """
    Attributes:
        count: uses, each decayed by its age at `at_s`.
        at_s: when they were counted.
    """

    count: float = 0.0
    at_s: float = 0.0

    def used(self, now_s: float, count: float = 1.0) -> Uses:
        """One use more, or so many as are expected."""
        return Uses(self._decayed(now_s) + count, now_s)

    def per_second(self, now_s: float) -> float:
        return self._decayed(now_s) / USE_DECAY_S

    def _decayed(self, now_s: float) -> float:
        # never above what was counted, whatever a clock does
        return self.count * math.exp(-max(0.0, now_s - self.at_s) / USE_DECAY_S)


NEVER = Uses()


class Popularity:
    """Uses of adapters by digest, wherever those are now. Of more than `max_names`, the longest unused are forgotten. One thread at a time."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        # the last used last
        self._uses: OrderedDict[Digest, Uses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, digest: Digest, now_s: float) -> None:
        """The adapter was used once more, now."""
        self._uses[digest] = self._uses.get(digest, NEVER).used(now_s)
        self._uses.move_to_end(digest)
        if len(self._uses) > self._max_names:
            self._uses.popitem(last=False)

    def per_second(self, digest: Digest, now_s: float) -> float:
        """How often the adapter has been used of late; 0 if it never was, or is forgotten."""
        return self._uses.get(digest, NEVER).per_second(now_s)


_KEPT = 0.95
"""Of what was measured before, with each measurement: about twenty count."""


class CostEstimate:
    """Seconds per unit, byte or token: those of the last measurements together, so that large ones count for more. One thread at a time."""

    def __init__(self, assumed_s: float) -> None:
        """
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
        """So many units took so long."""
        if units > 0 and seconds > 0:
            self._seconds = self._seconds * _KEPT + seconds
            self._units = self._units * _KEPT + units
