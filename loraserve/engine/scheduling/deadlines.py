"""When the requests end that said how long they have."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from loraserve.engine.request import Request, Status


class OwnTimes:
    """Requests by when their own time is over, the soonest first. Those that end in time are forgotten as others come."""

    def __init__(self) -> None:
        # (when its time is over, number, the request)
        self._entries: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, request: Request, deadline_s: float, *, num_live: int) -> None:
        """Its time is over then.

        Args:
            num_live: how many requests there are: not many more are remembered.
        """
        if len(self._entries) > 2 * num_live + 64:
            # those that ended in time
            self._entries = [entry for entry in self._entries if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (deadline_s, request.sequence_number, request))

    def take_over(self, now_s: float) -> Iterator[Request]:
        """Those that live and whose time is over, once."""
        while self._entries and self._entries[0][0] <= now_s:
            _, _, request = heapq.heappop(self._entries)
            if request.status is not Status.FINISHED:
                yield request
