"""Adapters that are read before they are asked for."""

from __future__ import annotations

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduling.adapter_waits import AdapterSource
from loraserve.engine.scheduling.queue import Line

LOOK_AHEAD = 16
"""Of the requests that wait, so many of the first have their adapters read while they wait for a place in a step."""
LOOK_AGAIN = 16
"""Who those are is looked up again after so many steps, if nobody came or began before."""


class LookAhead:
    """Tells the pager, once a step, whose turn is soonest."""

    def __init__(self, adapters: AdapterSource, line: Line) -> None:
        self._adapters, self._line = adapters, line
        self._ahead: list[Request] = []
        self._looked_ahead: tuple[int, int] = (-1, 0)

    def look(self) -> None:
        """Adapters of those whose turn is soonest are read meanwhile."""
        version, age = self._looked_ahead
        is_old = age >= LOOK_AGAIN or len(self._ahead) < LOOK_AHEAD or self._ahead[-1].status is not Status.WAITING
        if is_old and version != self._line.version:
            self._looked_ahead = self._line.version, 0
            self._ahead = self._line.first(LOOK_AHEAD) if self._line.has_others else []
        else:
            self._looked_ahead = version, age + 1
        if self._ahead:
            ahead = [
                request.adapter
                for request in self._ahead
                if request.adapter is not None
                and request.pin is None
                and request.status is Status.WAITING
                # theirs are asked for in steps that have room for them
                and not request.is_internal
            ]
            if ahead:
                self._adapters.prefetch(ahead)
