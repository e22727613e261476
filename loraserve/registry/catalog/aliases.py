"""Aliases: names that move between versions by compare-and-swap.

They have splits, shadows and rollbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve import faults
from loraserve.db.idempotency import Once
from loraserve.db.models import Adapter, Alias
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database
from loraserve.errors import Conflict, InvalidRequest, NotEvaluated, NotFound, PreconditionFailed, VersionNotFound
from loraserve.limits import LIMITS
from loraserve.registry.catalog.evaluations import check_better
from loraserve.registry.changes import move_alias, record_change
from loraserve.registry.health.certificates import Certificates
from loraserve.registry.health.checks import quarantine_error
from loraserve.registry.health.stored_fit import StoredFit
from loraserve.registry.model_name import check_alias_name
from loraserve.registry.records import NO_CONDITION, QUARANTINED, AliasRecord, AliasTarget, Precondition, ShadowPart
from loraserve.registry.repository import AdapterRepository, shadow_of, target_of
from loraserve.registry.served_base import ServedBase
from loraserve.types import TenantId


class Aliases:
    """Aliases of all tenants' adapters.

    A change is durable, and has its audit row, when the call returns.

    Args:
        served_base: base of the versions that aliases may point to, once it is loaded.
        fit: refuses versions that the device can never hold.
        certificates: refuses versions that a strict server doesn't promote.
        on_change: called with tenant and adapter name after a change is durable.
    """

    def __init__(
        self,
        database: Database,
        served_base: ServedBase,
        on_change: Callable[[TenantId, str], None],
        *,
        fit: StoredFit,
        certificates: Certificates,
        clock: Clock,
    ) -> None:
        self._fit = fit
        self._certificates = certificates
        self._database = database
        self._served_base = served_base
        self._on_change = on_change
        self._clock = clock

    async def get(self, tenant: TenantId, name: str, alias: str) -> AliasRecord:
        """Read the alias.

        Raises:
            AdapterNotFound: there is no such adapter.
            AliasNotFound: it has no such alias.
        """
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            return repository.alias_record(adapter, await repository.alias(adapter, alias), alias)

    async def list(
        self, tenant: TenantId, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[AliasRecord]:
        """List a page of the adapter's aliases by name.

        Raises:
            AdapterNotFound
        """
        after = decode_cursor(cursor)
        check_limit(limit)
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            rows = [row for row in await repository.all_aliases(adapter) if after is None or row.name > after]
            records = [repository.alias_record(adapter, row, row.name) for row in rows]
        return make_page(records, limit, lambda record: record.name, lambda record: record)

    async def set(
        self,
        tenant: TenantId,
        name: str,
        alias: str,
        target: AliasTarget,
        shadow: ShadowPart | None = None,
        *,
        actor: str,
        condition: Precondition = NO_CONDITION,
        if_better: str | None = None,
    ) -> tuple[AliasRecord, bool]:
        """Point `alias` to `target`, with that shadow or none, if `condition` holds.

        Return it, and whether it is new. The shadow is dropped if it is the only version that
        answers.

        Args:
            if_better: metric by which the target must be better than each version that answers now
                (`evaluations.check_better`); None: no such condition.

        Raises:
            InvalidRequest: the name or the share isn't valid, there are
                `LIMITS.max_aliases_per_adapter` already, or `if_better` is for a split.
            AdapterNotFound, VersionNotFound
            AdapterQuarantined, AdapterOfAnotherBase: requests for the alias would be refused.
            AdapterRejected: a version never fits this server's device.
            AdapterUncertified: the server is strict, and the certificate of a version that would
                answer isn't passed.
            PreconditionFailed: the condition doesn't hold; nothing was changed.
            NotEvaluated, NotBetter: `if_better` doesn't hold; nothing was changed.
        """
        check_alias_name(alias)
        if if_better is not None and target.split:
            raise InvalidRequest(
                "if_better is for a single version, and not for a split.",
                param="if_better",
                hint="Send version in place of split, or leave out if_better.",
            )
        if shadow is not None and not 0 < shadow.share <= 1:
            raise InvalidRequest("A shadow's share should be above 0 and at most 1.", param="shadow.share")
        now = self._clock()
        await self._check_fit(tenant, name, (*target.versions, *(() if shadow is None else (shadow.version,))))
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            found = await repository.alias(adapter, alias)
            _check_condition(condition, found, f"{name}@{alias}")
            await self._check_servable(repository, adapter, target, shadow)
            if if_better is not None:
                await _check_better(repository, adapter, alias, found, target.version, if_better)
            if found is None and await repository.num_aliases(adapter) >= LIMITS.max_aliases_per_adapter:
                raise InvalidRequest(
                    f"The adapter has {LIMITS.max_aliases_per_adapter} aliases, the maximum.",
                    param="alias",
                    hint="Delete one first.",
                )
            is_new = found is None
            row = await move_alias(session, repository, adapter, alias, target, shadow, actor=actor, now=now)
            record = repository.alias_record(adapter, row, alias)
        faults.hit("registry.after_alias_commit")
        self._on_change(tenant, name)
        return record, is_new

    async def rollback(
        self,
        tenant: TenantId,
        name: str,
        alias: str,
        *,
        actor: str,
        condition: Precondition = NO_CONDITION,
        once: Once[AliasRecord] | None = None,
    ) -> AliasRecord:
        """Point `alias` back to its previous target.

        The present one is remembered for the next rollback. Keep the shadow.

        Raises:
            AdapterNotFound, AliasNotFound, PreconditionFailed
            Conflict: the alias was never moved, or is moved meanwhile, or its previous target is
                deleted.
            AdapterQuarantined, AdapterOfAnotherBase: the previous target isn't served.
            AdapterRejected: it never fits this server's device.
            AdapterUncertified: the server is strict, and its certificate isn't passed.
            Replay: `once` was used before.
        """
        checked = await self._check_previous_fit(tenant, name, alias)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            row = await repository.alias(adapter, alias)
            repository.alias_record(adapter, row, alias)
            _check_condition(condition, row, f"{name}@{alias}")
            if row is not None and row.previous != checked:
                raise Conflict(f"{name}@{alias} was moved meanwhile.", hint="Read it again, then retry.")
            record = await self._move_back(session, repository, adapter, alias, row, actor)
            if once is not None:
                await once.finish(session, record)
        faults.hit("registry.after_alias_commit")
        self._on_change(tenant, name)
        return record

    async def delete(
        self, tenant: TenantId, name: str, alias: str, *, actor: str, condition: Precondition = NO_CONDITION
    ) -> None:
        """Delete the alias if `condition` holds.

        Raises:
            AdapterNotFound, AliasNotFound, PreconditionFailed
            Conflict: it is the adapter's fallback.
        """
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            row = await repository.alias(adapter, alias)
            record = repository.alias_record(adapter, row, alias)
            _check_condition(condition, row, f"{name}@{alias}")
            if adapter.fallback == alias:
                raise Conflict(
                    f"{name}@{alias} can't be deleted: it is the adapter's fallback.",
                    hint="Give the adapter another fallback, or none.",
                )
            if row is not None:
                await repository.remove_alias(adapter, row, now)
            record_change(
                session, repository, "alias.delete", f"{name}@{alias}", actor=actor, now=now, version=record.version
            )
        self._on_change(tenant, name)

    async def _move_back(
        self,
        session: AsyncSession,
        repository: AdapterRepository,
        adapter: Adapter,
        alias: str,
        row: Alias | None,
        actor: str,
    ) -> AliasRecord:
        if row is None or row.previous is None:
            raise Conflict(
                f"{adapter.name}@{alias} can't be rolled back: it hasn't been moved since it was created.",
                hint=f"Point it at another version. Try: loraserve adapter alias {adapter.name} {alias} VERSION",
            )
        target, shadow = AliasTarget.from_json(row.previous), shadow_of(row)
        try:
            await self._check_servable(repository, adapter, target, None)
        except VersionNotFound:
            raise Conflict(
                f"{adapter.name}@{alias} can't be rolled back: it pointed at {target}, which is deleted.",
                hint="Restore that version, or point the alias at another one.",
            ) from None
        moved = await move_alias(
            session,
            repository,
            adapter,
            alias,
            target,
            shadow,
            actor=actor,
            now=self._clock(),
            action="alias.rollback",
        )
        return repository.alias_record(adapter, moved, alias)

    async def _check_previous_fit(self, tenant: TenantId, name: str, alias: str) -> object:
        """Check that the versions before the alias's last move fit; return them as stored."""
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            row = await repository.alias(await repository.adapter(name), alias)
            previous = None if row is None else row.previous
        if previous is not None:
            await self._check_fit(tenant, name, AliasTarget.from_json(previous).versions)
        return previous

    async def _check_fit(self, tenant: TenantId, name: str, numbers: Iterable[int]) -> None:
        """Check that the versions fit the device, before a transaction: files may be read.

        The transaction finds what else is wrong with them.

        Raises:
            AdapterRejected
        """
        with suppress(NotFound):
            async with self._database.read() as session:
                repository = AdapterRepository(session, tenant)
                adapter = await repository.adapter(name)
                rows = await repository.versions_of(adapter, numbers)
                records = [await repository.version_record(adapter, row) for row in rows]
            for record in records:
                if record.state != QUARANTINED:
                    await self._fit.check(record)

    async def _check_servable(
        self, repository: AdapterRepository, adapter: Adapter, target: AliasTarget, shadow: ShadowPart | None
    ) -> None:
        """Check that the target's versions can be used.

        Raises:
            VersionNotFound, AdapterQuarantined, AdapterOfAnotherBase, AdapterUncertified: the first
                version that can't be used.
        """
        numbers = (*target.versions, *(() if shadow is None else (shadow.version,)))
        for row in await repository.versions_of(adapter, numbers):
            self._served_base.check(adapter.name, row.number, row.base_digest, row.checks)
            if row.state == QUARANTINED:
                raise quarantine_error(adapter.name, row.number, row.checks)
            if row.number in target.versions:
                # a shadow answers no client
                self._certificates.check_promotion(adapter.name, row.number, row.checks)


