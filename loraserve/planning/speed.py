"""Rate of reading and hashing files on this machine, as a load of an adapter from disk does."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

from loraserve.errors import StorageError
from loraserve.limits import MIB

SAMPLE_BYTES = 32 * MIB
_PIECE_BYTES = MIB


def disk_rate(folder: Path, num_bytes: int = SAMPLE_BYTES) -> float:
    """Return bytes per second of reading a file in `folder` and hashing it.

    One follows the other as in a loader; the file is gone afterwards. The system is asked to forget
    the file before it is read. Where it doesn't (a file system in memory, a disk with a cache of
    its own), the rate is that cache's.

    Raises:
        StorageError: the folder can't be written or read.
    """
    piece = os.urandom(_PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(num_bytes // _PIECE_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began, digest = time.perf_counter(), hashlib.sha256()
            while data := file.read(_PIECE_BYTES):
                digest.update(data)
            return num_bytes / (time.perf_counter() - began)
    except OSError as error:
        raise StorageError(
            f"{folder} can't be written and read: {error.strerror}.", hint="Give --disk-rate, such as 500MB."
        ) from error
