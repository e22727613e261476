"""Running requests that start over later, so that others have the blocks or the places that they need."""

from __future__ import annotations

import math
from collections.abc import Callable

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduling.fair_queue import Accounts
from loraserve.engine.scheduling.queue import Line
from loraserve.engine.scheduling.quota import Holdings
from loraserve.engine.scheduling.step import Step

MAX_FAIR_PREEMPTIONS = 3
"""A request that was put back so often isn't put back for fairness' sake any more: it is one of those of which the youngest goes, and so will end."""


class Preemption:
    """Chooses who is put back, and puts it back into the line.

    Args:
        running: the scheduler's, sorted by order: who is put back leaves it.

    Attributes:
        num: how often that was done.
        num_fair: of those, for a tenant that had less than its part of the places or of the KV blocks, or by one that held more than it may.
    """

    def __init__(self, running: list[Request], line: Line, holdings: Holdings, accounts: Accounts) -> None:
        self.num = 0
        self.num_fair = 0
        self._running, self._line, self._holdings, self._accounts = running, line, holdings, accounts

    def keep(self, request: Request, count: int, step: Step) -> bool:
        """Give a running request the blocks that it needs, if need be of others; False if it is put back itself."""
        while True:
            if self._holdings.exceeds_share(request, count):
                taken = {id(entry.request) for entry in step.scheduled}
                account = request.share.account
                own = [r for r in self._running if r.share.account is account and id(r) not in taken]
                victim = own[-1]
                self.num_fair += 1
            elif self._holdings.reserve(request, count):
                return True
            else:
                step.is_short = True
                victim = self._choose_victim(request, step)
            self.put_back(victim, step)
            if victim is request:
                return False

    def take_blocks(self, step: Step) -> bool:
        """Put one back of a tenant that holds more blocks than its part, for one that has less; False if there is none to put back."""
        return self._take(self._find_over(lambda other: self._holdings.holds_more(other.share.account)), step)

    def take_place_for(self, request: Request, step: Step) -> bool:
        """Put one back so that the request, of a tenant that has less than its part of the places, has a place; False if there is none to put back."""
        return self._take(self._find_place(request), step)

    def has_place_for(self, request: Request) -> bool:
        """Whether `take_place_for` would find one."""
        return self._find_place(request) is not None

    def _take(self, victim: Request | None, step: Step) -> bool:
        if victim is None:
            return False
        self.num_fair += 1
        self.put_back(victim, step)
        return True

    def _find_place(self, request: Request) -> Request | None:
        """Who is put back for the request to have a place: of a tenant with more than its part, that had no less than the request's by its weight.

        A place taken of one that had less would set the counters further apart, each time again: a part of the places is a whole number of them, and one at least,
        which may be far more than what is due to a tenant by its weight.
        """
        received = -math.inf if request.is_urgent else request.share.account.received
        return self._find_over(
            lambda other: (
                self._holdings.has_places_to_give(other.share.account) and other.share.account.received >= received
            )
        )

    def has_place_to_give(self) -> bool:
        """Whether some tenant has more than its part of the places, beside others."""
        if self._accounts.num_live < 2:
            return False
        accounts = {id(request.share.account): request.share.account for request in self._running}
        return any(map(self._holdings.has_places_to_give, accounts.values()))

    def _find_over(self, is_over: Callable[[Request], bool]) -> Request | None:
        """Of the running requests of tenants that have more than their part, the one that loses least, in this step already or not: the youngest of those that
        decode, since what has been answered is in the prefix cache.
        """
        candidates = [
            request
            for request in reversed(self._running)
            if not request.is_urgent
            and not request.is_internal
            and request.num_preemptions < MAX_FAIR_PREEMPTIONS
            and request.num_pending_tokens > 0
            and is_over(request)
        ]
        return min(candidates, key=lambda request: request.num_pending_tokens > 1, default=None)

    def _choose_victim(self, request: Request, step: Step) -> Request:
        """The running request that loses least, of a tenant that holds more than its part if there is one that wasn't put back for that too often: one that only
        waits for its last token, else the lowest priority, then the youngest.

        One already in this step is left alone.
        """
        taken = {id(entry.request) for entry in step.scheduled}
        candidates = [other for other in reversed(self._running) if id(other) not in taken]
        if self._accounts.num_live > 1:
            over = [
                other
                for other in candidates
                if other.num_preemptions < MAX_FAIR_PREEMPTIONS
                and not other.is_urgent
                and self._holdings.holds_more(other.share.account)
            ]
            candidates = over or candidates
        return min(candidates, key=lambda other: other.num_pending_tokens > 0)

    def put_back(self, request: Request, step: Step) -> None:
        """Take a request's blocks and let it start over later; its tokens, its adapter's pin and its place stay. A part that it had in this step is somebody else's."""
        step.give_back(request)
        if request.num_pending_tokens == 0:
            # its place was free already
            step.num_places -= 1
        self._running.remove(request)
        request.share.account.num_running -= 1
        self._holdings.drop_blocks(request, is_use=False)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num += 1
        step.preempted.append(request)
        self._line.add(request)
