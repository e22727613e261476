"""Requests that wait, and whose turn it is."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter

from loraserve.engine.fairness import PROMPT_COST, Account, Accounts, Share
from loraserve.engine.ranking import NEVER, Key
from loraserve.engine.request import Request, Status
from loraserve.engine.scheduled import ScheduledRequest

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
        if request.probe is not None and request.probe.has_own_step:
            self.apart.append(request)
        elif request.is_express:
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
        if request.probe is not None and request.probe.has_own_step:
            self.apart.remove(request)
        elif request.is_express:
            self._express.remove(request)
        else:
            self._accounts.remove(request)
            self._num_others -= 1

    def first(self, count: int) -> list[Request]:
        """Those whose turn is soonest, as far as that can be told, but for those that are to have a step of their own."""
        found = self._express[:count]
        turns: list[_Turn] = []
        heap: list[tuple[float, int]] = []
        while len(found) < count and (account := self._accounts.ranking.pop()) is not None:
            heapq.heappush(heap, (account.received, len(turns)))
            turns.append(_Turn(account))
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
    a turn in its stead: what it can't use is no credit for later. One for whom the others left no room isn't lifted: it is still owed what it didn't get.

    Attributes:
        is_admitting: whether those that wait have turns. May be set to False on the way.
    """

    def __init__(
        self,
        line: Line,
        begun: Sequence[Request],
        scheduled: list[ScheduledRequest],
        *,
        is_admitting: bool = True,
    ) -> None:
        """
        Args:
            begun: those that run and have more than one token to go.
            scheduled: the step so far: whoever is added to it had its turn.
        """
        self.is_admitting = is_admitting
        self._line = line
        self._begun = begun
        self._scheduled = scheduled
        self._current: _Turn | None = None
        self._is_turn_over = self._is_lifted = False
        self._is_over = False

    def end(self) -> None:
        """Nobody has a turn any more."""
        self._is_over = True

    def end_turn(self, *, is_lifted: bool = False) -> None:
        """The tenant whose request it was has no turn after this one.

        Args:
            is_lifted: whether that is by a limit of its own, so that its turn is lost to it.
        """
        self._is_turn_over, self._is_lifted = True, is_lifted

    def end_share(self) -> None:
        """Nor have those of its tenant's requests that wait for the same adapter."""
        if self._current is not None:
            self._current.end_share()

    def __iter__(self) -> Iterator[Request]:
        express = [request for request in self._begun if request.is_express]
        for request in chain(express, list(self._line.express) if self.is_admitting else ()):
            if not self._is_over and (self.is_admitting or request.status is Status.RUNNING):
                yield request
        turns: list[_Turn] = []
        try:
            yield from self._of_tenants(turns)
        finally:
            for turn in turns:
                turn.close()
                self._line.accounts.ranking.push(turn.account)

    def _of_tenants(self, turns: list[_Turn]) -> Iterator[Request]:
        """Turn by turn; those of tenants that had one are put into ``turns``.

        Tenants with something begun are in the heap from the first, others once nobody in it had less.
        """
        ranking, heap = self._line.accounts.ranking, self._begun_turns(turns)
        passed: list[Account] = []
        had_turns = {id(turn.account) for turn in turns}
        while not self._is_over:
            following = ranking.peek() if self.is_admitting else None
            if following is not None and (not heap or (following.rank or NEVER) < heap[0][0]):
                ranking.pop()
                if id(following) not in had_turns:
                    had_turns.add(id(following))
                    turns.append(_Turn(following))
                    heapq.heappush(heap, (turns[-1].key, len(turns) - 1))
                continue
            if not heap:
                return
            turn = turns[heap[0][1]]
            candidate = turn.next(self.is_admitting)
            if candidate is None:
                heapq.heappop(heap)
                if self.is_admitting and not turn.was_served:
                    passed.append(turn.account)
                continue
            received = turn.account.received
            self._is_turn_over, self._current = False, turn
            yield candidate
            if self._scheduled and self._scheduled[-1].request is candidate:
                turn.note_served()
                for account in passed:
                    account.received = max(account.received, received)
                passed.clear()
                heapq.heapreplace(heap, (turn.key, heap[0][1]))
            elif self._is_turn_over:
                heapq.heappop(heap)
                if self._is_lifted and not turn.was_served:
                    passed.append(turn.account)

    def _begun_turns(self, turns: list[_Turn]) -> list[tuple[Key, int]]:
        by_account: dict[int, _Turn] = {}
        for request in self._begun:
            if not request.is_express:
                account = request.share.account
                by_account.setdefault(id(account), _Turn(account)).begun.append(request)
        turns += by_account.values()
        heap = [(turn.key, number) for number, turn in enumerate(turns)]
        heapq.heapify(heap)
        return heap


class _Turn:
    """A tenant's requests, in the order in which they have its turns. `close` gives back what it took of the tenant's ranking."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.begun: list[Request] = []
        self.was_served = False
        self._num_begun = 0
        self._shares: list[Share] = []
        self._has_share: set[int] = set()
        # (priority of its next request, what it had, that request's age), which of the shares, the request, those after it
        self._heap: list[tuple[Key, int, Request, Iterator[Request]]] = []
        self._current: Share | None = None
        self._is_share_over = False
        self._received = 0.0
        self._passed: list[Share] = []

    @property
    def key(self) -> Key:
        return self.account.received, self.account.num_running / self.account.weight, 0

    def next(self, is_admitting: bool) -> Request | None:
        """The next of them; None if there is none."""
        while self._num_begun < len(self.begun):
            request = self.begun[self._num_begun]
            self._num_begun += 1
            # not if it was preempted on the way
            if request.status is Status.RUNNING:
                return request
        if not is_admitting:
            return None
        if self._current is not None:
            # the one that had its turn last
            _, number, _, others = heapq.heappop(self._heap)
            self._push(number, iter(()) if self._is_share_over else others)
            self._current = None
        following = self.account.ranking.peek()
        while following is not None and (not self._heap or (following.rank or NEVER) < self._heap[0][0]):
            self.account.ranking.pop()
            if id(following) not in self._has_share:
                self._has_share.add(id(following))
                self._shares.append(following)
                self._push(len(self._shares) - 1, iter(tuple(following.waiting)))
            following = self.account.ranking.peek()
        if not self._heap:
            return None
        _, number, request, _ = self._heap[0]
        self._current, self._is_share_over = self._shares[number], False
        self._received = self._current.received
        return request

    def end_share(self) -> None:
        """The others that wait for the same adapter as the last one have no turn."""
        self._is_share_over = True

    def note_served(self) -> None:
        """The request that had its turn last is in the step."""
        self.was_served = True
        if self._current is None:
            return
        for share in self._passed:
            if share is not self._current:
                share.received = max(share.received, self._received)
        self._passed.clear()

    def close(self) -> None:
        for share in self._shares:
            self.account.ranking.push(share)

    def _push(self, number: int, others: Iterator[Request]) -> None:
        request, share = next(others, None), self._shares[number]
        if request is not None:
            key = (request.priority, share.received, request.sequence_number)
            heapq.heappush(self._heap, (key, number, request, others))
        elif share.waiting:
            self._passed.append(share)
