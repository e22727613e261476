"""Manifest of a backup: what it holds, and the digests by which all of it is verified."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from loraserve.errors import BackupDamaged
from loraserve.types import Digest

FORMAT: Final = "loraserve-backup-1"
MAX_MANIFEST_BYTES = 1 << 20


class TableRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table's rows, as a blob of the backup."""

    name: str
    num_rows: int
    blob: str


class BaseVersions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of live versions of one base."""

    digest: str
    num_versions: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of one backup."""

    id: str
    made_at: str
    program: str
    """Version of loraserve that made it."""
    revision: str
    """Revision of the tables."""
    registry: str | None
    """Id of the registry; None: it has claimed no store yet."""
    tables: list[TableRows]
    index: str
    """Blob that lists the registry's blobs (`loraserve.backups.blob_index`)."""
    num_blobs: int
    num_bytes: int
    """Bytes of the registry's blobs."""
    num_damaged: int
    """Blobs that were missing or corrupt in the store when the backup was made."""
    bases: list[BaseVersions]

    def encode(self) -> bytes:
        """Encode the manifest's file."""
        body = msgspec.json.encode(self)
        return msgspec.json.encode(_File(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"

    @classmethod
    def parse(cls, data: bytes, name: str) -> Manifest:
        """Parse a manifest's file.

        Args:
            name: of the file, for messages.

        Raises:
            BackupDamaged: the bytes aren't those that were written, or of a newer format.
        """
        try:
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError("it is too large")
            file = msgspec.json.decode(data, type=_File)
            if file.format != FORMAT:
                raise BackupDamaged(
                    f'{name} has the format "{file.format[:64]}"; this program reads {FORMAT}.',
                    hint="Restore with the loraserve that made it, or a newer one.",
                )
            if hashlib.sha256(bytes(file.manifest)).hexdigest() != file.sha256:
                raise ValueError("its bytes don't hash to its own sha256")
            return msgspec.json.decode(file.manifest, type=cls)
        except (ValueError, RecursionError) as error:
            raise BackupDamaged(
                f"{name} isn't a backup's manifest, or is damaged: {error}.", hint="Restore another backup."
            ) from error

    def blobs_of_rows(self) -> set[Digest]:
        """Collect the blobs that hold the rows and the index."""
        return {Digest(self.index), *(Digest(table.blob) for table in self.tables)}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    sha256: str
    manifest: msgspec.Raw
