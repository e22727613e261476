"""Quarantine of versions after a few answers with NaN or infinite logits."""

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
"""Maximum number of reports that wait for the database;
the version's next answers repeat those that are dropped.
"""


class NumericFailures:
    """Quarantine a version after `MAX_NUMERIC_FAILURES` answers with NaN or infinite logits.

    The count is stored with the version, so that it outlives the server and replicas share it. A
    verification resets it.

    Args:
        served_base: base of this server; failures of versions that have moved to another base
            aren't counted.
        on_change: called with tenant and adapter name after a quarantine is durable.
        on_ephemeral: called in place of all that with an ephemeral version, which has no row.
    """

    def __init__(
        self,
        database: Database,
        served_base: ServedBase,
        on_change: Callable[[TenantId, str], None],
        *,
        on_ephemeral: Callable[[AdapterRef], None] = lambda _: None,
        clock: Clock,
    ) -> None:
        self.num_failures = 0
        self.num_quarantined = 0
        """Versions quarantined since the start."""
        self._database = database
        self._served_base = served_base
        self._on_change = on_change
        self._on_ephemeral = on_ephemeral
        self._clock = clock
        self._pending: set[asyncio.Task[None]] = set()

    def report(self, tenant: TenantId, ref: AdapterRef) -> None:
        """Record in the background an answer to `tenant` that wasn't finite.

        Only requests of the adapter's owner count: otherwise a tenant with a grant could quarantine
        it with crafted prompts. A sum doesn't count, because its failing part isn't known.
        """
        if ref.tenant != tenant or ref.parts or len(self._pending) >= MAX_PENDING:
            return
        if ref.memory is not None:
            self.num_failures += 1
            self._on_ephemeral(ref)
            return
        task = asyncio.create_task(self._take(ref), name="numeric failure")
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Wait until the reports are in the database or have failed."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def record(self, ref: AdapterRef) -> int:
        """Count a failure durably, and quarantine the version at `MAX_NUMERIC_FAILURES`.

        Returns:
            The version's number of failures; 0 if it doesn't exist any more.

        Raises:
            DatabaseUnavailable
        """
        now = self._clock()
        try:
            async with self._database.write() as session:
                repository = AdapterRepository(session, ref.tenant)
                adapter = await repository.adapter(ref.name, is_locking=True)
                row = await repository.version(adapter, ref.version)
                # numbers are never reused, but another server may see the state before a restore
                is_another = row.digest != ref.digest or row.base_digest != self._served_base.spec.digest
                if is_another or row.state == QUARANTINED:
                    return num_failures(row.checks)
                num = num_failures(row.checks) + 1
                set_checks(row, replace_check(row.checks, as_check(num)))
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
            # the next failure is counted
            logger.warning("a non-finite answer of %s@%d isn't counted: %s", ref.name, ref.version, error)


def num_failures(checks: Iterable[Mapping[str, Any]]) -> int:
    """Count the failures in a version's checks."""
    check = find_check(checks, NUMERICS)
    return 0 if check is None else int(check["strikes"])


def as_check(num: int) -> dict[str, Any]:
    """Build the check of a version with that many failures."""
    status = FAILED if num >= MAX_NUMERIC_FAILURES else WARNED
    noun = "answer was" if num == 1 else "answers were"
    detail = (
        f"{num} {noun} not finite ({MAX_NUMERIC_FAILURES} put it in quarantine): "
        "check the adapter's weights, then verify it again"
    )
    return {"name": NUMERICS, "status": status, "detail": detail, "strikes": num}
