"""``loraserve backup`` and ``loraserve restore``: a registry and its blobs, in a folder."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.local import coroutine
from loraserve.cli.local.serve_flags import takes_settings
from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format, Output, size

if TYPE_CHECKING:
    from loraserve.backups.backup import Made
    from loraserve.backups.folder import BackupFolder
    from loraserve.backups.manifest import Manifest
    from loraserve.backups.restore import Restored
    from loraserve.settings import Settings

TARGET = ("data_dir", "database_url", "store_url", "config")
SOURCE = (*TARGET, "retention_s")
ACTOR = "cli"
_BYTES = ("bytes", "copied_bytes")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of backups; it may hold several.")]


@takes_settings(SOURCE)
def backup(
    folder: FolderArgument,
    keep: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, metavar="N", help="Remove all but the newest N backups (default: none)."),
    ] = None,
    format: FormatOption = None,
    **settings: str | bool | None,
) -> None:
    """Back up the registry and its blobs to a folder, while servers run.

    Blobs that the folder has already are verified and not copied again. Print the backup's id.
    """
    with reporting(format, named={"DIR": str(folder)}) as output:
        from loraserve.settings import Settings

        made = coroutine.run(_back_up(Settings.load(model="none", **settings), folder, keep))
        manifest = made.manifest
        record = _record(manifest) | {"copied": made.num_copied, "copied_bytes": made.num_copied_bytes}
        _show(output, record | {"removed": made.num_removed})
        if manifest.num_damaged:
            from loraserve.errors import BackupDamaged

            of = f" (of {', '.join(made.damaged)})" if made.damaged else ""
            raise BackupDamaged(
                f"The backup was made, but {manifest.num_damaged:,} blobs{of} are missing or damaged in the store.",
                hint="Push these versions again, then make another backup.",
            )
        output.note(f"Made. To restore it: loraserve restore {folder} --backup {manifest.id}")


@takes_settings(TARGET)
def restore(
    folder: FolderArgument,
    backup: Annotated[str | None, typer.Option(metavar="ID", help="Backup to take (default: the newest).")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the folder's backups, and change nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read and verify all of it, and change nothing.")] = False,
    allow_damaged: Annotated[
        bool, typer.Option("--allow-damaged", help="Restore what is whole of a damaged backup.")
    ] = False,
    format: FormatOption = None,
    **settings: str | bool | None,
) -> None:
    """Restore a backup into an empty database and an empty store. Every byte is verified.

    Stop the servers of the target first; start them afterwards.
    """
    with reporting(format, named={"DIR": str(folder)}) as output:
        if list_ and verify:
            raise typer.BadParameter("--list and --verify exclude each other.")
        from loraserve.backups.folder import BackupFolder
        from loraserve.settings import Settings

        backups = BackupFolder(folder)
        try:
            if list_:
                _list(output, backups)
                return
            checked = None if verify else Settings.load(model="none", **settings)
            manifest = backups.manifest(backup)
            restored = coroutine.run(_restore(backups, manifest, checked, is_damage_accepted=allow_damaged))
        finally:
            backups.close()
        _show(output, _record(manifest) | {"rows": restored.num_rows, "not_restored": restored.num_damaged})
        if verify:
            output.note("Every byte of it is as it was written.")
            return
        output.note(
            "Restored. A server of another base refuses these versions until they are verified on it: loraserve "
            "adapter verify NAME@VERSION --rebase"
        )


async def _back_up(settings: Settings, folder: Path, keep: int | None) -> Made:
    from adapters_store import open_store
    from loraserve.backups.backup import Backup
    from loraserve.backups.folder import BackupFolder
    from loraserve.backups.restore import database_path
    from loraserve.db import migrate
    from loraserve.db.session import Database
    from loraserve.errors import ConfigError

    url = settings.resolved_database_url
    path = database_path(url)
    if path is not None and not path.exists():
        raise ConfigError(f"There is no registry: {path} doesn't exist.", hint="Name it with --data-dir, as for serve.")
    await migrate.check(url)
    backups = BackupFolder(folder, is_made=True)
    store = open_store(settings.resolved_store_url, spool=settings.data_dir / "spool")
    database = Database(url)
    try:
        retention = timedelta(seconds=settings.retention_s)
        return await Backup(database, store, backups, retention=retention, keep=keep).make(actor=ACTOR)
    finally:
        await database.dispose()
        store.close()
        backups.close()


async def _restore(
    backups: BackupFolder, manifest: Manifest, settings: Settings | None, *, is_damage_accepted: bool
) -> Restored:
    from adapters_store import open_store
    from loraserve.backups.restore import Restore, check_empty_database

    restore = Restore(backups, manifest, is_damage_accepted=is_damage_accepted)
    if settings is None:
        return await restore.verify()
    await check_empty_database(settings.resolved_database_url)
    store = open_store(settings.resolved_store_url, spool=settings.data_dir / "spool")
    try:
        return await restore.run(settings.resolved_database_url, store, actor=ACTOR)
    finally:
        store.close()


def _record(manifest: Manifest) -> dict[str, object]:
    return {
        "id": manifest.id,
        "made_at": manifest.made_at,
        "revision": manifest.revision,
        "registry": manifest.registry,
        "blobs": manifest.num_blobs,
        "bytes": manifest.num_bytes,
        "damaged": manifest.num_damaged,
        "bases": ", ".join(f"sha256:{base.digest[:12]} ({base.num_versions})" for base in manifest.bases),
    }


def _show(output: Output, record: dict[str, object]) -> None:
    match output.format:
        case Format.JSON:
            output.json(record)
        case Format.QUIET:
            output.line(str(record["id"]))
        case Format.HUMAN:
            output.pairs(_readable(record))


def _readable(record: dict[str, object]) -> dict[str, object]:
    """Format the bytes and the instant of a record for people."""
    readable = dict(record)
    for name in _BYTES:
        if isinstance(num_bytes := record.get(name), int):
            readable[name] = size(num_bytes)
    return readable | {"made_at": datetime.fromisoformat(str(record["made_at"]))}


def _list(output: Output, backups: BackupFolder) -> None:
    records = [_record(backups.manifest(backup)) for backup in backups.ids()]
    if records:
        output.records(
            [_readable(record) for record in records] if output.format is Format.HUMAN else records, name="id"
        )
    else:
        output.note("No backups.")
