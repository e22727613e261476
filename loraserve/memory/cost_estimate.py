"""How long something takes, by what was measured of late."""

from __future__ import annotations

_KEPT = 0.95
"""Of what was measured before, with each measurement: about twenty count."""


class Pace:
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
