"""Space next to a SQLite database that only its deletions use, so that they pass on a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from loraserve.limits import KIB, MIB

_RESERVE_BYTES = 2 * MIB
"""Bytes of some hundred deletions, each of which appends its pages to the log."""
_LEAST_BYTES = 64 * KIB


class SpaceReserve:
    """File that takes space, and gives it to a deletion while the disk has none left."""

    def __init__(self, path: Path) -> None:
        """Name the file; `hold` makes it."""
        self._path = path
        self._num_bytes = 0
        self._is_held = False

    def hold(self) -> None:
        """Take what the reserve lacks, as far as there is space; the disk may have no such call."""
        self._is_held = True
        with suppress(OSError):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._grow(file)
            finally:
                os.close(file)

    def release(self) -> None:
        """Give the space back if the disk has less than that left; no-op if it isn't held."""
        if not self._is_held or not self._num_bytes or self._num_free_bytes() > _RESERVE_BYTES:
            return
        with suppress(OSError):
            os.truncate(self._path, 0)
            self._num_bytes = 0

    def restore(self) -> None:
        """Take the space again, after a deletion and once there is some; no-op if it is held."""
        if self._is_held and self._num_bytes < _RESERVE_BYTES and self._num_free_bytes() >= _LEAST_BYTES:
            self.hold()

    def _grow(self, file: int) -> None:
        wanted = _RESERVE_BYTES
        while wanted >= max(_LEAST_BYTES, self._num_bytes):
            try:
                os.posix_fallocate(file, 0, wanted)
            except OSError:
                # what was taken of it would be kept
                os.truncate(file, self._num_bytes)
                wanted //= 2
            else:
                self._num_bytes = wanted
                return

    def _num_free_bytes(self) -> int:
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize
