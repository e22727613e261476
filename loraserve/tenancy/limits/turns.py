"""Places that tenants take in turns: one of them never has them all."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque


class TenantTurns:
    """Give places to tenants in turns, request by request.

    One tenant never has all places, so that another's short work doesn't wait for its long one.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    async def take(self, tenant: str) -> None:
        """Wait for a place in the tenant's turn; the caller has it until `give_back`."""
        if not self._waiting and self._may_run(tenant):
            self._running[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                # it had its turn in the same moment
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str) -> None:
        """Free a place of the tenant's."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._start_next()

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[tenant]

    def _may_run(self, tenant: str) -> bool:
        num_own = self._running[tenant]
        return self._running.total() < self._num_places and num_own < max(1, self._num_places - 1)

    def _start_next(self) -> None:
        """Give free places to the waiting holders, tenant by tenant in turn."""
        while True:
            tenant = next((tenant for tenant in self._waiting if self._may_run(tenant)), None)
            if tenant is None:
                return
            line = self._waiting[tenant]
            turn = line.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._running[tenant] += 1
            if line:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
