"""Versions whose answers were not finite: counted with the version, and after a few of them it is in quarantine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loraserve.db.session import Clock, Database
from loraserve.errors import LoraserveError, NotFound
from loraserve.registry.changes import record_change
from loraserve.registry.health.checks import FAILED, NUMERICS, WARNED, find_check, replace_check, set_checks
from loraserve.registry.records import QUARANTINED
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.served_base import ServedBase
from loraserve.types import AdapterRef, TenantId

logger = logging.getLogger(__name__)

ACTOR = "server"
MAX_NUMERIC_FAILURES = 3
MAX_PENDING = 1024
"""Reports that wait for the database; of more, the version's next answers report again."""


class NumericFailures:
    """Keeps versions from being asked for that answer with numbers which are none.

    The count is kept with the version: it outlives the server, and replicas count together. A verification, which asks the engine
    anew, begins it again.

    Args:
        served_base: of versions that were moved to another one meanwhile, this server can't tell.
        on_change: told whose name it was after its quarantine is durable.
    """

    def __init__(
        self,
        database: Database,
        served_base: ServedBase,
        on_change: Callable[[TenantId, str], None],
        *,
        clock: Clock,
    ) -> None:
        self.num_failures = 0
        self.num_quarantined = 0
        """Versions, since the start."""
        self._database = database
        self._served_base = served_base
        self._on_change = on_change
        self._clock = clock
        self._pending: set[asyncio.Task[None]] = set()

    def report(self, tenant: TenantId, ref: AdapterRef) -> None:
        """An answer of the version to `tenant` was not finite; this is taken to the database in the background.

        Only its owner's requests count: whoever it is granted to could else take it from its owner with prompts made for that. Of a
        sum, no part is known to be the one.
        """
        if ref.tenant != tenant or ref.parts or len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.create_task(self._take(ref), name="strike")
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """What was reported is in the database, or given up."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def record(self, ref: AdapterRef) -> int:
        """How many strikes the version has now; with `MAX_NUMERIC_FAILURES` it is in quarantine. Durable. 0: it isn't there any more.

        Raises:
            DatabaseUnavailable
        """
        now = self._clock()
        try:
            async with self._database.write() as session:
                repository = AdapterRepository(session, ref.tenant)
                adapter = await repository.adapter(ref.name, is_locking=True)
                row = await repository.version(adapter, ref.version)
                # a number is never given twice, but another server may be a restore behind
                is_another = row.digest != ref.digest or row.base_digest != self._served_base.spec.digest
                if is_another or row.state == QUARANTINED:
                    return num_failures(row.checks)
                num = num_failures(row.checks) + 1
                set_checks(row, replace_check(row.checks, _as_check(num)))
                is_out = row.state == QUARANTINED
                repository.touch(adapter, now)
                if is_out:
                    record_change(
                        session,
                        repository,
                        "version.quarantine",
                        f"{ref.name}@{ref.version}",
                        actor=ACTOR,
                        now=now,
                        digest=ref.digest,
                        strikes=num,
                    )
        except NotFound:
            # deleted meanwhile
            return 0
        self.num_failures += 1
        if is_out:
            self.num_quarantined += 1
            self._on_change(ref.tenant, ref.name)
            logger.error(
                "%s@%d of tenant %s is quarantined: its answers aren't finite", ref.name, ref.version, ref.tenant
            )
        return num

    async def _take(self, ref: AdapterRef) -> None:
        try:
            await self.record(ref)
        except LoraserveError as error:
            # its next answer that isn't finite counts
            logger.warning("an answer of %s@%d that wasn't finite isn't counted: %s", ref.name, ref.version, error)


def num_failures(checks: Iterable[Mapping[str, Any]]) -> int:
    """Of the version with these checks."""
    check = find_check(checks, NUMERICS)
    return 0 if check is None else int(check["strikes"])


def _as_check(num: int) -> dict[str, Any]:
    status = FAILED if num >= MAX_NUMERIC_FAILURES else WARNED
    noun = "answer was" if num == 1 else "answers were"
    detail = f"{num} {noun} not finite ({MAX_NUMERIC_FAILURES} end in quarantine): check the adapter's weights, then verify it anew"
    return {"name": NUMERICS, "status": status, "detail": detail, "strikes": num}
