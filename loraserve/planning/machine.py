"""Facts of this machine known without torch.

They are its memory, its GPU's by the driver's own program, and the rate of its disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from loraserve.errors import StorageError
from loraserve.limits import MIB

SAMPLE_BYTES = 32 * MIB
_PIECE_BYTES = MIB

_CGROUPS = (
    # version 2, version 1: limit, use
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int | None:
    """Read the bytes that this machine or container has left; None if the system has no figure."""
    found = [n for n in (_meminfo("MemAvailable"), *(_left_of(*paths) for paths in _CGROUPS)) if n is not None]
    return min(found, default=None)


def gpu_memory() -> int | None:
    """Read the bytes of the first GPU, used or not.

    None if the driver's program is missing or finds none.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 (no word of it is anybody's)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.strip().splitlines()[:1]
    return int(first[0]) * MIB if done.returncode == 0 and first and first[0].strip().isdecimal() else None


def nearest_folder(path: Path) -> Path:
    """Find the path's nearest existing folder: itself, or a parent."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _left_of(limit: str, use: str) -> int | None:
    try:
        most, used = Path(limit).read_text(encoding="ascii").strip(), Path(use).read_text(encoding="ascii").strip()
        return max(0, int(most) - int(used)) if most.isdecimal() else None
    except (OSError, ValueError):
        return None


def disk_rate(folder: Path, num_bytes: int = SAMPLE_BYTES) -> float:
    """Measure bytes per second of reading a file in `folder` and hashing it.

    One follows the other as in a loader; the file is gone afterwards. The system is advised to
    forget the file before it is read. Where it doesn't (a file system in memory, a disk with a
    cache of its own), the rate is that cache's.

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