async def _check_better(
    repository: AdapterRepository, adapter: Adapter, alias: str, found: Alias | None, number: int, metric: str
) -> None:
    """Check that the version is better than those to which the alias points.

    It may point to the version alone already, so that a repeated move isn't refused.

    Raises:
        NotEvaluated: there is no such alias, or no evaluation that can be compared.
        InvalidRequest, NotBetter: as `check_better`.
    """
    if found is None:
        raise NotEvaluated(
            f"{adapter.name}@{alias} doesn't exist: there is no version to compare with.",
            hint="To create the alias, leave out the condition.",
        )
    current = [version for version in target_of(found).versions if version != number]
    await check_better(repository, adapter, alias, current, number, metric)


def _check_condition(condition: Precondition, found: Alias | None, shown: str) -> None:
    """Check that `found` satisfies the caller's condition.

    Raises:
        PreconditionFailed: it doesn't.
    """
    if condition.is_absent and found is not None:
        raise PreconditionFailed(f"{shown} exists already; If-None-Match: * allows only a new one.")
    if found is None:
        if condition.is_present or condition.revisions is not None:
            raise PreconditionFailed(f"{shown} doesn't exist; If-Match allows only an existing one.")
        return
    if condition.revisions is not None and found.revision not in condition.revisions:
        raise PreconditionFailed(
            f"{shown} has changed since it was read: it points at version {found.version} now.",
            hint="Read it again, then retry.",
        )
