"""Restore of a backup into an empty database and an empty store.

Blobs first, each verified; then all rows in one transaction, as a publish does; then the store is
claimed for the registry, which gets a new identity. A restore that was killed can be repeated: what
it left in the store is the backup's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, insert

from adapters_store.base import BlobStore
from loraserve import faults
from loraserve.backups.blob_index import read_index
from loraserve.backups.copying import BlobCopies, for_each, whole_size
from loraserve.backups.folder import BackupFolder, damaged_blobs
from loraserve.backups.manifest import Manifest
from loraserve.backups.table_rows import insert_tables
from loraserve.db import migrate
from loraserve.db.models import AuditRow
from loraserve.db.session import Clock, Database, parse_database_url, utc_now
from loraserve.errors import ConfigError
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.types import Digest


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore or a verification."""

    manifest: Manifest
    num_rows: int
    num_damaged: int
    """Blobs that the backup hasn't, or has with other bytes."""


class Restore:
    """Verification and restore of one backup.

    Args:
        is_damage_accepted: whether what is whole is restored, if the backup is damaged.
    """

    def __init__(
        self,
        folder: BackupFolder,
        manifest: Manifest,
        *,
        is_damage_accepted: bool = False,
        clock: Clock = utc_now,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._is_damage_accepted = is_damage_accepted
        self._clock = clock

    async def verify(self) -> Restored:
        """Read all of the backup; nothing is written.

        Raises:
            BackupDamaged: a blob is missing or has other bytes.
            StorageError
        """
        blobs = self._index()
        await self._check_rows()
        damaged: list[Digest] = [digest for digest, size in blobs.items() if size is None]

        def look(digest: Digest) -> None:
            if whole_size(self._folder.store, digest) is None:
                damaged.append(digest)

        await for_each([digest for digest, size in blobs.items() if size is not None], look)
        return self._restored(damaged)

    async def run(self, database_url: str, store: BlobStore, *, actor: str) -> Restored:
        """Restore into the database and the store.

        Raises:
            ConfigError: the database has tables, or the store has a marker or other blobs.
            SchemaOutdated: a newer loraserve made the backup.
            BackupDamaged: a blob is missing or has other bytes; the database is unchanged.
            DatabaseUnavailable, StorageFull, StorageError
        """
        migrate.check_known(self._manifest.revision)
        await check_empty_database(database_url)
        blobs = self._index()
        self._check_store(store, blobs.keys())
        await self._check_rows()
        copies = BlobCopies(self._folder.store, store)
        await copies.copy([digest for digest, size in blobs.items() if size is not None])
        damaged = [*copies.damaged, *(digest for digest, size in blobs.items() if size is None)]
        restored = self._restored(damaged)
        faults.hit("restore.before_rows")
        await migrate.fill(database_url, self._manifest.revision, lambda connection: self._insert(connection, actor))
        faults.hit("restore.after_rows")
        database = Database(database_url)
        try:
            await StoreClaim(database, store).adopt(actor=actor)
        finally:
            await database.dispose()
        return restored

    def _index(self) -> dict[Digest, int | None]:
        """Read the backup's blobs and their sizes.

        Raises:
            BackupDamaged, StorageError
        """
        if whole_size(self._folder.store, Digest(self._manifest.index)) is None:
            raise damaged_blobs(1, [self._manifest.index], "of the backup are damaged", "Restore another backup.")
        return dict(read_index(self._folder.store, self._manifest.index))

    async def _check_rows(self) -> None:
        damaged: list[str] = []

        def look(digest: Digest) -> None:
            if whole_size(self._folder.store, digest) is None:
                damaged.append(digest)

        await for_each(sorted(self._manifest.blobs_of_rows()), look)
        if damaged:
            raise damaged_blobs(len(damaged), damaged, "of the backup's rows are damaged", "Restore another backup.")

    def _restored(self, damaged: list[Digest]) -> Restored:
        if damaged and not self._is_damage_accepted:
            raise damaged_blobs(
                len(damaged),
                sorted(damaged),
                "of the backup are missing or damaged",
                "Restore another backup, or all that is whole with: --allow-damaged",
            )
        return Restored(self._manifest, sum(table.num_rows for table in self._manifest.tables), len(damaged))

    def _check_store(self, store: BlobStore, ours: Collection[Digest]) -> None:
        if store.read_marker() is not None:
            raise ConfigError(
                "The store belongs to a registry already; a backup is restored into an empty one.",
                hint="Name an empty folder or prefix with --store-url.",
            )
        for digest in store.iter_digests():
            if digest not in ours:
                raise ConfigError(
                    f"The store isn't empty: it has the blob {digest}, which isn't the backup's.",
                    hint="Name an empty folder or prefix with --store-url.",
                )

    def _insert(self, connection: Connection, actor: str) -> None:
        insert_tables(connection, self._folder.store, self._manifest.tables)
        row = {
            "at": self._clock(),
            "tenant_id": None,
            "actor": actor,
            "action": "backup.restore",
            "target": self._manifest.id,
            "detail": {"made_at": self._manifest.made_at, "registry": self._manifest.registry},
        }
        connection.execute(insert(AuditRow).values(row))


async def check_empty_database(url: str) -> None:
    """Check that the database has no tables. A SQLite file that isn't there isn't made.

    Raises:
        ConfigError, DatabaseUnavailable
    """
    path = database_path(url)
    if path is not None and not path.exists():
        return
    if await migrate.current(url) is not None:
        raise ConfigError(
            "The database isn't empty; a backup is restored into an empty one.",
            hint="Name another with --database-url or --data-dir.",
        )


def database_path(url: str) -> Path | None:
    """Parse the path of a SQLite database; None for others."""
    parsed = parse_database_url(url)
    return Path(parsed.database or "") if parsed.drivername.startswith("sqlite") else None
