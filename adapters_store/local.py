"""Blobs in a directory: ``ab/cd/<sha256>``.

They are written so that a blob which was acknowledged survives a power cut. The order: bytes →
fsync → rename → fsync of the folder. After a failed fsync the kernel may have dropped the pages and
report success the next time, so that it is never tried again on the same file: the staged file is
removed and the upload fails.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from adapters_store.base import MARKER, MAX_MARKER_BYTES, check_digest, corrupt, verified
from adapters_store.files import CHUNK_BYTES, read_and_hash, storage_errors, write_all
from adapters_store.staged import StagedFile
from loraserve import faults
from loraserve.errors import BlobCorrupt, BlobNotFound, ConfigError, StorageError
from loraserve.types import Digest

logger = logging.getLogger(__name__)

_STAGING = "staging"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for its writer
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """A `BlobStore` in a folder of this machine. Several processes may share it."""

    def __init__(self, root: Path) -> None:
        """Create the folder with mode 0700 if absent, and remove the staged files of dead writers.

        Raises:
            ConfigError: the folder can't be created, or belongs to another user.
        """
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            status = os.fstat(self._root_fd)
            if status.st_uid != os.geteuid():
                raise ConfigError(
                    f"The store {root} belongs to user {status.st_uid}; this process runs as user {os.geteuid()}."
                )
            if stat.S_IMODE(status.st_mode) & 0o077:
                os.fchmod(self._root_fd, 0o700)
            self._staging_fd = _make_folder(_STAGING, self._root_fd)
        except OSError as error:
            raise ConfigError(f"The store {root} can't be opened: {error.strerror}.") from error
        # folders whose own entry this process has seen on disk
        self._durable: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.sweep()

    def stage(self, *, is_looked_at: bool = False) -> LocalStagedBlob:
        self._check_place()
        while True:
            name = secrets.token_hex(16)
            with storage_errors("A staged file can't be created"):
                fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._staging_fd)
                # The lock shows that its writer lives; a sweep that came first has unlinked the
                # file.
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return LocalStagedBlob(self, name, fd, is_looked_at=is_looked_at)
                os.close(fd)

    def read(self, digest: str) -> memoryview:
        digest = check_digest(digest)
        fd = self._open(digest)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BlobCorrupt(f"The blob {digest} isn't a regular file.")
            with storage_errors(f"The blob {digest} can't be read"):
                faults.hit("blob.read")
                data, found = read_and_hash(fd, status.st_size)
        finally:
            os.close(fd)
        if found != digest:
            raise corrupt(digest, status.st_size, found)
        return data

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        digest = check_digest(digest)
        fd = self._open(digest)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BlobCorrupt(f"The blob {digest} isn't a regular file.")
        # closed with the generator, which may never be started
        return verified(digest, _FilePieces(fd, digest))

    def num_bytes(self, digest: str) -> int:
        fd = self._open(check_digest(digest))
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def exists(self, digest: str) -> bool:
        try:
            os.close(self._open(check_digest(digest)))
        except BlobNotFound:
            return False
        except BlobCorrupt:
            # something is there, though it isn't a plain file; `read` reports it
            return True
        return True

    def delete(self, digest: str) -> bool:
        digest = check_digest(digest)
        with storage_errors(f"The blob {digest} can't be removed"):
            try:
                faults.hit("blob.delete")
                os.unlink(f"{digest[:2]}/{digest[2:4]}/{digest}", dir_fd=self._root_fd)
            except FileNotFoundError:
                return False
        return True

    def iter_digests(self) -> Iterator[Digest]:
        for first in _names(self.root, 2):
            for second in _names(self.root / first, 2):
                for name in _names(self.root / first / second, 64):
                    if name.startswith(first + second):
                        yield Digest(name)

    def read_marker(self) -> bytes | None:
        self._check_place()
        return self._read_marker()

    def swap_marker(self, expected: bytes | None, data: bytes) -> bool:
        self._check_place()
        with storage_errors("The store's marker can't be written"):
            # a description of its own: threads that share one share its lock
            root = os.open(".", _FOLDER_FLAGS, dir_fd=self._root_fd)
            try:
                fcntl.flock(root, fcntl.LOCK_EX)
                if self._read_marker() != expected:
                    return False
                name = secrets.token_hex(16)
                fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._staging_fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    write_all(fd, memoryview(data))
                    faults.hit("marker.fsync")
                    os.fsync(fd)
                    os.rename(name, MARKER, src_dir_fd=self._staging_fd, dst_dir_fd=root)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self._staging_fd)
                    raise
                finally:
                    os.close(fd)
                os.fsync(root)
            finally:
                os.close(root)
        return True

    def sweep(self) -> int:
        num_removed = 0
        for name in os.listdir(self._staging_fd):
            try:
                fd = os.open(name, _READ_FLAGS, dir_fd=self._staging_fd)
            except OSError:
                # gone meanwhile: its writer has committed or discarded it
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=self._staging_fd)
                num_removed += 1
            except OSError:
                continue
            finally:
                os.close(fd)
        return num_removed

    def close(self) -> None:
        """Close the folder's descriptors; no-op if called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.close(self._staging_fd)
        os.close(self._root_fd)

    def _read_marker(self) -> bytes | None:
        with storage_errors("The store's marker can't be read"):
            try:
                fd = os.open(MARKER, _READ_FLAGS, dir_fd=self._root_fd)
            except FileNotFoundError:
                return None
            try:
                return os.pread(fd, MAX_MARKER_BYTES + 1, 0)
            finally:
                os.close(fd)

    def _check_place(self) -> None:
        """Raise StorageError if the folder was moved away or replaced.

        What is written by its descriptor wouldn't be found again.
        """
        opened = os.fstat(self._root_fd)
        try:
            found = os.stat(self.root)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
            # shown to tenants too: the path goes to the log alone
            logger.error("the store's folder %s was moved or replaced while the server ran", self.root)
            raise StorageError(
                "The store's folder was moved or replaced while the server ran; nothing was stored.",
                hint="The server's operator must put the folder back, or restart the server.",
            )

    def _open(self, digest: Digest) -> int:
        """Open the blob's file step by step, so that no link is followed below the root."""
        folders: list[int] = []
        try:
            parent = self._root_fd
            for name in (digest[:2], digest[2:4]):
                parent = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
                folders.append(parent)
            return os.open(digest, _READ_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            raise BlobNotFound(f"There is no blob {digest}.") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise BlobCorrupt(f"The blob {digest} isn't a regular file in a plain folder.") from error
            raise StorageError(f"The blob {digest} can't be opened: {error.strerror}.") from error
        finally:
            for fd in folders:
                os.close(fd)

    def _publish(self, staged_name: str, digest: Digest) -> None:
        """Rename the synced staged file durably to the blob `digest`, replacing an equal one."""
        first, second = digest[:2], digest[2:4]
        made: list[tuple[str, int]] = []
        folders = [self._root_fd]
        is_new = is_there = False
        try:
            for name, path in ((first, first), (second, f"{first}/{second}")):
                try:
                    os.mkdir(name, 0o700, dir_fd=folders[-1])
                    made.append((name, folders[-1]))
                    self._durable.discard(path)
                except FileExistsError:
                    pass
                folders.append(os.open(name, _FOLDER_FLAGS, dir_fd=folders[-1]))
            # One at a time in a folder: else a publish that fails could take away what an equal one
            # has just acknowledged.
            fcntl.flock(folders[-1], fcntl.LOCK_EX)
            is_new = not self.exists(digest)
            faults.hit("blob.before_rename")
            os.rename(staged_name, digest, src_dir_fd=self._staging_fd, dst_dir_fd=folders[-1])
            is_there = True
            faults.hit("blob.after_rename")
            faults.hit("blob.folder_fsync")
            os.fsync(folders[2])
            self._sync_parent(f"{first}/{second}", folders[1])
            self._sync_parent(first, folders[0])
            faults.hit("blob.after_folder_fsync")
            self._check_place()
        except OSError:
            # Not known to be on disk. The next attempt must recreate these entries, not fsync the
            # same ones again.
            with suppress(OSError):
                if is_there and is_new:
                    os.unlink(digest, dir_fd=folders[-1])
                for name, parent in reversed(made):
                    os.rmdir(name, dir_fd=parent)
            raise
        finally:
            for fd in folders[1:]:
                os.close(fd)

    def _sync_parent(self, folder: str, parent_fd: int) -> None:
        # Another process may have made the folder and not have got to its fsync yet, so that
        # existing isn't enough.
        if folder not in self._durable:
            os.fsync(parent_fd)
            self._durable.add(folder)


class LocalStagedBlob(StagedFile):
    """`StagedBlob` in a hidden file, locked while this process lives."""

    def __init__(self, store: LocalStore, name: str, fd: int, *, is_looked_at: bool) -> None:
        self._store = store
        self._name = name
        super().__init__(fd, is_looked_at=is_looked_at)

    def _make_durable(self, fd: int, digest: Digest) -> None:
        with storage_errors("The upload can't be made durable"):
            os.fchmod(fd, 0o400)
            faults.hit("blob.fsync")
            os.fsync(fd)
            faults.hit("blob.after_fsync")
            self._store._publish(self._name, digest)

    def discard(self) -> None:
        with self._lock:
            # after a commit the name is gone already
            with suppress(OSError):
                if self._fd is not None:
                    os.unlink(self._name, dir_fd=self._store._staging_fd)
            super().discard()


class _FilePieces:
    """Single-use iterable of a file's bytes in pieces.

    It owns the descriptor, even if it is never iterated.
    """

    def __init__(self, fd: int, digest: Digest) -> None:
        self._fd: int | None = fd
        self._digest = digest

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        try:
            while self._fd is not None:
                with storage_errors(f"The blob {self._digest} can't be read"):
                    faults.hit("blob.read")
                    piece = os.pread(self._fd, CHUNK_BYTES, position)
                if not piece:
                    return
                position += len(piece)
                yield piece
        finally:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self._close()


def _make_folder(name: str, parent_fd: int) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        os.fsync(parent_fd)
    return os.open(name, _FOLDER_FLAGS, dir_fd=parent_fd)


def _names(folder: Path, length: int) -> list[str]:
    """List the entries of `folder` that are hex of that length; none if the folder is gone."""
    try:
        return [n for n in os.listdir(folder) if len(n) == length and not n.strip("0123456789abcdef")]
    except (FileNotFoundError, NotADirectoryError):
        return []
