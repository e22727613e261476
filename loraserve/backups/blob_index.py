"""List of a backup's blobs, a line each: ``DIGEST SIZE``; or ``missing``, ``corrupt`` for SIZE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from adapters_store.base import BlobStore
from loraserve.backups.lines import read_lines
from loraserve.errors import BackupDamaged
from loraserve.types import Digest

MISSING, CORRUPT = "missing", "corrupt"
_LINE = re.compile(rf"([0-9a-f]{{64}}) ([0-9]{{1,16}}|{MISSING}|{CORRUPT})")


def write_index(store: BlobStore, sizes: Mapping[Digest, int], damaged: Mapping[Digest, str]) -> Digest:
    """Write the list to the backup, and return its digest."""
    with store.stage() as staged:
        for digest in sorted(sizes.keys() | damaged.keys()):
            staged.write(f"{digest} {damaged.get(digest) or sizes[digest]}\n".encode())
        return staged.commit()


def read_index(store: BlobStore, digest: str) -> Iterator[tuple[Digest, int | None]]:
    """Yield each blob and its size; None for one that was damaged when the backup was made.

    Raises:
        BackupDamaged: a line is none.
        BlobNotFound, BlobCorrupt, StorageError
    """
    for line in read_lines(store, digest):
        match = _LINE.fullmatch(line.decode("ascii", "replace"))
        if match is None:
            raise BackupDamaged("The backup's list of blobs has a line that can't be parsed.")
        yield Digest(match[1]), int(match[2]) if match[2].isdecimal() else None
