"""Staged blobs in local files, common to all stores: writing, hashing and reading back."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self

from adapters_store.base import NUM_FIRST_BYTES
from adapters_store.files import fresh_memory, read_and_hash, storage_errors, write_all
from loraserve import faults
from loraserve.errors import StorageError
from loraserve.types import Digest

KEPT_BYTES = 16 << 20
"""Maximum size up to which bytes are kept in memory for `read`,
so that they needn't be read back and hashed again.
"""


class StagedFile(ABC):
    """`StagedBlob` in an open file, which it owns.

    Stores implement how the file becomes a blob (`_make_durable`).

    Calls are serialized: one thread may discard the blob while another writes, and a closed
    descriptor may be reused.

    Args:
        fd: descriptor of the file.
        is_looked_at: whether the blob will be read before the commit.
    """

    def __init__(self, fd: int, *, is_looked_at: bool) -> None:
        self._fd: int | None = fd
        self._lock = threading.RLock()
        self._sha = hashlib.sha256()
        self._num_bytes = 0
        self._first = b""
        self._kept: memoryview | None = None
        if is_looked_at:
            # without enough address space, the file is read back
            with suppress(OSError):
                self._kept = fresh_memory(KEPT_BYTES)

    @abstractmethod
    def _make_durable(self, fd: int, digest: Digest) -> None:
        """Make the file's bytes a durable blob.

        Raises:
            StorageFull, StorageError
        """

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def digest(self) -> Digest:
        return Digest(self._sha.hexdigest())

    @property
    def first_bytes(self) -> bytes:
        return self._first

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._lock:
            fd = self._live_fd()
            try:
                with storage_errors("The upload can't be written"):
                    faults.hit("blob.write")
                    write_all(fd, view)
            except StorageError:
                self.discard()
                raise
            self._sha.update(view)
            if len(self._first) < NUM_FIRST_BYTES:
                self._first += bytes(view[: NUM_FIRST_BYTES - len(self._first)])
            start, self._num_bytes = self._num_bytes, self._num_bytes + len(view)
            if self._kept is not None and self._num_bytes <= KEPT_BYTES:
                self._kept[start : self._num_bytes] = view
            else:
                self._kept = None

    def read(self) -> memoryview:
        with self._lock:
            fd = self._live_fd()
            if self._kept is not None:
                return self._kept[: self._num_bytes].toreadonly()
            return read_back(fd, self._num_bytes, self.digest)

    def commit(self) -> Digest:
        with self._lock:
            fd, digest = self._live_fd(), self.digest
            try:
                self._make_durable(fd, digest)
            finally:
                self.discard()
        return digest

    def discard(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, None
            self._kept = None
            if fd is not None:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def __del__(self) -> None:
        self.discard()

    def _live_fd(self) -> int:
        if self._fd is None:
            raise StorageError("The staged blob was already committed, discarded or has failed; stage a new one.")
        return self._fd


def read_back(fd: int, num_bytes: int, digest: Digest) -> memoryview:
    """Read a staged file's bytes and verify them.

    Raises:
        StorageError: the bytes can't be read, or differ from those written.
    """
    with storage_errors("The upload can't be read back"):
        data, found = read_and_hash(fd, num_bytes)
    if found != digest:
        raise reads_back_differently()
    return data


def reads_back_differently() -> StorageError:
    return StorageError("The upload's bytes on disk differ from the bytes that were written.", hint="Check the disk.")
