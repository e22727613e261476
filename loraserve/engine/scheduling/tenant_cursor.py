"""A tenant's turn in a step: which of its requests is next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduling.blocked import Away
from loraserve.engine.scheduling.fair_queue import Account, Share, turn_key
from loraserve.engine.scheduling.ranking import NEVER, Key


class Turn:
    """A tenant's requests, in the order in which they have its turns. `close` gives back what it took of the tenant's ranking.

    Args:
        away: shares that have turns too, though none of their requests can begin.
        is_closed: as in `Turns`.
    """

    def __init__(self, account: Account, *, away: Iterable[Share] = (), is_closed: bool = False) -> None:
        self.account = account
        self.begun: list[Request] = []
        self.was_served = False
        self._num_begun = 0
        self._shares: list[_ShareTurn] = []
        self._has_share: set[int] = set()
        # (priority of its next request, what it had, that request's age), which of the shares, the request; None: its last one was passed over
        self._heap: list[tuple[Key, int, Request | None]] = []
        self._current: _ShareTurn | None = None
        self._received = 0.0
        self._passed: list[Share] = []
        self._is_closed = is_closed
        self._away = iter(away)
        self._next_away = next(self._away, None)
        account.levels.begin_turn()

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
            self._push(heapq.heappop(self._heap)[1])
            self._current = None
        while True:
            while (following := self._take_share()) is not None:
                if id(following) not in self._has_share:
                    self._has_share.add(id(following))
                    self._shares.append(_ShareTurn(following, is_closed=self._is_closed))
                    self._push(len(self._shares) - 1)
            if not self._heap:
                return None
            _, number, candidate = self._heap[0]
            if candidate is not None:
                break
            heapq.heappop(self._heap)
            self._pass(self._shares[number].share)
        self._current = self._shares[number]
        self._current.visited = candidate
        self._received = self._current.share.received
        return candidate

    def _take_share(self) -> Share | None:
        """The tenant's next share, if it comes before those that have begun their turns."""
        following, rank = self.account.ranking.peek(), NEVER
        if following is not None:
            rank = following.rank or NEVER
        is_away = self._next_away is not None and (turn_key(self._next_away) or NEVER) < rank
        if is_away and self._next_away is not None:
            following, rank = self._next_away, turn_key(self._next_away) or NEVER
        if following is None or (self._heap and not rank < self._heap[0][0]):
            return None
        if is_away:
            self._next_away = next(self._away, None)
        else:
            self.account.ranking.pop()
        return following

    def pass_share(self) -> None:
        """The last one can't begin, its adapter isn't there: of the others that wait for it only those have turns to whom that is news."""
        if self._current is not None:
            self._current.pass_over()

    def note_served(self) -> None:
        """The request that had its turn last is in the step."""
        self.was_served = True
        if self._current is None:
            return
        for share in self._passed:
            if share is not self._current.share:
                share.received = max(share.received, self._received)
        self._passed.clear()
        self.account.levels.lift(self._heap[0][0], self._received)

    def close(self) -> None:
        for turn in self._shares:
            self.account.ranking.push(turn.share)

    def put_away(self, away: Away, now_s: float) -> None:
        """Those of its shares that can't begin have no turn until that may have changed."""
        for turn in self._shares:
            turn.put_away(away, now_s)

    def _push(self, number: int) -> None:
        turn = self._shares[number]
        request = next(turn.others, None)
        share, at = turn.share, request or turn.unvisited_last
        if at is None:
            self._pass(share)
        else:
            heapq.heappush(self._heap, ((at.priority, share.received, at.sequence_number), number, request))

    def _pass(self, share: Share) -> None:
        if share.waiting:
            self._passed.append(share)


class _ShareTurn:
    """Those of a share's requests that have turns, as it stood when the first of them had its own.

    Attributes:
        others: those that are still to have theirs.
        visited: the last that had its own.
    """

    def __init__(self, share: Share, *, is_closed: bool) -> None:
        self.share = share
        self.visited: Request | None = None
        self._is_closed = is_closed
        self._is_away = False
        self._fresh = tuple(share.fresh)
        waiting = tuple(share.waiting)
        self._last: Request | None = waiting[-1] if waiting else None
        self.others: Iterator[Request] = iter(waiting)
        if is_closed:
            can_begin = share.num_pinned or share.num_cold
            self.others = (
                (r for r in waiting if r.pin or r.adapter_wait_started_s is not None) if can_begin else iter(())
            )

    @property
    def unvisited_last(self) -> Request | None:
        """The share is passed over once its turn would have come to this request."""
        return None if self.visited is self._last else self._last

    def pass_over(self) -> None:
        share, visited = self.share, self.visited
        if visited is not None and visited.status is Status.FINISHED:
            # its adapter's load failed: the others are told now, too, not after as many loads
            return
        if share.num_cold == len(share.waiting):
            self.others, self._last = iter(()), None
            self._is_away = self._is_away or _is_cold(visited)
        elif _is_cold(visited) and not self._is_away:
            self._is_away = True
            rest = () if self._is_closed and not share.num_pinned else self._fresh
            self.others = (r for r in rest if r.order > visited.order and (r.pin or not self._is_closed))

    def put_away(self, away: Away, now_s: float) -> None:
        share = self.share
        if not share.waiting or share.num_live > len(share.waiting) or share.num_pinned:
            return
        if self._is_away and not share.fresh:
            away.put(share, share.waiting[0], now_s)
        elif self._is_closed and (self._is_away or not share.num_cold):
            away.put(share, share.waiting[-1], now_s, is_blocked=True)


def _is_cold(request: Request | None) -> TypeGuard[Request]:
    """Whether it waits for its adapter."""
    return request is not None and request.status is Status.WAITING and request.adapter_wait_started_s is not None
