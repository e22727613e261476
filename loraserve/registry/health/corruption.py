"""Quarantine of versions whose stored bytes are corrupt or gone, until the bytes are repaired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from loraserve.db.models import AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import LoraserveError, NotFound
from loraserve.registry.changes import record_change
from loraserve.registry.health.checks import (
    CERTIFICATE,
    FAILED,
    SKIPPED,
    STORED,
    find_check,
    is_corrupt,
    replace_check,
    set_checks,
)
from loraserve.registry.health.outcome import CertificateOutcome
from loraserve.registry.records import blobs_of
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.residency import versions_stored_in
from loraserve.types import Digest, TenantId

logger = logging.getLogger(__name__)

ACTOR = "server"
MAX_PENDING = 1024
"""Maximum number of reports that wait for the database;
further failed loads repeat those that are dropped.
"""
_DETAIL = (
    "its stored bytes are damaged or missing: push the same files again, "
    "or restore them from a backup and verify it again"
)


class CorruptionQuarantine:
    """Quarantines versions with corrupt bytes.

    Args:
        on_change: called with tenant and adapter name after a quarantine is durable.
    """

    def __init__(self, database: Database, on_change: Callable[[TenantId, str], None], *, clock: Clock) -> None:
        self.num_quarantined = 0
        """Versions quarantined since the start."""
        self._database = database
        self._on_change = on_change
        self._clock = clock
        self._pending: dict[tuple[Digest, Digest], asyncio.Task[None]] = {}

    def report(self, digest: Digest, blob: Digest) -> None:
        """Quarantine the versions with this digest and corrupt blob in the background."""
        key = digest, blob
        if key in self._pending or len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.create_task(self._take(digest, blob), name="quarantine")
        self._pending[key] = task
        task.add_done_callback(lambda _: self._pending.pop(key, None))

    async def close(self) -> None:
        """Wait until the reports are in the database or have failed."""
        await asyncio.gather(*self._pending.values(), return_exceptions=True)

    async def _take(self, digest: Digest, blob: Digest) -> None:
        try:
            await self.quarantine(digest, blob)
        except LoraserveError as error:
            # the next load that fails reports it again
            logger.warning("the versions with damaged blob %s aren't quarantined yet: %s", blob, error)

    async def quarantine(self, digest: Digest, blob: Digest) -> int:
        """Quarantine durably all live versions with this digest and blob.

        Return how many weren't in quarantine. Equal versions in other blobs are still served: their
        bytes are whole.

        Raises:
            DatabaseUnavailable
        """
        async with self._database.read() as session:
            holders = await versions_stored_in(session, digest, blob)
        num_new = 0
        for tenant, name, number in holders:
            try:
                is_new = await self._quarantine(tenant, name, number, digest, blob)
            except NotFound:
                # deleted meanwhile
                continue
            num_new += is_new
            self._on_change(tenant, name)
        self.num_quarantined += num_new
        return num_new

    async def _quarantine(self, tenant: TenantId, name: str, number: int, digest: Digest, blob: Digest) -> bool:
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            row = await repository.version(adapter, number)
            # restored or replaced since the lookup
            if row.digest != digest or blob not in blobs_of(row):
                return False
            was_corrupt = is_corrupt(row.checks)
            # The time distinguishes this report from older ones: a running verification clears only
            # those it started with.
            report = {"name": STORED, "status": FAILED, "detail": _DETAIL, "at": now.isoformat()}
            set_checks(row, replace_check(row.checks, report))
            if was_corrupt:
                return False
            repository.touch(adapter, now)
            record_change(
                session,
                repository,
                "version.quarantine",
                f"{name}@{number}",
                actor=ACTOR,
                now=now,
                digest=digest,
                blob=blob,
            )
        logger.error("%s@%d of tenant %s is quarantined: its blob %s is damaged or missing", name, number, tenant, blob)
        return True


def repair(
    row: AdapterVersion, config_blob: Digest, weights_blob: Digest, size_bytes: int, outcome: CertificateOutcome | None
) -> None:
    """Point the version to whole blobs of the same digest, and update its checks and state.

    Args:
        outcome: certificate of the new bytes; a skipped one doesn't replace an existing
            certificate.
    """
    row.config_blob, row.weights_blob, row.size_bytes = config_blob, weights_blob, size_bytes
    checks: list[Mapping[str, Any]] = [check for check in row.checks if check["name"] != STORED]
    if outcome is not None and (outcome.status != SKIPPED or find_check(checks, CERTIFICATE) is None):
        checks = replace_check(checks, outcome.as_check())
    set_checks(row, checks)
