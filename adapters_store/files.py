"""Reading, writing and hashing of local files, with the system's errors translated to ours."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from loraserve.errors import StorageError, StorageFull

CHUNK_BYTES = 1 << 20
"""Piece size for reading and hashing, small enough for the processor's cache."""
_HUGE_PAGE_BYTES = 2 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def fresh_memory(num_bytes: int) -> memoryview:
    """Map writable memory from fresh kernel pages.

    It is zeroed once, allocated when written to, and freed with the last view.
    """
    if not num_bytes:
        return memoryview(bytearray())
    # private: shared pages are a file's, which has no huge ones
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # a fault for each 4 KiB takes longer than reading them; where the kernel has no huge pages,
        # nothing changes
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def read_and_hash(fd: int, num_bytes: int) -> tuple[memoryview, str]:
    """Read the file's first `num_bytes`, or fewer if it is shorter, and hash them with SHA-256.

    Raises:
        OSError
    """
    sha = hashlib.sha256()
    view = fresh_memory(num_bytes)
    position = 0
    while position < num_bytes:
        count = os.preadv(fd, [view[position : position + CHUNK_BYTES]], position)
        if count == 0:
            break
        sha.update(view[position : position + count])
        position += count
    return view[:position], sha.hexdigest()


def write_all(fd: int, view: memoryview) -> None:
    """Write all of `view` at the file's position.

    Raises:
        OSError
    """
    position = 0
    while position < len(view):
        position += os.write(fd, view[position:])


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Translate the system's errors to `StorageFull` or `StorageError`.

    Their messages start with `what`.
    """
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in _FULL else StorageError
        raise kind(f"{what}: {error.strerror or error}.") from error
