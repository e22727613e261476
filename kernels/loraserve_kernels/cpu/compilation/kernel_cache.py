"""Compiled kernels on disk, shared by all processes and checkouts of one user on a machine.

numba itself keeps machine code next to each checkout's files, so that a fresh clone compiles what
another has compiled. Here a folder belongs to the sources' content, the versions of Python and
numba, and the processor: ``$XDG_CACHE_HOME/loraserve/kernels/DIGEST``, or
``$NUMBA_CACHE_DIR/loraserve/DIGEST`` where that is set.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

_KERNELS = Path(__file__).resolve().parents[2]
_SOURCES = ("common", "cpu")
_MAX_AGE_S = 30 * 86400.0
"""Seconds after which the folder of other sources, versions or processors is deleted."""
_POLL_S = 0.05
_PATIENCE_S = 300.0
"""Seconds that a process waits for a kernel that another one compiles; then it compiles too."""


class KernelCache:
    """Folder of compiled kernels, with a lock and a mark for each by the kernel's name.

    The pickled machine code in it is executed: the folder belongs to this process' user, and
    no other user may write to it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: set[str] = set()
        self._lock = threading.Lock()

    def is_compiled(self, name: str) -> bool:
        """Check whether a process has compiled the kernel."""
        return self._mark(name).exists()

    def note_compiled(self, name: str) -> None:
        """Mark the kernel as compiled; no-op where the folder can't be written any more."""
        with contextlib.suppress(OSError):
            self._mark(name).touch()

    @contextlib.contextmanager
    def claim(
        self, name: str, patience_s: float = _PATIENCE_S, on_wait: Callable[[], object] = lambda: None
    ) -> Iterator[bool]:
        """Hold the kernel's lock within the block; yield whether it is held.

        Args:
            patience_s: seconds to wait for another process that holds it.
            on_wait: called about every 50 ms of that.
        """
        with self._lock:
            is_held_already = name in self._held
        if is_held_already:
            yield True
            return
        try:
            descriptor = os.open(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            # without a lock two processes may compile the same, which costs time alone
            yield True
            return
        try:
            is_held = _lock(descriptor, patience_s, on_wait)
            if is_held:
                with self._lock:
                    self._held.add(name)
            try:
                yield is_held
            finally:
                if is_held:
                    with self._lock:
                        self._held.discard(name)
        finally:
            os.close(descriptor)

    def _mark(self, name: str) -> Path:
        return self.directory / f"{name}.compiled"


@functools.cache
def kernel_cache() -> KernelCache | None:
    """Open the cache of this process' sources, versions and processor; None where none can be.

    Folders that other sources left a month ago are deleted when a new one is made.
    """
    base = _base()
    if base is None:
        return None
    directory = base / _digest()
    try:
        if not directory.exists():
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_old(base)
            directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        os.utime(directory)
    except OSError:
        return None
    return KernelCache(directory)


def _base() -> Path | None:
    """Find the folder of all caches; None without a home."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / "loraserve"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "loraserve" / "kernels"


def _digest() -> str:
    """Hash everything that machine code depends on into the folder's name."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_KERNELS / folder).rglob("*.py")):
            digest.update(str(path.relative_to(_KERNELS)).encode() + b"\0" + path.read_bytes() + b"\0")
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    for fact in (sys.version, metadata.version("numba"), metadata.version("llvmlite"), _processor(), sorted(settings)):
        digest.update(repr(fact).encode())
    digest.update(repr(sorted(settings.values())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Read the processor's model and instruction sets, as far as the system lists them."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part", "CPU implementer")):
                lines.append(line)
            elif not line:
                # one processor stands for all
                break
    return "\n".join(lines)


def _delete_old(base: Path) -> None:
    oldest = time.time() - _MAX_AGE_S
    for folder in base.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, patience_s: float, on_wait: Callable[[], object]) -> bool:
    """Lock a file for this process; return False where another holds it for `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        except OSError:
            # a file system without locks
            return True
        on_wait()
        time.sleep(_POLL_S)
