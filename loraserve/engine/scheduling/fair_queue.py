"""Who has had how much: virtual token counters (VTC, arXiv:2401.00588) of tenants, and of each tenant's adapters.

A counter is what was computed for somebody, in prompt tokens, by its weight. Whoever has the lowest is next. Who comes back with nothing waiting is lifted to
the lowest of those that wait, less a few steps' worth: having been away is no credit but for that much, so that two or three requests of a quiet tenant that come
close together needn't wait for one another's charges. What a tenant gets is divided among its adapters in the same way, so ten adapters have one tenant's share.

One thread at a time. Nothing here knows of memory or of steps.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from loraserve.engine.scheduling.blocked import Away, Level, Levels
from loraserve.engine.scheduling.ranking import Key, Ranking
from loraserve.types import Digest, TenantId

if TYPE_CHECKING:
    from loraserve.engine.request import Request

_ORDER = attrgetter("order")

PROMPT_COST = 1.0
"""Of a prompt's token that is computed; one that is found in the prefix cache costs nothing."""
OUTPUT_COST = 2.0
"""Of a token that is sampled: a row of its own, in a step that reads all weights for few rows."""
MAX_REMEMBERED = 4096
"""Of those that have nothing in the engine, so many at most are remembered for what they had."""
RECENT_S = 10.0
"""Service counts as recent for at least so long, and for less than twice as long."""
MAX_LIGHT = 8
"""A tenant with fewer requests waiting has little waiting."""
AVERAGED_S = 0.1
"""What all had lately is added up again after so long."""


