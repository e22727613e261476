"""Live servers on this database, and what tenants use on each: they share the tenants' limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping

from sqlalchemy import delete, select, update
from ulid import ULID

from loraserve.background import BackgroundTask
from loraserve.db.leases import SightingAges
from loraserve.db.models import ServerRow
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.limits.admission import RateUse
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

_FORGET_S = 3600.0
"""Time in seconds without a heartbeat after which a server's row is removed."""
_LEAVE_S = 2.0


class Servers:
    """Heartbeat of this server, and count of the live servers on its database.

    A server is live while its heartbeats are seen to grow, by the observer's clock. The row of a
    killed server doesn't count after `LIMITS.server_silence_s`, and never for servers that start
    later. While the database is unreachable, the last count stands.
    """

    def __init__(
        self,
        database: Database,
        *,
        uses: Callable[[], Mapping[TenantId, RateUse]] = dict,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a server that counts itself alone until it beats.

        Args:
            uses: returns what tenants have used of their rates here lately, which heartbeats carry.
        """
        self.id = str(ULID())
        self.uses = uses
        self.told_at = -math.inf
        """Time of the last heartbeat: the others have what was used here before it."""
        self._rates: dict[str, dict[str, list[float]]] = {}
        """Usage of tenants on the other servers, by their ids, as of the last look."""
        self.num_live = 1
        """Number of live servers, this one included."""
        self._database = database
        self._clock, self._monotonic = clock, monotonic
        self._num_beats: dict[str, int] = {}
        """Heartbeats of the other servers, by id, as of the last look."""
        self._live: set[str] = set()
        """Ids of the other live servers."""
        self._has_beaten: set[str] = set()
        """Ids of servers whose heartbeats were seen to grow;
        other rows may belong to killed servers.
        """
        self._ages: SightingAges[tuple[str, int]] = SightingAges(monotonic)
        """Time since each server's present number of heartbeats was first seen."""
        self._task = BackgroundTask(
            "heartbeat",
            self.beat,
            lambda: LIMITS.server_beat_s,
            failure="this server's heartbeats can't be written",
            logger=logger,
            logs_once=True,
        )

    def uses_elsewhere(self, tenant: TenantId) -> list[RateUse]:
        """List what the tenant has lately used of its rates on each other live server."""
        rates = (self._rates.get(ident, {}).get(tenant) for ident in self._live)
        return [RateUse(*use) for use in rates if use is not None]

    def start(self) -> None:
        """Send heartbeats and count the servers from now on."""
        self._task.start()

    async def close(self) -> None:
        """Stop, and remove this server's row if the database is reachable.

        Otherwise the others notice its silence.
        """
        if not self._task.is_running:
            return
        await self._task.close()
        with contextlib.suppress(LoraserveError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S), self._database.write() as session:
                await session.execute(delete(ServerRow).where(ServerRow.id == self.id))

    async def beat(self) -> None:
        """Write a heartbeat, and count the live servers.

        Raises:
            DatabaseUnavailable
        """
        at, rates = self._monotonic(), {str(tenant): list(use) for tenant, use in self.uses().items()}
        async with self._database.write() as session:
            mine = ServerRow.id == self.id
            beaten = await session.execute(
                update(ServerRow)
                .where(mine)
                .values(num_beats=ServerRow.num_beats + 1, rates=rates)
                .returning(ServerRow.id)
            )
            if beaten.first() is None:
                session.add(ServerRow(id=self.id, num_beats=1, started_at=self._clock(), rates=rates))
                await session.flush()
            rows = (
                await session.execute(select(ServerRow.id, ServerRow.num_beats, ServerRow.rates).where(~mine))
            ).all()
            found = {row.id: row.num_beats for row in rows}
            self._ages.update(found.items())
            silent = {ident for ident, _ in self._ages.older_than(_FORGET_S)}
            if silent:
                await session.execute(delete(ServerRow).where(ServerRow.id.in_(silent)))
        self.told_at, self._rates = at, {row.id: row.rates for row in rows}
        self._count({ident: num_beats for ident, num_beats in found.items() if ident not in silent})

    def _count(self, found: dict[str, int]) -> None:
        grown = {ident for ident, num_beats in found.items() if self._num_beats.get(ident, num_beats) != num_beats}
        self._has_beaten = (self._has_beaten | grown) & found.keys()
        self._num_beats = found
        self._ages.update(found.items())
        silent = {ident for ident, _ in self._ages.older_than(LIMITS.server_silence_s)}
        self._live = self._has_beaten - silent
        self.num_live = 1 + len(self._live)
