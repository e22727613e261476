"""Facts of this machine known without torch.

They are its memory, and its GPU's by the driver's own program.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from loraserve.limits import MIB

_CGROUPS = (
    # version 2, version 1: limit, use
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int | None:
    """Return the bytes that this machine or container has left; None if the system doesn't say."""
    found = [n for n in (_meminfo("MemAvailable"), *(_left_of(*paths) for paths in _CGROUPS)) if n is not None]
    return min(found, default=None)


def gpu_memory() -> int | None:
    """Return the bytes of the first GPU, used or not.

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
    """Return the path, or its nearest existing parent."""
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
