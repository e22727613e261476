"""Triton's cache of what it compiles for tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import loraserve_kernels

_KEPT_S = 7 * 24 * 3600.0


@pytest.fixture(scope="module")
def compiler_cache() -> Iterator[None]:
    """A cache of Triton's that later runs share while no module of the kernels changes.

    Triton names an entry by the compiler, the launch and the kernel's source; the folder's name
    holds plain functions that the kernel calls at compile time too.
    """
    import triton  # only here: on its first import Triton decides whether it interprets

    if triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets kernels in this process")
    root = Path(loraserve_kernels.__path__[0])
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    folders = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraserve" / "triton-tests"
    own = folders / sources.hexdigest()[:16]
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(own)
    for folder in folders.iterdir():
        # another worker deletes them too
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(own))
        yield
