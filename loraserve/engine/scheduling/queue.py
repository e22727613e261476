"""Requests that wait, and whose turn it is."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.fair_queue import PROMPT_COST, Account, Accounts
from loraserve.engine.scheduling.ranking import NEVER, Key
from loraserve.engine.scheduling.tenant_cursor import Turn
from loraserve.types import Digest

_ORDER = attrgetter("order")


class Line:
    """Every request that waits, in one of three places: probes that are to have a step of their own; those before everybody, by priority and age; and the others, in
    their tenants' accounts.

    Attributes:
        apart: the first.
        version: changes whenever somebody comes or goes.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.apart: list[Request] = []
        self.version = 0
        self._accounts = accounts
        self._express: list[Request] = []
        self._num_others = 0

    def __len__(self) -> int:
        return len(self.apart) + len(self._express) + self._num_others

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order that means anything."""
        yield from self.apart
        yield from self._express
        yield from self._accounts.waiting

    @property
    def has_others(self) -> bool:
        """Whether anybody waits but for a step of its own."""
        return bool(self._express or self._num_others)

    def add(self, request: Request) -> None:
        """The request waits."""
        self.version += 1
        if request.is_exclusive:
            self.apart.append(request)
        elif request.is_urgent:
            insort(self._express, request, key=_ORDER)
        else:
            self._accounts.add(request)
            self._num_others += 1

    def remove(self, request: Request) -> None:
        """It waits no more.

        Raises:
            ValueError: it didn't.
        """
        self.version += 1
        if request.is_exclusive:
            self.apart.remove(request)
        elif request.is_urgent:
            self._express.remove(request)
        else:
            self._accounts.remove(request)
            self._num_others -= 1

    def first(self, count: int) -> list[Request]:
        """Those whose turn is soonest, as far as that can be told, but for those that are to have a step of their own."""
        found = self._express[:count]
        turns: list[Turn] = []
        heap: list[tuple[float, int]] = []
        while len(found) < count and (account := self._accounts.ranking.pop()) is not None:
            heapq.heappush(heap, (account.received, len(turns)))
            turns.append(Turn(account, away=account.levels))
            following = self._accounts.ranking.peek()
            while heap and len(found) < count and (following is None or heap[0][0] <= following.received):
                received, number = heap[0]
                request = turns[number].next(is_admitting=True)
                if request is None:
                    heapq.heappop(heap)
                    continue
                found.append(request)
                expected = request.num_pending_tokens * PROMPT_COST / turns[number].account.weight
                heapq.heapreplace(heap, (received + expected, number))
        for turn in turns:
            turn.close()
            self._accounts.ranking.push(turn.account)
        return found

    def note_changed(self, adapters: Iterable[Digest], now_s: float, *, is_closed: bool) -> None:
        """Who couldn't begin when it last had its turn, and perhaps can now, has turns again.

        Args:
            adapters: those that the pager says have come, failed or left the line.
            is_closed: whether the line for space is.
        """
        away = self._accounts.away
        away.wake_changed(adapters)
        away.wake_due(now_s)
        if not is_closed:
            away.wake_blocked()

    @property
    def express(self) -> Sequence[Request]:
        return self._express

    @property
    def accounts(self) -> Accounts:
        return self._accounts


class Turns:
    """One pass over all that could be computed next: each time the next request of the tenant that had least.

    What a request is charged while it has its turn counts at once: its tenant's next one comes after those of others that had less by then. A tenant's requests that
    have begun come first, then those that wait: the best priority first, then the adapter that had least, then the oldest.

    A tenant, or an adapter, none of whose requests could be computed now (its adapter isn't there, or it holds all the memory that it may) is lifted to whoever had
    a turn in its stead: what it can't use is no credit for later. One for whom the others left no room is still owed what it didn't get, within bounds (`end_turn`).

    Attributes:
        is_admitting: whether those that wait have turns. May be set to False on the way.
    """

    def __init__(
        self,
        line: Line,
        begun: Sequence[Request],
        scheduled: list[ScheduledRequest],
        *,
        now_s: float,
        is_admitting: bool = True,
        is_closed: bool = False,
    ) -> None:
        """
        Args:
            begun: those that run and have more than one token to go.
            scheduled: the step so far: whoever is added to it had its turn.
            is_closed: whether of a tenant's requests that wait only those may begin that have a pin, or wait for their adapter.
        """
        self.is_admitting = is_admitting
        self._line = line
        self._begun = begun
        self._scheduled = scheduled
        self._now_s = now_s
        self._is_closed = is_closed
        self._current: Turn | None = None
        self._is_turn_over = False
        self._owed = math.inf
        self._is_over = False

    def end(self) -> None:
        """Nobody has a turn any more."""
        self._is_over = True

    def end_turn(self, *, owed: float = math.inf) -> None:
        """The tenant whose request it was has no turn after this one.

        Args:
            owed: how much less than who has a turn in its stead it may have had, by its weight: the rest is lost to it. 0 where that is by a limit of its own.
        """
        self._is_turn_over, self._owed = True, owed

    def pass_share(self) -> None:
        """It can't begin, its adapter isn't there: nor can others of its tenant that wait for the same one."""
        if self._current is not None:
            self._current.pass_share()

    def __iter__(self) -> Iterator[Request]:
        express = [request for request in self._begun if request.is_urgent]
        for request in chain(express, list(self._line.express) if self.is_admitting else ()):
            if not self._is_over and (self.is_admitting or request.status is Status.RUNNING):
                yield request
        turns: list[Turn] = []
        try:
            yield from self._of_tenants(turns)
        finally:
            for turn in turns:
                turn.close()
                turn.put_away(self._line.accounts.away, self._now_s)
                self._line.accounts.ranking.push(turn.account)

    def _of_tenants(self, turns: list[Turn]) -> Iterator[Request]:
        """Turn by turn; those of tenants that had one are put into ``turns``.

        Tenants with something begun are in the heap from the first, others once nobody in it had less.
        """
        ranking, heap = self._line.accounts.ranking, self._begun_turns(turns)
        passed: list[tuple[Account, float]] = []
        had_turns = {id(turn.account) for turn in turns}
        while not self._is_over:
            following = ranking.peek() if self.is_admitting else None
            if following is not None and (not heap or (following.rank or NEVER) < heap[0][0]):
                ranking.pop()
                if id(following) not in had_turns:
                    had_turns.add(id(following))
                    turns.append(Turn(following, is_closed=self._is_closed))
                    heapq.heappush(heap, (turns[-1].key, len(turns) - 1))
                continue
            if not heap:
                return
            turn = turns[heap[0][1]]
            candidate = turn.next(self.is_admitting)
            if candidate is None:
                heapq.heappop(heap)
                if self.is_admitting and not turn.was_served:
                    passed.append((turn.account, 0.0))
                continue
            received = turn.account.received
            self._is_turn_over, self._current = False, turn
            yield candidate
            if self._scheduled and self._scheduled[-1].request is candidate:
                turn.note_served()
                for account, owed in passed:
                    account.received = max(account.received, received - owed)
                passed.clear()
                heapq.heapreplace(heap, (turn.key, heap[0][1]))
            elif self._is_turn_over:
                heapq.heappop(heap)
                if self._owed < math.inf and not turn.was_served:
                    passed.append((turn.account, self._owed))

    def _begun_turns(self, turns: list[Turn]) -> list[tuple[Key, int]]:
        by_account: dict[int, Turn] = {}
        for request in self._begun:
            if not request.is_urgent:
                account = request.share.account
                if id(account) not in by_account:
                    by_account[id(account)] = Turn(account, is_closed=self._is_closed)
                by_account[id(account)].begun.append(request)
        turns += by_account.values()
        heap = [(turn.key, number) for number, turn in enumerate(turns)]
        heapq.heapify(heap)
        return heap
