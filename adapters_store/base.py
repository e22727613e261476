"""Interface of blob stores: immutable bytes under their SHA-256."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from loraserve.errors import BlobCorrupt, BlobNotFound
from loraserve.types import Digest

_DIGEST = re.compile(r"[0-9a-f]{64}")
MARKER = "registry.json"
"""Name of the marker below the store's root, which states the store's registry."""
MAX_MARKER_BYTES = 4096
NUM_FIRST_BYTES = 8
"""Bytes of a staged blob by which its format is recognized."""


def check_digest(digest: str) -> Digest:
    """Check that `digest` is 64 lower-case hex digits, and return it.

    Nothing else may become part of a path or key.

    Raises:
        BlobNotFound: the digest is invalid, so that no blob has it.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BlobNotFound("The digest isn't a SHA-256 in lower-case hex: no blob has this name.")
    return Digest(digest)


def corrupt(digest: Digest, num_bytes: int, found: str) -> BlobCorrupt:
    """Build the error for a blob whose bytes have another hash."""
    return BlobCorrupt(
        f"The blob {digest} is corrupt: its {num_bytes:,} bytes hash to {found}.",
        hint="Upload the adapter again, or restore the blob from a backup.",
    )


def verified(digest: Digest, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces, the last one only after all of them were verified to hash to `digest`.

    Raises:
        BlobCorrupt: the hash differs; the yielded pieces are incomplete.
    """
    sha = hashlib.sha256()
    num_bytes = 0
    held: bytes | None = None
    for piece in pieces:
        sha.update(piece)
        num_bytes += len(piece)
        if held is not None:
            yield held
        held = piece
    if sha.hexdigest() != digest:
        raise corrupt(digest, num_bytes, sha.hexdigest())
    if held is not None:
        yield held


class StagedBlob(Protocol):
    """Blob being written: invisible until `commit`, gone after `discard`.

    Leaving the with block without a commit discards.
    """

    @property
    def num_bytes(self) -> int:
        """Number of bytes written so far."""
        ...

    @property
    def digest(self) -> Digest:
        """SHA-256 of the bytes written so far."""
        ...

    @property
    def first_bytes(self) -> bytes:
        """The first `NUM_FIRST_BYTES`, or all that were written so far."""
        ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write and hash all of `data`.

        Raises:
            StorageFull: the disk is full; the blob can only be discarded.
            StorageError: the write failed; the blob can only be discarded.
        """
        ...

    def read(self) -> memoryview:
        """Read everything written so far, verified, maybe read-only.

        Raises:
            StorageError: the file can't be read or has changed; the blob can only be discarded.
        """
        ...

    def commit(self) -> Digest:
        """Make the blob durable and visible under the returned digest; call it at most once.

        Raises:
            StorageFull: the disk is full.
            StorageError: a write or fsync failed. It isn't repeated on the same file: upload again.
        """
        ...

    def discard(self) -> None:
        """Remove the blob if it isn't committed, after waiting for calls in other threads.

        It may be called repeatedly.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class BlobStore(Protocol):
    """Store of immutable blobs by digest. Safe to use from several threads and processes."""

    def stage(self, *, is_looked_at: bool = False) -> StagedBlob:
        """Create an empty blob to write to.

        Args:
            is_looked_at: whether it will be read before the commit; up to 16 MiB are kept in memory
                for that.

        Raises:
            StorageError: the blob can't be created.
        """
        ...

    def read(self, digest: str) -> memoryview:
        """Read the blob's bytes, verified against `digest`, into writable memory of the caller.

        Raises:
            BlobNotFound: there is no such blob.
            BlobCorrupt: its bytes no longer hash to `digest`.
            StorageError: the blob can't be read.
        """
        ...

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        """Yield the blob's bytes in pieces of some MiB, the last one only after all are verified.

        Raises:
            BlobNotFound: there is no such blob; raised before the first piece.
            BlobCorrupt: raised instead of the last piece.
            StorageError: the blob can't be read.
        """
        ...

    def num_bytes(self, digest: str) -> int:
        """Look up the blob's stored size, without verifying its bytes.

        Raises:
            BlobNotFound: there is no such blob.
        """
        ...

    def exists(self, digest: str) -> bool:
        """Check whether the blob exists, without verifying its bytes."""
        ...

    def delete(self, digest: str) -> bool:
        """Delete the blob, and return whether it existed.

        Raises:
            StorageError: the blob can't be deleted.
        """
        ...

    def iter_digests(self) -> Iterator[Digest]:
        """Yield the digests of all blobs in any order.

        Blobs that are committed or deleted meanwhile may be missing.
        """
        ...

    def read_marker(self) -> bytes | None:
        """Read the store's marker; None if there is none.

        At most `MAX_MARKER_BYTES` + 1 bytes of it are returned.

        Raises:
            StorageError: the marker can't be read.
        """
        ...

    def swap_marker(self, expected: bytes | None, data: bytes) -> bool:
        """Replace the marker durably by `data` if it still is `expected`; return whether it was.

        None is no marker. One of several concurrent callers succeeds. After a lost answer the call
        may return False though `data` was written, so read the marker again.

        Raises:
            StorageError: the marker can't be written.
        """
        ...

    def sweep(self) -> int:
        """Remove the staged blobs of dead writers in any process, and return their number."""
        ...

    def close(self) -> None: ...
