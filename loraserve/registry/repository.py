"""SQL on adapters, versions and aliases.

A repository belongs to one tenant and can't access another's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, func, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstanceState, defer
from ulid import ULID

from loraserve.db.models import Adapter, AdapterVersion, Alias, EvaluationRow, Grant, Tenant
from loraserve.db.names import is_adapter_name, is_name, name_key
from loraserve.db.upsert import upsert
from loraserve.errors import AdapterNotFound, AliasNotFound, AlreadyExists, TenantNotFound, VersionNotFound
from loraserve.registry.model_name import MAX_VERSION, other_case
from loraserve.registry.records import (
    AdapterRecord,
    AliasRecord,
    AliasTarget,
    EvaluationRecord,
    ShadowPart,
    SplitPart,
    VersionRecord,
    extras_of,
)
from loraserve.registry.storage_totals import add_to_deleted, add_to_totals
from loraserve.types import Digest, TenantId


class AdapterRepository:
    """Adapters of one tenant in one session.

    Another tenant's are reported like absent ones, with the same errors and texts.
    """

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self.tenant = tenant

    # --- rows ---

    async def adapter(self, name: str, *, is_locking: bool = False) -> Adapter:
        """Read the live adapter's row; `is_locking` locks it until the transaction ends.

        Raises:
            AdapterNotFound
        """
        query = select(Adapter).where(self._is(name), Adapter.deleted_at.is_(None))
        row = None
        if is_adapter_name(name):
            row = (await self._session.scalars(query.with_for_update() if is_locking else query)).one_or_none()
        if row is None:
            raise _no_adapter(name)
        return row

    async def adapter_to_publish(self, name: str, now: datetime) -> tuple[Adapter, bool]:
        """Lock the adapter's row, after inserting it if absent or resetting it if deleted.

        A reset adapter has none of its old aliases, versions, grants and metadata.

        Returns:
            The row, and whether the tenant has one adapter more than before.

        Raises:
            Conflict: the tenant's adapter has the name in another case.
        """
        fields = {"notes": "", "tags": {}, "last_version": 0, "revision": 0, "created_at": now, "updated_at": now}
        row_id = str(ULID.from_datetime(now))
        is_made = await upsert(
            self._session,
            Adapter,
            [{"id": row_id, "tenant_id": self.tenant, "name": name, "name_key": name_key(name), **fields}],
        )
        row = (await self._session.scalars(select(Adapter).where(self._is(name)).with_for_update())).one()
        was_deleted = row.deleted_at is not None
        if not was_deleted and row.name != name:
            raise other_case(name, row.name)
        if was_deleted:
            row.name = name
            await self._session.execute(delete(Alias).where(Alias.adapter_id == row.id))
            # grants were for the old adapter
            await self._session.execute(delete(Grant).where(Grant.adapter_id == row.id))
            await self._count_deleted(instant_of(row), num_adapters=-1)
            row.deleted_at, row.created_at = None, now
            row.notes, row.tags, row.fallback = "", {}, None
        elif is_made:
            await self.count_made(num_adapters=1)
        return row, bool(is_made) or was_deleted

    async def version(self, adapter: Adapter, number: int) -> AdapterVersion:
        """Read the row of a version that isn't deleted.

        Raises:
            VersionNotFound
        """
        row = None
        if 1 <= number <= MAX_VERSION:
            query = self._numbered(adapter, number).where(AdapterVersion.deleted_at.is_(None))
            row = (await self._session.scalars(query)).one_or_none()
        if row is None:
            raise _no_version(adapter)
        return row

    async def deleted_adapter(self, name: str, *, since: datetime, is_locking: bool = False) -> Adapter:
        """Read the row of an adapter deleted after `since`.

        `is_locking` locks it until the transaction ends.

        Raises:
            AdapterNotFound: there is none, or it was deleted earlier.
            AlreadyExists: it isn't deleted.
        """
        query = select(Adapter).where(self._is(name))
        query = query.with_for_update() if is_locking else query
        row = (await self._session.scalars(query)).one_or_none() if is_adapter_name(name) else None
        if row is None or (row.deleted_at is not None and row.deleted_at <= since):
            raise _no_adapter(name)
        if row.deleted_at is None:
            raise AlreadyExists(f'The adapter "{row.name}" isn\'t deleted.')
        return row

    async def deleted_version(self, adapter: Adapter, number: int, *, since: datetime) -> AdapterVersion:
        """Read the row of a version deleted after `since`.

        Raises:
            VersionNotFound: there is none, or it was deleted earlier.
            AlreadyExists: it isn't deleted.
        """
        row = None
        if 1 <= number <= MAX_VERSION:
            row = (await self._session.scalars(self._numbered(adapter, number))).one_or_none()
        if row is None or (row.deleted_at is not None and row.deleted_at <= since):
            raise _no_version(adapter)
        if row.deleted_at is None:
            raise AlreadyExists(f"{adapter.name}@{number} isn't deleted.")
        return row

    async def versions_deleted_at(self, adapter: Adapter, at: datetime) -> Sequence[AdapterVersion]:
        """List the versions deleted at exactly this instant.

        They are those that were deleted with the adapter.
        """
        query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.deleted_at == at)
        return (await self._session.scalars(query.order_by(AdapterVersion.number))).all()

    async def version_of_digest(self, name: str, digest: Digest) -> tuple[Adapter, AdapterVersion] | None:
        """Find the live adapter's version with these bytes, if there is one."""
        query = (
            select(Adapter, AdapterVersion)
            .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
            .where(
                self._is(name),
                Adapter.deleted_at.is_(None),
                AdapterVersion.digest == digest,
                AdapterVersion.deleted_at.is_(None),
            )
        )
        row = (await self._session.execute(query)).one_or_none()
        return None if row is None else (row[0], row[1])

    async def next_number(self, name: str) -> int:
        """Predict the number of the adapter's next version.

        Another publish may take it first.
        """
        query = select(Adapter.last_version).where(self._is(name))
        return (await self._session.scalar(query) or 0) + 1

    async def versions_of(self, adapter: Adapter, numbers: Iterable[int]) -> list[AdapterVersion]:
        """Read the rows of these versions.

        Raises:
            VersionNotFound
        """
        return [await self.version(adapter, number) for number in sorted(set(numbers))]

    async def alias(self, adapter: Adapter, name: str) -> Alias | None:
        return await self._session.get(Alias, (adapter.id, name)) if is_name(name) else None

    # --- changes ---

    async def tenant_row(self, *, is_locking: bool = False) -> Tenant:
        """Read the tenant's row.

        Raises:
            TenantNotFound: it was deleted meanwhile.
        """
        query = select(Tenant).where(Tenant.id == self.tenant, Tenant.deleted_at.is_(None))
        if is_locking:
            # The key can't change: inserts of rows that refer to the tenant, such as audit rows,
            # don't wait or deadlock.
            query = query.with_for_update(key_share=True)
        row = (await self._session.scalars(query)).one_or_none()
        if row is None:
            raise TenantNotFound("There is no such tenant.")
        return row

    async def lock_tenant(self) -> Tenant:
        """Lock and return the tenant's row.

        Counts of the tenant's things then hold until the commit.

        Raises:
            TenantNotFound: it was deleted meanwhile.
        """
        return await self.tenant_row(is_locking=True)

    def touch(self, adapter: Adapter, now: datetime) -> int:
        """Increment the adapter's revision for a change in this transaction, and return it."""
        adapter.revision += 1
        adapter.updated_at = now
        return adapter.revision

    async def add_version(
        self, adapter: Adapter, now: datetime, actor: str, *, size_bytes: int, **columns: Any
    ) -> AdapterVersion:
        """Add the adapter's next version, under a number that was never used."""
        adapter.last_version += 1
        row = AdapterVersion(
            id=str(ULID.from_datetime(now)),
            adapter_id=adapter.id,
            number=adapter.last_version,
            created_at=now,
            created_by=actor,
            deleted_at=None,
            notes="",
            tags={},
            size_bytes=size_bytes,
            **columns,
        )
        self._session.add(row)
        await self.count_made(num_bytes=size_bytes)
        return row

    async def count_made(self, *, num_adapters: int = 0, num_bytes: int = 0) -> None:
        """Add to the totals of the tenant, whose row must be locked."""
        await add_to_totals(self._session, self.tenant, num_adapters=num_adapters, num_bytes=num_bytes)

    async def _count_deleted(self, at: datetime, *, num_adapters: int = 0, num_bytes: int = 0) -> None:
        await add_to_deleted(self._session, self.tenant, at, num_adapters=num_adapters, num_bytes=num_bytes)

    async def set_alias(
        self, adapter: Adapter, alias: str, target: AliasTarget, shadow: ShadowPart | None, now: datetime
    ) -> Alias:
        """Point the alias, created if absent, to `target` at a new revision.

        The previous target is remembered for a rollback.
        """
        row = await self.alias(adapter, alias)
        revision = self.touch(adapter, now)
        if row is None:
            row = Alias(adapter_id=adapter.id, name=alias, previous=None)
            # The version's row, which the alias refers to, must be there first.
            await self._session.flush()
            self._session.add(row)
        elif (before := target_of(row)) != target:
            row.previous = before.as_json()
        row.version, row.split, row.revision, row.updated_at = target.version, target.split_json(), revision, now
        row.shadow = None if shadow is None else {"version": shadow.version, "share": shadow.share}
        return row

    async def remove_alias(self, adapter: Adapter, alias: Alias, now: datetime) -> None:
        self.touch(adapter, now)
        await self._session.delete(alias)

    async def delete_adapter(self, adapter: Adapter, now: datetime) -> None:
        """Mark the adapter and its versions as deleted at the same instant.

        So a restore can find which belong together.
        """
        self.touch(adapter, now)
        adapter.deleted_at = now
        sizes = await self._session.execute(
            update(AdapterVersion)
            .where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.deleted_at.is_(None))
            .values(deleted_at=now)
            .returning(AdapterVersion.size_bytes)
            .execution_options(synchronize_session=False)
        )
        await self._count_deleted(now, num_adapters=1, num_bytes=sum(sizes.scalars()))

    async def delete_version(self, adapter: Adapter, row: AdapterVersion, now: datetime) -> None:
        self.touch(adapter, now)
        row.deleted_at = now
        await self._count_deleted(now, num_bytes=row.size_bytes)

    async def restore_adapter(self, adapter: Adapter, rows: Iterable[AdapterVersion], now: datetime) -> None:
        """Restore the deleted adapter with the versions that were deleted at the same instant."""
        at = instant_of(adapter)
        rows = list(rows)
        self.touch(adapter, now)
        adapter.deleted_at = None
        for row in rows:
            row.deleted_at = None
        await self._count_deleted(at, num_adapters=-1, num_bytes=-sum(row.size_bytes for row in rows))

    async def restore_version(self, adapter: Adapter, row: AdapterVersion, now: datetime) -> None:
        at = instant_of(row)
        self.touch(adapter, now)
        row.deleted_at = None
        await self._count_deleted(at, num_bytes=-row.size_bytes)

    # --- counts and lists ---

    async def name_of(self, name: str) -> str | None:
        """Look up the name, as it was written, of the tenant's live adapter of that name.

        None: it has none.
        """
        return await self._session.scalar(select(Adapter.name).where(self._is(name), Adapter.deleted_at.is_(None)))

    async def has_adapter(self, name: str) -> bool:
        """Check whether the tenant has a live adapter of that name.

        Raises:
            Conflict: it has one whose name differs in case only.
        """
        found = await self.name_of(name)
        if found not in (None, name):
            raise other_case(name, str(found))
        return found is not None

    async def num_aliases(self, adapter: Adapter) -> int:
        return (
            await self._session.scalar(select(func.count()).select_from(Alias).where(Alias.adapter_id == adapter.id))
            or 0
        )

    async def all_aliases(self, adapter: Adapter) -> Sequence[Alias]:
        """List all aliases by name, `LIMITS.max_aliases_per_adapter` at most."""
        return (
            await self._session.scalars(select(Alias).where(Alias.adapter_id == adapter.id).order_by(Alias.name))
        ).all()

    async def users_of(self, adapter: Adapter, number: int) -> list[str]:
        """Describe what uses the version; an empty list means that it may be deleted."""
        aliases = await self.all_aliases(adapter)
        naming = [alias.name for alias in aliases if number in target_of(alias).versions]
        shadowed = [
            alias.name for alias in aliases if (shadow := shadow_of(alias)) is not None and shadow.version == number
        ]
        users = [f"the aliases {', '.join(naming)} point to it"] if naming else []
        users += [f"it is the shadow of the aliases {', '.join(shadowed)}"] if shadowed else []
        return users + (["it is the adapter's fallback"] if adapter.fallback == str(number) else [])

    async def adapters(self, *, after: str | None, limit: int, with_notes: bool) -> Sequence[Adapter]:
        """List live adapters by name, starting after the key `after`.

        With `with_notes`, they have their notes.
        """
        query = select(Adapter).where(self._mine(), Adapter.deleted_at.is_(None))
        query = query.order_by(Adapter.name_key).limit(limit)
        if not with_notes:
            query = query.options(defer(Adapter.notes, raiseload=True))
        return (await self._session.scalars(query if after is None else query.where(Adapter.name_key > after))).all()

    async def versions(
        self, adapter: Adapter, *, before: int | None, limit: int, with_notes: bool
    ) -> Sequence[AdapterVersion]:
        """List the versions that aren't deleted, newest first, with numbers below `before`."""
        query = (
            select(AdapterVersion)
            .where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.deleted_at.is_(None))
            .order_by(AdapterVersion.number.desc())
            .limit(limit)
        )
        query = query if before is None else query.where(AdapterVersion.number < before)
        if not with_notes:
            query = query.options(defer(AdapterVersion.notes, raiseload=True))
        return (await self._session.scalars(query)).all()

    # --- records ---

    async def version_records(self, adapter: Adapter, rows: Iterable[AdapterVersion]) -> list[VersionRecord]:
        """Convert the rows to records, each with its aliases and its newest evaluation."""
        rows = list(rows)
        names: dict[int, list[str]] = {}
        for alias in await self.all_aliases(adapter):
            for version in target_of(alias).versions:
                names.setdefault(version, []).append(alias.name)
        evaluations = await self._newest_evaluations(adapter, [row.number for row in rows])
        return [
            self._version_record(adapter, row, names.get(row.number, []), evaluations.get(row.number)) for row in rows
        ]

    async def version_record(self, adapter: Adapter, row: AdapterVersion) -> VersionRecord:
        return (await self.version_records(adapter, [row]))[0]

    async def evaluations(self, adapter: Adapter, number: int) -> Sequence[EvaluationRow]:
        """List a version's evaluations, `LIMITS.max_evaluations_per_version` at most.

        The newest comes first.
        """
        row = EvaluationRow
        query = select(row).where(row.adapter_id == adapter.id, row.version == number)
        return (await self._session.scalars(query.order_by(row.created_at.desc(), row.data_sha256.desc()))).all()

    async def _newest_evaluations(self, adapter: Adapter, numbers: Sequence[int]) -> dict[int, EvaluationRecord]:
        """Find the newest evaluation of each of these versions that has one."""
        row = EvaluationRow
        newest = (
            select(row.version, func.max(row.created_at).label("created_at"))
            .where(row.adapter_id == adapter.id, row.version.in_(numbers))
            .group_by(row.version)
            .subquery()
        )
        query = (
            select(row)
            .join(newest, and_(row.version == newest.c.version, row.created_at == newest.c.created_at))
            .where(row.adapter_id == adapter.id)
            .order_by(row.data_sha256)
        )
        return {one.version: evaluation_of(one) for one in await self._session.scalars(query)}

    async def adapter_records(self, rows: Iterable[Adapter]) -> list[AdapterRecord]:
        """Convert the rows to records with counts and aliases."""
        rows = list(rows)
        ids = [row.id for row in rows]
        aliases: dict[str, dict[str, int]] = {}
        splits: dict[str, dict[str, tuple[SplitPart, ...]]] = {}
        for alias in await self._session.scalars(select(Alias).where(Alias.adapter_id.in_(ids)).order_by(Alias.name)):
            target = target_of(alias)
            aliases.setdefault(alias.adapter_id, {})[alias.name] = target.version
            if target.split:
                splits.setdefault(alias.adapter_id, {})[alias.name] = target.split
        # of an index alone: an adapter may have thousands of a trainer's checkpoints
        counted = (
            select(AdapterVersion.adapter_id, AdapterVersion.base_digest, func.count())
            .where(AdapterVersion.adapter_id.in_(ids), AdapterVersion.deleted_at.is_(None))
            .group_by(AdapterVersion.adapter_id, AdapterVersion.base_digest)
            .order_by(AdapterVersion.base_digest)
        )
        by_base: dict[str, dict[str, int]] = {}
        for adapter_id, base, count in (await self._session.execute(counted)).all():
            by_base.setdefault(adapter_id, {})[base] = count
        newest = (
            select(AdapterVersion.number)
            .where(AdapterVersion.adapter_id == Adapter.id, AdapterVersion.deleted_at.is_(None))
            .order_by(AdapterVersion.number.desc())
            .limit(1)
            .scalar_subquery()
        )
        rows_of_newest = (await self._session.execute(select(Adapter.id, newest).where(Adapter.id.in_(ids)))).all()
        latest: dict[str, int | None] = dict(rows_of_newest)
        return [
            AdapterRecord(
                name=row.name,
                aliases=aliases.get(row.id, {}),
                num_versions=sum(by_base.get(row.id, {}).values()),
                latest_version=latest.get(row.id),
                created_at=row.created_at,
                updated_at=row.updated_at,
                revision=row.revision,
                num_versions_by_base=by_base.get(row.id, {}),
                notes=_notes_of(row),
                tags=dict(row.tags),
                fallback=row.fallback,
                splits=splits.get(row.id, {}),
            )
            for row in rows
        ]

    def alias_record(self, adapter: Adapter, row: Alias | None, name: str) -> AliasRecord:
        """Convert the row to a record.

        Raises:
            AliasNotFound: the row is None.
        """
        if row is None:
            raise AliasNotFound(
                f'The adapter "{adapter.name}" has no alias {_shown(name)}.',
                hint=f"See: loraserve adapter show {adapter.name}",
            )
        return AliasRecord(adapter.name, row.name, target_of(row), shadow_of(row), row.revision, row.updated_at)

    def _version_record(
        self, adapter: Adapter, row: AdapterVersion, aliases: Iterable[str], evaluation: EvaluationRecord | None
    ) -> VersionRecord:
        return VersionRecord(
            tenant=self.tenant,
            name=adapter.name,
            version=row.number,
            digest=Digest(row.digest),
            config_blob=Digest(row.config_blob),
            weights_blob=Digest(row.weights_blob),
            state=row.state,
            size_bytes=row.size_bytes,
            rank=row.rank,
            target_modules=tuple(row.target_modules),
            dtype=row.dtype,
            aliases=tuple(aliases),
            created_at=row.created_at,
            checks=tuple(row.checks),
            revision=adapter.revision,
            base_digest=Digest(row.base_digest),
            extras=extras_of(row),
            notes=_notes_of(row),
            tags=dict(row.tags),
            evaluation=evaluation,
            created_by=row.created_by,
        )

    def _numbered(self, adapter: Adapter, number: int) -> Select[AdapterVersion]:
        return select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.number == number)

    def _mine(self) -> ColumnElement[bool]:
        return Adapter.tenant_id == self.tenant

    def _is(self, name: str) -> ColumnElement[bool]:
        """Build the condition of the tenant's adapter of that name, deleted or not."""
        return self._mine() & (Adapter.name_key == name_key(name))


