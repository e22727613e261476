"""A folder of backups: ``blobs/`` that they share, and ``ID.json``, the manifest of each."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapters_store import LocalStore
from adapters_store.files import storage_errors, write_all
from loraserve import faults
from loraserve.backups.blob_index import read_index
from loraserve.backups.manifest import MAX_MANIFEST_BYTES, Manifest
from loraserve.errors import BackupDamaged, ConfigError
from loraserve.types import Digest

_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_LOCK = "lock"


class BackupFolder:
    """Backups in one folder. A blob that several have is stored once.

    A backup exists once its manifest does, which is written last.
    """

    def __init__(self, path: Path, *, is_made: bool = False) -> None:
        """Open the folder.

        Args:
            is_made: make it, readable by its owner only, if it isn't there.

        Raises:
            ConfigError: it isn't there, has something else in it, or can't be used.
        """
        self.path = path
        try:
            if is_made:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = set(os.listdir(path))
        except OSError as error:
            raise ConfigError(f"The folder of backups {path} can't be opened: {error.strerror}.") from error
        foreign = sorted(name for name in names if not _is_ours(name))
        if foreign and "blobs" not in names:
            raise ConfigError(
                f"{path} isn't a folder of backups: it has {foreign[0]!r} in it.", hint="Name an empty or a new folder."
            )
        if not is_made and "blobs" not in names:
            raise ConfigError(f"{path} has no backups.", hint=f"Make one with: loraserve backup {path}")
        self.store = LocalStore(path / "blobs")

    def close(self) -> None:
        self.store.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder for the length of a with block.

        Raises:
            ConfigError: one does already.
        """
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"Another backup to {self.path} is running.", hint="Wait until it ends.") from error
            yield
        finally:
            os.close(fd)

    def ids(self) -> list[str]:
        """List the ids of the backups, oldest first."""
        return sorted(
            name[:-5] for name in os.listdir(self.path) if name.endswith(".json") and _ID.fullmatch(name[:-5])
        )

    def manifest(self, backup: str | None = None) -> Manifest:
        """Read the manifest of the backup with this id, or of the newest.

        Raises:
            ConfigError: there is none.
            BackupDamaged: it can't be parsed.
        """
        ids = self.ids()
        if not ids or (backup is not None and backup not in ids):
            what = "no backup" if backup is None else f"no backup {backup!r}"
            raise ConfigError(f"{self.path} has {what}.", hint=f"See: loraserve restore {self.path} --list")
        path = self.path / f"{backup or ids[-1]}.json"
        with storage_errors(f"{path} can't be read"), path.open("rb") as file:
            return Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1), str(path))

    def add(self, manifest: Manifest) -> None:
        """Write the manifest durably: from now on, the backup exists.

        Raises:
            StorageFull, StorageError
        """
        staged = self.path / f".{secrets.token_hex(8)}"
        with storage_errors("The backup's manifest can't be written"):
            fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, memoryview(manifest.encode()))
                os.fsync(fd)
                faults.hit("backup.before_manifest")
                staged.rename(self.path / f"{manifest.id}.json")
            except BaseException:
                with suppress(OSError):
                    staged.unlink()
                raise
            finally:
                os.close(fd)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def keep(self, count: int) -> int:
        """Remove all but the newest backups, and the blobs that only those had.

        Nothing is removed if a kept manifest can't be read. Returns the number of removed backups.

        Raises:
            BackupDamaged, StorageError
        """
        ids = self.ids()
        old, kept = ids[:-count], ids[-count:]
        if not old:
            return 0
        needed: set[Digest] = set()
        for backup in kept:
            manifest = self.manifest(backup)
            needed |= manifest.blobs_of_rows()
            needed.update(digest for digest, _ in read_index(self.store, manifest.index))
        with storage_errors("An old backup can't be removed"):
            for backup in old:
                (self.path / f"{backup}.json").unlink()
        for digest in list(self.store.iter_digests()):
            if digest not in needed:
                self.store.delete(digest)
        return len(old)

    def sweep(self) -> None:
        """Remove what killed backups left next to the manifests."""
        with suppress(OSError):
            for path in self.path.glob(".????????????????"):
                path.unlink()


def _is_ours(name: str) -> bool:
    return (
        name in ("blobs", _LOCK) or name.startswith(".") or (name.endswith(".json") and bool(_ID.fullmatch(name[:-5])))
    )


def damaged_blobs(num_damaged: int, some: list[str], what: str, hint: str) -> BackupDamaged:
    """Build the error for blobs that are missing or have other bytes; name the first few."""
    names = ", ".join(some[:5]) + (f" and {num_damaged - 5:,} more" if num_damaged > 5 else "")
    return BackupDamaged(f"{num_damaged:,} blobs {what}: {names}.", hint=hint)