@dataclass(slots=True, eq=False)
class Share:
    """What a tenant's requests for one adapter had, and those of them that wait.

    Attributes:
        adapter: its digest; None is the base.
        own_received: what it had, unless it is away: `received` is right either way.
        waiting: sorted by `Request.order`.
        fresh: of those, the ones that don't wait for their adapter.
        num_live: its requests, waiting and running.
        num_pinned: of those that wait, the ones that have their adapter's pin.
        level: of the shares that are away, those among which it stands; None: it isn't away.
        passed_at: a turn passes it, while it is away, at the request with this sequence number.
    """

    account: Account
    adapter: Digest | None
    own_received: float = 0.0
    waiting: list[Request] = field(default_factory=list, repr=False)
    fresh: list[Request] = field(default_factory=list, repr=False)
    num_live: int = 0
    num_pinned: int = 0
    rank: Key | None = None
    level: Level | None = field(default=None, repr=False)
    passed_at: int = 0

    @property
    def received(self) -> float:
        """Its counter."""
        return self.own_received if self.level is None else self.level.received

    @received.setter
    def received(self, received: float) -> None:
        self.own_received = received

    @property
    def num_cold(self) -> int:
        """Of those that wait, the ones that wait for their adapter."""
        return len(self.waiting) - len(self.fresh)

    def charge(self, cost: float) -> None:
        """The adapter, and its tenant, had so much more; less, if a part that was charged isn't computed after all."""
        account, by_weight = self.account, cost / self.account.weight
        self.received += cost
        account.received += by_weight
        account.served += by_weight


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant had, by its weight, and what it holds.

    Attributes:
        kv_share: the part of the KV blocks that it may hold.
        received: its counter.
        served: what it had in all: unlike its counter, nobody lifts that.
        ranking: those of its shares of which a request waits, but for those that have their turn just now, or are away.
        levels: those that are away.
        num_blocks: KV blocks that its requests hold; one that several share is counted for each.
        is_recent: whether it had something in the engine lately.
        is_nobody: whether its requests are the engine's own, which have turns like a tenant's, and take no part from any.
    """

    tenant: TenantId
    weight: float = 1.0
    kv_share: float = 1.0
    received: float = 0.0
    served: float = 0.0
    shares: dict[Digest | None, Share] = field(default_factory=dict, repr=False)
    num_live: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    is_recent: bool = False
    is_nobody: bool = False
    ranking: Ranking[Share] = field(default_factory=lambda: Ranking(share_key), repr=False)
    levels: Levels = field(default_factory=Levels, repr=False)
    rank: Key | None = None
    # the counter of its adapter that was the last to have something waiting
    last_left: float = 0.0
    # what it had when the present span of RECENT_S began, and the one before
    served_until: float = 0.0
    served_before: float = 0.0

    @property
    def recent(self) -> float:
        """What it had lately, by its weight."""
        return self.served - self.served_before


def share_key(share: Share) -> Key | None:
    """The best priority first, then the adapter that had least, then the oldest. None: nobody waits, or none of them can begin."""
    return None if share.level is not None else turn_key(share)


def turn_key(share: Share) -> Key | None:
    """The same, whether the share is away or not."""
    if not share.waiting:
        return None
    first = share.waiting[0]
    return first.priority, share.received, first.sequence_number


def _account_key(account: Account) -> Key | None:
    """The tenant that had least, of equals the one that has less running."""
    if not account.num_waiting:
        return None
    return account.received, account.num_running / account.weight, 0


class Accounts:
    """Every tenant with something in the engine, and of those without the ones that had something lately.

    Attributes:
        ranking: those of which a request waits, but for those that have their turn just now.
        away: those of their shares that no turn looks at.
        total_weight: of the tenants with something in the engine.
    """

    def __init__(self, credit: float) -> None:
        self._credit = credit
        self.total_weight = 0.0
        self.ranking: Ranking[Account] = Ranking(_account_key)
        self.away = Away()
        self._accounts: dict[TenantId, Account] = {}
        self._num_live_requests = 0
        self._num_live = 0
        # the counter of the tenant that was the last to have something waiting
        self._last_left = 0.0
        self._num_recent = 0
        self._aged_at_s = -math.inf
        self._averaged_at_s = -math.inf
        self._fair_recent = 0.0
        self._num_light = 0

    @property
    def num_live(self) -> int:
        """Tenants with something in the engine."""
        return self._num_live

    @property
    def waiting(self) -> Iterator[Request]:
        """Every request that waits."""
        for account in self._accounts.values():
            for share in account.shares.values():
                yield from share.waiting

    def open(
        self, tenant: TenantId, adapter: Digest | None, weight: float, kv_share: float, *, is_nobody: bool = False
    ) -> Share:
        """The share that a request which has come belongs to. Weight and part of the memory are its tenant's from now on.

        Args:
            is_nobody: whether it's the engine's own, by a tenant that has no others.
        """
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= 2 * self._num_live + MAX_REMEMBERED:
                self._accounts = {key: kept for key, kept in self._accounts.items() if kept.num_live}
                self._num_recent = sum(kept.is_recent for kept in self._accounts.values())
            account = self._accounts[tenant] = Account(tenant, is_nobody=is_nobody)
        if not account.is_nobody:
            self._count(account, weight, kv_share)
        share = account.shares.get(adapter)
        if share is None:
            if len(account.shares) >= 2 * account.num_live + MAX_REMEMBERED:
                account.shares = {key: kept for key, kept in account.shares.items() if kept.num_live}
            share = account.shares[adapter] = Share(account, adapter)
        self.away.wake(share)
        self._num_live_requests += 1
        account.num_live += 1
        share.num_live += 1
        return share

    def _count(self, account: Account, weight: float, kv_share: float) -> None:
        """A tenant is among those that share the engine."""
        if account.num_live:
            self.total_weight -= account.weight
        else:
            self._num_live += 1
        if not account.is_recent:
            account.is_recent = True
            self._num_recent += 1
        account.weight, account.kv_share = weight, kv_share
        self.total_weight += weight

    def close(self, share: Share) -> None:
        """One of its requests has ended. Once a tenant has none, its adapters owe each other nothing; once nobody has any, no tenant does."""
        account = share.account
        self._num_live_requests -= 1
        account.num_live -= 1
        share.num_live -= 1
        if account.num_live == 0:
            if not account.is_nobody:
                self._num_live -= 1
                self.total_weight -= account.weight
            account.shares.clear()
            account.ranking.clear()
            account.last_left = 0.0
        if self._num_live_requests == 0:
            # the first also for what sums of floats are off by
            self.total_weight = self._last_left = 0.0
            self.ranking.clear()
            for idle in self._accounts.values():
                idle.received = 0.0

    def add(self, request: Request) -> None:
        """The request waits."""
        share = request.share
        account = share.account
        if not account.num_waiting:
            least = self.ranking.peek()
            reached = self._last_left if least is None else least.received
            account.received = max(account.received, reached - self._credit)
        if not share.waiting:
            others = (other.received for other in account.shares.values() if other.waiting)
            share.received = max(share.received, min(others, default=account.last_left))
        insort(share.waiting, request, key=_ORDER)
        insort(share.fresh, request, key=_ORDER)
        share.num_pinned += request.pin is not None
        account.num_waiting += 1
        account.ranking.push(share)
        self.ranking.push(account)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        share = request.share
        account = share.account
        self.away.wake(share)
        share.waiting.remove(request)
        if request.adapter_wait_started_s is None:
            share.fresh.remove(request)
        share.num_pinned -= request.pin is not None
        account.num_waiting -= 1
        if not share.waiting:
            account.last_left = share.received
        if not account.num_waiting:
            self._last_left = account.received

    def is_ahead(self, account: Account, now_s: float) -> bool:
        """Whether the tenant had more than others lately, by its weight, and one of those had far less and has little waiting: something of it may come at any moment."""
        if self._num_recent < 2:
            return False
        if now_s - self._averaged_at_s >= AVERAGED_S:
            self._averaged_at_s = now_s
            recent = [one for one in self._accounts.values() if one.is_recent]
            self._fair_recent = sum(one.recent * one.weight for one in recent) / sum(one.weight for one in recent)
            few = self._fair_recent / 2
            self._num_light = sum(one.num_waiting < MAX_LIGHT and one.recent < few for one in recent)
        return account.recent > self._fair_recent and self._num_light > 0

    def age(self, now_s: float) -> None:
        """What was recent may be so no more."""
        if now_s - self._aged_at_s < RECENT_S:
            return
        self._aged_at_s = now_s
        for account in self._accounts.values():
            account.served_before, account.served_until = account.served_until, account.served
            account.is_recent = not account.is_nobody and (account.num_live > 0 or account.recent > 0.0)
        self._num_recent = sum(account.is_recent for account in self._accounts.values())

    def check(self) -> list[str]:
        """Return every broken invariant, in words."""
        problems = []
        for account in self._accounts.values():
            counts = (
                (account.num_live, sum(share.num_live for share in account.shares.values()), "live requests"),
                (account.num_waiting, sum(len(share.waiting) for share in account.shares.values()), "waiting requests"),
            )
            problems += [f"tenant {account.tenant}: {what}: {a} and {b}" for a, b, what in counts if a != b]
            ranked = [account.rank] if account.num_waiting else []
            ranked += [share.rank for share in account.shares.values() if share.waiting and share.level is None]
            if None in ranked:
                problems.append(f"tenant {account.tenant} waits, and never has its turn")
            for share in account.shares.values():
                fresh = [request for request in share.waiting if request.adapter_wait_started_s is None]
                if fresh != share.fresh or share.num_pinned != sum(one.pin is not None for one in fresh):
                    problems.append(
                        f"tenant {account.tenant}: requests that don't wait for {share.adapter} are miscounted"
                    )
            away = [share for share in account.shares.values() if share.level is not None]
            if {id(share) for share in away} != {id(share) for share in account.levels}:
                problems.append(f"tenant {account.tenant}: a share is away, and isn't")
            if any(not share.waiting or share.num_live > len(share.waiting) for share in away):
                problems.append(f"tenant {account.tenant}: a share is away of which nobody waits, or somebody runs")
            if not account.num_live and (account.num_blocks or account.num_running):
                problems.append(f"tenant {account.tenant} has no request, and holds something")
        live = [account for account in self._accounts.values() if account.num_live]
        tenants = [account for account in live if not account.is_nobody]
        if len(tenants) != self._num_live or sum(one.num_live for one in live) != self._num_live_requests:
            problems.append("tenants with live requests are miscounted")
        if not math.isclose(sum(one.weight for one in tenants), self.total_weight, abs_tol=1e-6):
            problems.append(f"weights add up to {self.total_weight}")
        return problems
