"""Lines of a blob."""

from __future__ import annotations

from collections.abc import Iterator

from adapters_store.base import BlobStore
from loraserve.errors import BackupDamaged

_MAX_LINE_BYTES = 1 << 28
"""Size of a row as JSON; the largest is a stored response's."""


def read_lines(store: BlobStore, digest: str) -> Iterator[bytes]:
    """Yield the blob's lines without their ends. The last ones come only after all is verified.

    Raises:
        BackupDamaged: a line is too long.
        BlobNotFound, BlobCorrupt, StorageError
    """
    left = bytearray()
    for piece in store.read_pieces(digest):
        left += piece
        if b"\n" in piece:
            *lines, rest = bytes(left).split(b"\n")
            left = bytearray(rest)
            yield from lines
        if len(left) > _MAX_LINE_BYTES:
            raise BackupDamaged(f"The backup's file {digest} has a line of more than {_MAX_LINE_BYTES:,} bytes.")
    if left:
        raise BackupDamaged(f"The backup's file {digest} ends within a line.")