def _notes_of(row: Adapter | AdapterVersion) -> str | None:
    """Read the row's notes; None: they weren't loaded."""
    state: InstanceState[Adapter | AdapterVersion] = inspect(row)
    return None if "notes" in state.unloaded else row.notes


def _no_adapter(name: str) -> AdapterNotFound:
    return AdapterNotFound(f"There is no adapter {_shown(name)}.", hint="See: loraserve adapter list")


def _no_version(adapter: Adapter) -> VersionNotFound:
    return VersionNotFound(
        f'The adapter "{adapter.name}" has no such version.', hint=f"See: loraserve adapter versions {adapter.name}"
    )


def instant_of(row: Adapter | AdapterVersion) -> datetime:
    """Read the time at which the row was deleted."""
    if row.deleted_at is None:
        raise ValueError("the row isn't deleted")
    return row.deleted_at


def target_of(row: Alias) -> AliasTarget:
    return AliasTarget.from_json({"version": row.version, "split": row.split})


def shadow_of(row: Alias) -> ShadowPart | None:
    return None if row.shadow is None else ShadowPart(row.shadow["version"], row.shadow["share"])


def evaluation_of(row: EvaluationRow) -> EvaluationRecord:
    return EvaluationRecord(
        version=row.version,
        data_sha256=row.data_sha256,
        data_name=row.data_name,
        num_lines=row.num_lines,
        metrics=dict(row.metrics),
        base_metrics=dict(row.base_metrics),
        settings=dict(row.settings),
        base_digest=Digest(row.base_digest),
        arithmetic=row.arithmetic,
        created_at=row.created_at,
        created_by=row.created_by,
    )


def _shown(name: str) -> str:
    """Put the name in quotes; don't repeat a text that isn't a valid name."""
    return f'"{name}"' if is_adapter_name(name) else "of that name"
