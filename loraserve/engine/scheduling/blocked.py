"""Shares none of whose requests can begin: no step looks at them until something has changed.

A share is away while the adapter that all of its requests wait for isn't there, or the line for space is closed. It has nothing running. It is looked at again once
the pager says that its adapter has changed, once somebody comes or goes, once the line opens, and every now and then, since the pager forgets who doesn't ask.

What it can't use is no credit for later: its counter rises as if every turn of its tenant had passed over it. Many that had as much rise as one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve.engine.scheduling.ranking import Key
from loraserve.types import Digest

if TYPE_CHECKING:
    from loraserve.engine.request import Request
    from loraserve.engine.scheduling.fair_queue import Share

LOOK_S = 1.0
"""So long the pager isn't asked again for an adapter that isn't there, if it says nothing by itself."""
MAX_LOOKS = 16
"""So many are looked at again in a step for that, at most: those of a burst needn't be all at once."""
MAX_AWAY_S = 2.5
"""Then however many there are: well within the pager's `INTEREST_S`."""


@dataclass(slots=True, eq=False)
class Level:
    """Away shares of a tenant that had as much.

    Attributes:
        priority: of the requests at which a turn has passed the shares.
        members: with the sequence numbers of those requests, by which they are sorted.
        turn: the last in which they were passed over for somebody who was served.
    """

    priority: int
    received: float
    members: list[tuple[int, Share]]
    turn: int = 0

    def split(self, sequence_number: int) -> Level | None:
        """Keep those that a turn passes before this number; return the others."""
        index = bisect_left(self.members, (sequence_number,))
        if index == len(self.members):
            return None
        later = Level(self.priority, self.received, self.members[index:], self.turn)
        del self.members[index:]
        for _, share in later.members:
            share.level = later
        return later


def _key(level: Level) -> tuple[int, float]:
    return level.priority, level.received


class Levels:
    """A tenant's away shares, in the order in which its turn would pass them: by priority, then by what they had."""

    def __init__(self) -> None:
        self._levels: list[Level] = []
        self._turn = 0

    def __iter__(self) -> Iterator[Share]:
        for level in self._levels:
            for _, share in level.members:
                yield share

    def begin_turn(self) -> None:
        """Each may be lifted once more: in a turn it is passed over once."""
        self._turn += 1

    def put(self, share: Share, last: Request) -> None:
        """The share is away. A turn has passed it once it has passed its request ``last``."""
        key = (last.priority, share.received)
        index = bisect_left(self._levels, key, key=_key)
        if index == len(self._levels) or _key(self._levels[index]) != key:
            self._levels.insert(index, Level(*key, []))
        level = share.level = self._levels[index]
        share.passed_at = last.sequence_number
        insort(level.members, (last.sequence_number, share))

    def take(self, share: Share) -> None:
        """It isn't any more, and has what it was lifted to."""
        level = share.level
        if level is None:
            return
        del level.members[bisect_left(level.members, (share.passed_at,))]
        if not level.members:
            index = bisect_left(self._levels, _key(level), key=_key)
            while self._levels[index] is not level:
                index += 1
            del self._levels[index]
        share.level = None
        share.received = level.received

    def lift(self, key: Key, received: float) -> None:
        """A request that stood at ``key`` was served, when its share had ``received``: those before it that this turn hasn't lifted yet have no less."""
        priority, reached, sequence_number = key
        end = bisect_right(self._levels, (priority, reached), key=_key)
        kept: list[Level] = []
        lifted: dict[int, Level] = {}
        for level in self._levels[:end]:
            if level.turn == self._turn:
                kept.append(level)
                continue
            if _key(level) == (priority, reached):
                later = level.split(int(sequence_number))
                kept += [] if later is None else [later]
                if not level.members:
                    continue
            level.turn = self._turn
            if level.received >= received:
                kept.append(level)
            else:
                other = lifted.get(level.priority)
                lifted[level.priority] = level if other is None else _merged(other, level)
        for level in lifted.values():
            level.received = received
        self._levels[:end] = sorted([*kept, *lifted.values()], key=_key)
        if received > reached:
            # its counter rose after it was given its place in the turn
            self._levels.sort(key=_key)


def _merged(one: Level, other: Level) -> Level:
    if len(one.members) < len(other.members):
        one, other = other, one
    for _, share in other.members:
        share.level = one
    one.members += other.members
    # by sequence number alone: no two are alike
    one.members.sort(key=_sequence_number)
    return one


def _sequence_number(member: tuple[int, Share]) -> int:
    return member[0]


class Away:
    """Every tenant's away shares, and what brings each back."""

    def __init__(self) -> None:
        # in the order in which the pager was asked for their adapters
        self._asked_s: OrderedDict[Share, float] = OrderedDict()
        self._by_adapter: dict[Digest, dict[Share, None]] = {}
        # those that wait for the line to open
        self._blocked: dict[Share, None] = {}

    def put(self, share: Share, last: Request, now_s: float, *, is_blocked: bool = False) -> None:
        """No step looks at the share until it is woken.

        Args:
            last: a turn has passed the share once it has passed this one of its requests.
            is_blocked: whether some of its requests may not begin while the line is closed.
        """
        share.account.levels.put(share, last)
        if is_blocked:
            self._blocked[share] = None
        if share.num_cold and share.adapter is not None:
            self._asked_s[share] = now_s
            self._by_adapter.setdefault(share.adapter, {})[share] = None

    def wake(self, share: Share) -> None:
        """It stands among its tenant's others again, if it didn't."""
        if share.level is None:
            return
        share.account.levels.take(share)
        self._blocked.pop(share, None)
        if self._asked_s.pop(share, None) is not None and share.adapter is not None:
            sharers = self._by_adapter[share.adapter]
            del sharers[share]
            if not sharers:
                del self._by_adapter[share.adapter]
        share.account.ranking.push(share)

    def wake_changed(self, adapters: Iterable[Digest]) -> None:
        """These are where they weren't."""
        for adapter in adapters:
            for share in list(self._by_adapter.get(adapter, ())):
                self.wake(share)

    def wake_due(self, now_s: float) -> None:
        """The pager is to be asked again for those of which it was asked longest ago."""
        num_woken = 0
        while self._asked_s:
            share, asked_s = next(iter(self._asked_s.items()))
            age_s = now_s - asked_s
            if age_s < LOOK_S or (num_woken >= MAX_LOOKS and age_s < MAX_AWAY_S):
                return
            self.wake(share)
            num_woken += 1

    def wake_blocked(self) -> None:
        """The line is open."""
        for share in list(self._blocked):
            self.wake(share)
