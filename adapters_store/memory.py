"""Blobs in anonymous memory (memfd): they have no name, and the kernel frees them with the process.

So nothing is written to a disk, and a killed server leaves nothing to sweep. The engine opens the
memory by its descriptor's path in ``/proc``, which needs the same user and a server that lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adapters_store.base import NUM_FIRST_BYTES, corrupt
from adapters_store.files import storage_errors, write_all
from loraserve.errors import BlobNotFound, StorageError
from loraserve.types import Digest, ExtraFile, MemoryFile


class MemoryBlob:
    """Weights that are written to memory, and then the config behind them.

    It owns the memory until `close`. A thread may close it while another one writes.

    Args:
        take: called with the number of bytes before memory is taken; may refuse by raising.
        give_back: called with the number of bytes that were taken, when they are freed.
    """

    def __init__(
        self, *, take: Callable[[int], None] = lambda _: None, give_back: Callable[[int], None] = lambda _: None
    ) -> None:
        """Create an empty one.

        Raises:
            StorageError: the system has no anonymous memory of this kind, or no descriptors.
        """
        if not hasattr(os, "memfd_create"):
            raise StorageError("This system has no anonymous memory for ephemeral adapters; Linux has.")
        self._take = take
        self._give_back = give_back
        self._lock = threading.Lock()
        self._sha = hashlib.sha256()
        self._num_weights_bytes = 0
        self._num_taken = 0
        with storage_errors("Memory for the adapter can't be had"):
            self._fd: int | None = os.memfd_create("loraserve-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._num_weights_bytes

    @property
    def digest(self) -> Digest:
        """SHA-256 of the weights."""
        return Digest(self._sha.hexdigest())

    @property
    def first_bytes(self) -> bytes:
        """The first `NUM_FIRST_BYTES` of the weights, or all that there are."""
        return bytes(self.read()[:NUM_FIRST_BYTES])

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append to the weights.

        Raises:
            StorageError: it is closed, or the system has no memory.
            RateLimited, Overloaded: `take` refuses.
        """
        view = memoryview(data).cast("B")
        self._append(view)
        self._sha.update(view)
        self._num_weights_bytes += len(view)

    def read(self) -> memoryview:
        """Map the weights, read-only, without copying them.

        Raises:
            StorageError: it is closed, or the memory can't be mapped.
        """
        with self._lock, storage_errors("The adapter's memory can't be read"):
            fd = self._open_fd()
            if not self._num_weights_bytes:
                return memoryview(b"")
            # private: a shared mapping would forbid the seal
            pages = mmap.mmap(fd, self._num_weights_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        return memoryview(pages)

    def seal(self, config: bytes, extras: bytes = b"") -> MemoryFile:
        """Append the config and extra files, forbid any further change, and return where all are.

        Raises:
            StorageError: it is closed, or the system has no memory.
            RateLimited, Overloaded: `take` refuses.
        """
        self._append(memoryview(config + extras))
        with self._lock, storage_errors("The adapter's memory can't be sealed"):
            fd = self._open_fd()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            return MemoryFile(
                path=f"/proc/{os.getpid()}/fd/{fd}",
                weights_bytes=self._num_weights_bytes,
                config_bytes=len(config),
                extra_bytes=len(extras),
            )

    def close(self) -> None:
        """Free the memory, once no mapping of it is left; no-op if called again."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is None:
                return
            os.close(fd)
            self._give_back(self._num_taken)

    def _append(self, view: memoryview) -> None:
        with self._lock:
            fd = self._open_fd()
            self._take(len(view))
            self._num_taken += len(view)
            with storage_errors("The adapter can't be held in memory"):
                write_all(fd, view)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StorageError("The adapter's memory was freed while it was being filled.")
        return self._fd


def read_memory(file: MemoryFile, config: Digest, weights: Digest) -> tuple[memoryview, memoryview]:
    """Map the config and the weights in `file`, each verified against its digest.

    Both are in writable memory of the caller, which is shared with the file until it is written to.

    Raises:
        BlobNotFound: the memory was freed, or its server has ended.
        BlobCorrupt: the bytes are others: the descriptor was used again.
        StorageError: the memory can't be read.
    """
    with _opened(file, weights) as fd, storage_errors("The memory of an ephemeral version can't be read"):
        size = os.fstat(fd).st_size
        pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(pages)
    end = file.weights_bytes + file.config_bytes
    parts = view[file.weights_bytes : end], view[: file.weights_bytes]
    for part, digest in zip(parts, (config, weights), strict=True):
        if (sha := hashlib.sha256(part).hexdigest()) != digest:
            raise corrupt(digest, len(part), sha)
    return parts


def read_extra_bytes(file: MemoryFile, offset: int, extra: ExtraFile) -> bytes:
    """Read an extra file in `file`, verified against its digest.

    Args:
        offset: of its first byte behind the config.

    Raises:
        BlobNotFound, BlobCorrupt, StorageError: as `read_memory`.
    """
    with _opened(file, extra.blob) as fd, storage_errors("The memory of an ephemeral version can't be read"):
        data = os.pread(fd, extra.num_bytes, file.weights_bytes + file.config_bytes + offset)
    if (sha := hashlib.sha256(data).hexdigest()) != extra.blob:
        raise corrupt(extra.blob, len(data), sha)
    return data


@contextmanager
def _opened(file: MemoryFile, digest: Digest) -> Iterator[int]:
    """Open the memory, which has the size that is expected.

    Args:
        digest: what is looked for in it, for messages.
    """
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BlobNotFound(f"The memory of the ephemeral version {digest} is gone.") from error
    try:
        found = os.fstat(fd).st_size
        if found != file.weights_bytes + file.config_bytes + file.extra_bytes:
            raise corrupt(digest, found, "another size")
        yield fd
    finally:
        os.close(fd)
