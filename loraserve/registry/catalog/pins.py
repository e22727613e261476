"""Operators' pins: durable rows, and their synchronization with the engine of each server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Select, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.background import BackgroundTask, Backoff, RetrySchedule
from loraserve.db.idempotency import Once
from loraserve.db.models import Adapter, AdapterVersion, OperatorPin, Tenant
from loraserve.db.session import Clock, Database
from loraserve.db.upsert import upsert
from loraserve.errors import Conflict, LoraserveError
from loraserve.limits import LIMITS
from loraserve.registry.changes import record_change
from loraserve.registry.health.checks import quarantine_error
from loraserve.registry.records import QUARANTINED
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.served_base import ServedBase
from loraserve.types import AdapterRef, Digest, TenantId

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""Delay before a refused pin is requested again, doubled with each consecutive refusal,
and its maximum.
"""


class PinningEngine(Protocol):
    """Part of the engine that holds pins; they end with its process."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_restarts(self) -> int:
        """Number of times that the engine's process was replaced."""
        ...

    async def pin(self, ref: AdapterRef) -> None:
        """Bring the adapter to the device and keep it there.

        Raise a `LoraserveError` if that's impossible.
        """
        ...

    async def unpin(self, ref: AdapterRef) -> None: ...


class Pins:
    """Pins in the database, and what this server's engine holds for them.

    A pin is durable when `pin` returns. Every server of this database obeys it within
    `LIMITS.pin_sync_s` and after each start. It has no effect while its version is deleted, in
    quarantine, or of another base than this server's.

    Args:
        engine: this server's engine; None if there is none.
    """

    def __init__(
        self,
        database: Database,
        served_base: ServedBase,
        engine: PinningEngine | None,
        *,
        clock: Clock,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_wanted = 0
        """Number of distinct pinned adapters, as of the last database query."""
        self._database = database
        self._served_base = served_base
        self._engine = engine
        self._clock = clock
        # requested from the engine, whatever the outcome, and not released
        self._requested: dict[Digest, AdapterRef] = {}
        # held on the device by the engine's present process
        self._held: set[Digest] = set()
        self._incarnation = 0
        # being changed by a call or a task now
        self._changing: Counter[Digest] = Counter()
        self._retries: RetrySchedule[Digest] = RetrySchedule(Backoff(RETRY_S, MAX_RETRY_S), monotonic)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = BackgroundTask(
            "pins",
            self.sync,
            LIMITS.pin_sync_s,
            failure="the engine's pins can't be compared with the registry's",
            logger=logger,
        )

    @property
    def num_held(self) -> int:
        """Number of pinned adapters that are held on the device."""
        return len(self._held)

    def start(self) -> None:
        """Synchronize the engine with the pins of all servers from now on."""
        self._loop.start()

    async def close(self) -> None:
        """Stop synchronizing; the pins stay in the database."""
        await self._loop.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def pin(
        self, tenant: TenantId, name: str, number: int, *, actor: str, once: Once[bool] | None, wait_s: float
    ) -> bool:
        """Pin the version durably; return whether it is on the device.

        A load that takes over `wait_s` continues.

        Raises:
            AdapterNotFound, VersionNotFound
            AdapterQuarantined, AdapterOfAnotherBase: it isn't served.
            Conflict: `LIMITS.max_operator_pins` versions are pinned.
            AdapterUnavailable, EngineError: the engine can't hold it; nothing is pinned.
            Replay: `once` was used before.
        """
        ref = await self._find(tenant, name, number, once, is_served=True)
        with self._change(ref.digest):
            is_done = self._engine is not None and await _within(wait_s, self._pin(self._engine, ref))
            # if this can't be written, the next sync unpins it again
            async with self._database.write(frees_space=True) as session:
                if once is not None:
                    await once.begin(session)
                repository = AdapterRepository(session, tenant)
                adapter = await repository.adapter(name, is_locking=True)
                name = adapter.name
                await repository.version(adapter, number)
                if await self._add(session, adapter, number, actor):
                    now = self._clock()
                    record_change(session, repository, "version.pin", f"{name}@{number}", actor=actor, now=now)
                if once is not None:
                    await once.finish(session, is_done)
        return is_done

    async def unpin(
        self, tenant: TenantId, name: str, number: int, *, actor: str, once: Once[bool] | None, wait_s: float
    ) -> bool:
        """Unpin the version durably; return whether the engine has been notified.

        Otherwise it will be notified later.

        Raises:
            AdapterNotFound, VersionNotFound
            Replay: `once` was used before.
        """
        ref = await self._find(tenant, name, number, once, is_served=False)
        with self._change(ref.digest):
            async with self._database.write() as session:
                if once is not None:
                    await once.begin(session)
                repository = AdapterRepository(session, tenant)
                adapter = await repository.adapter(name, is_locking=True)
                name = adapter.name
                gone = await session.execute(
                    delete(OperatorPin)
                    .where(OperatorPin.adapter_id == adapter.id, OperatorPin.version == number)
                    .returning(OperatorPin.version)
                )
                if gone.first() is not None:
                    now = self._clock()
                    record_change(session, repository, "version.unpin", f"{name}@{number}", actor=actor, now=now)
                # another tenant's pin of the same bytes stays
                is_wanted = (
                    await session.execute(_wanted(self._served_base.digest).where(AdapterVersion.digest == ref.digest))
                ).first()
                if once is not None:
                    await once.finish(session, True)
            if is_wanted is not None or self._engine is None:
                return True
            return await _within(wait_s, self._unpin(self._engine, ref)) and ref.digest not in self._requested

    async def sync(self) -> None:
        """Send the engine what to pin and unpin. The loads continue after the return.

        Raises:
            DatabaseUnavailable
        """
        engine = self._engine
        if engine is None:
            return
        async with self._database.read() as session:
            rows = (await session.execute(_wanted(self._served_base.digest))).all()
        wanted = {ref.digest: ref for ref in map(_ref, rows)}
        self.num_wanted = len(wanted)
        if not engine.is_ready:
            return
        self._see(engine.num_restarts)
        self._retries.retain(wanted)
        for digest, ref in list(self._requested.items()):
            if digest not in wanted and not self._changing[digest]:
                self._begin(self._let_go(engine, ref))
        for digest, ref in wanted.items():
            if digest not in self._held and not self._changing[digest] and self._retries.is_due(digest):
                self._begin(self._take(engine, ref))

    async def _take(self, engine: PinningEngine, ref: AdapterRef) -> None:
        with self._change(ref.digest):
            try:
                await self._pin(engine, ref)
            except LoraserveError as error:
                self._retries.fail(ref.digest)
                logger.warning(
                    "%s@%d is pinned, but it can't be loaded onto the device: %s", ref.name, ref.version, error
                )

    async def _let_go(self, engine: PinningEngine, ref: AdapterRef) -> None:
        with self._change(ref.digest):
            await self._unpin(engine, ref)

    async def _pin(self, engine: PinningEngine, ref: AdapterRef) -> None:
        self._requested[ref.digest] = ref
        incarnation = engine.num_restarts
        await engine.pin(ref)
        self._retries.succeed(ref.digest)
        if incarnation == engine.num_restarts:
            self._see(incarnation)
            self._held.add(ref.digest)

    def _see(self, incarnation: int) -> None:
        """Note the engine's process.

        A new one holds nothing, but its client may have repeated pins that are to be released.
        """
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._held.clear()

    async def _unpin(self, engine: PinningEngine, ref: AdapterRef) -> None:
        try:
            await engine.unpin(ref)
        except LoraserveError as error:
            logger.warning("the engine can't be told to unpin %s@%d: %s", ref.name, ref.version, error)
            return
        self._requested.pop(ref.digest, None)
        self._held.discard(ref.digest)

    async def _find(
        self, tenant: TenantId, name: str, number: int, once: Once[bool] | None, *, is_served: bool
    ) -> AdapterRef:
        async with self._database.read() as session:
            if once is not None:
                await once.check(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            name = adapter.name
            record = await repository.version_record(adapter, await repository.version(adapter, number))
        if is_served:
            self._served_base.check(name, number, record.base_digest, record.checks)
        if is_served and record.state == QUARANTINED:
            raise quarantine_error(name, number, record.checks)
        return record.ref

    async def _add(self, session: AsyncSession, adapter: Adapter, number: int, actor: str) -> bool:
        """Add the pin; return whether it is new."""
        row = {"adapter_id": adapter.id, "version": number, "created_at": self._clock(), "created_by": actor}
        if not await upsert(session, OperatorPin, [row]):
            return False
        if (await session.scalar(select(func.count()).select_from(OperatorPin)) or 0) > LIMITS.max_operator_pins:
            raise Conflict(f"{LIMITS.max_operator_pins} versions are pinned, the maximum.", hint="Unpin some first.")
        return True

    @contextmanager
    def _change(self, digest: Digest) -> Iterator[None]:
        self._changing[digest] += 1
        try:
            yield
        finally:
            self._changing[digest] -= 1
            if not self._changing[digest]:
                del self._changing[digest]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="pin")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _within(seconds: float, step: Awaitable[None]) -> bool:
    """Await the step, and return whether it finished in time."""
    try:
        async with asyncio.timeout(seconds):
            await step
    except TimeoutError:
        return False
    return True


def _wanted(base: Digest | None) -> Select[str, str, int, str, str, str]:
    """Select every tenant's pinned versions that could be served on this base.

    None: the base isn't known yet.
    """
    query = (
        select(
            Adapter.tenant_id,
            Adapter.name,
            AdapterVersion.number,
            AdapterVersion.digest,
            AdapterVersion.config_blob,
            AdapterVersion.weights_blob,
        )
        .select_from(OperatorPin)
        .join(Adapter, Adapter.id == OperatorPin.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .join(
            AdapterVersion,
            (AdapterVersion.adapter_id == OperatorPin.adapter_id) & (AdapterVersion.number == OperatorPin.version),
        )
        .where(
            Tenant.deleted_at.is_(None),
            Adapter.deleted_at.is_(None),
            AdapterVersion.deleted_at.is_(None),
            AdapterVersion.state != QUARANTINED,
        )
        .order_by(OperatorPin.created_at, OperatorPin.adapter_id, OperatorPin.version)
    )
    return query if base is None else query.where(AdapterVersion.base_digest == base)


def _ref(row: Any) -> AdapterRef:
    tenant, name, number, digest, config_blob, weights_blob = row
    return AdapterRef(
        tenant=TenantId(tenant),
        name=name,
        version=number,
        digest=Digest(digest),
        config_blob=Digest(config_blob),
        weights_blob=Digest(weights_blob),
    )
