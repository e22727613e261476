"""What any blob store does: immutable bytes under their SHA-256. It knows no SQL and no tensors."""

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
"""The name, below the store's root, of what says whose store it is."""
MAX_MARKER_BYTES = 4096


def check_digest(digest: str) -> Digest:
    """`digest` itself, if it is 64 lower-case hex digits; nothing else ever becomes part of a path or a key.

    Raises:
        BlobNotFound: it isn't, so that no blob has it.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BlobNotFound("That isn't a SHA-256 in lower-case hex; no blob has it.")
    return Digest(digest)


def corrupt(digest: Digest, num_bytes: int, found: str) -> BlobCorrupt:
    """The error for a blob whose bytes hash to something else."""
    return BlobCorrupt(
        f"The blob {digest} is corrupt: its {num_bytes:,} bytes hash to {found}.",
        hint="Upload the adapter again, or restore the blob from a backup.",
    )


def verified(digest: Digest, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """`pieces`, each a piece late: the last one comes only once all of them are known to hash to `digest`.

    Raises:
        BlobCorrupt: they don't. What was given until then is never the whole.
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
    """Bytes on their way in: invisible until `commit`, gone after `discard`. Leaving the with block without a commit discards."""

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        ...

    @property
    def digest(self) -> Digest:
        """SHA-256 of the bytes written so far."""
        ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """All of `data` is written and hashed.

        Raises:
            StorageFull: no room left; the blob can only be discarded.
            StorageError: the write failed; the same.
        """
        ...

    def read(self) -> memoryview:
        """Everything written so far, for checks before the commit. What is read back of the file is verified; it may be read-only.

        Raises:
            StorageError: the file reads back differently, or can't be read; the blob can only be discarded.
        """
        ...

    def commit(self) -> Digest:
        """The blob is durable and visible under the digest returned, also after a power cut. At most once.

        Raises:
            StorageFull: no room left.
            StorageError: a write or fsync failed. It isn't tried again on the same file: upload again.
        """
        ...

    def discard(self) -> None:
        """Nothing of an uncommitted blob is left; a call that is under way in another thread ends first. May be called any number of times, also after `commit`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class BlobStore(Protocol):
    """Immutable blobs by digest. Safe to use from several threads and several processes."""

    def stage(self, *, is_looked_at: bool = False) -> StagedBlob:
        """A new empty blob to write to.

        Args:
            is_looked_at: whether it will be read before the commit: what is short of it, 16 MiB or less, is kept in memory for that.

        Raises:
            StorageError: it can't be created.
        """
        ...

    def read(self, digest: str) -> memoryview:
        """The blob's bytes, verified against `digest`, in memory that is the caller's own: writable and shared with nobody.

        Raises:
            BlobNotFound: no such blob.
            BlobCorrupt: its bytes no longer hash to `digest`.
            StorageError: it can't be read.
        """
        ...

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        """The blob's bytes in pieces of some MiB: for what needn't have them all at once. The last one comes only once all are verified.

        Raises:
            BlobNotFound: no such blob; before the first piece.
            BlobCorrupt: in place of the last piece.
            StorageError: it can't be read (on).
        """
        ...

    def num_bytes(self, digest: str) -> int:
        """The blob's size, as the store has it, unverified.

        Raises:
            BlobNotFound: no such blob.
        """
        ...

    def exists(self, digest: str) -> bool:
        """Whether a blob is there; its bytes aren't verified."""
        ...

    def delete(self, digest: str) -> bool:
        """The blob is gone. False if it wasn't there.

        Raises:
            StorageError: it can't be removed.
        """
        ...

    def iter_digests(self) -> Iterator[Digest]:
        """Every blob committed before the call, in no particular order; what comes or goes meanwhile may or may not be in it."""
        ...

    def read_marker(self) -> bytes | None:
        """Return what says whose store this is, at most `MAX_MARKER_BYTES` and a byte of it; None if nothing does.

        Raises:
            StorageError: it can't be read.
        """
        ...

    def swap_marker(self, expected: bytes | None, data: bytes) -> bool:
        """Put `data` in the marker's place, durably, if that still holds `expected` (None: nothing); return whether it did.

        Several processes and machines may try at once: one of them succeeds. After a lost answer the call may return False though
        `data` is there, so read the marker again.

        Raises:
            StorageError: it can't be written.
        """
        ...

    def sweep(self) -> int:
        """What dead writers left staged is gone; how many there were. Writers that live, in any process, are left alone."""
        ...

    def close(self) -> None: ...
