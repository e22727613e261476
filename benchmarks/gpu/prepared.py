"""Read what tools/gpu_cache.py and tools/gpu_peers.sh prepared for a machine without a network."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".gpu"
CACHE = FOLDER / "triton-cache.tar.xz"
PEERS = FOLDER / "peers"
PACKAGES = FOLDER / "packages"

_KEPT = (".json", ".cubin", ".so")
"""Ends of the files that Triton reads where it doesn't compile: those between are as large."""


def pack(cache: Path, out: Path) -> int:
    """Write Triton's cache into a file; return its bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with tarfile.open(partial, "w:xz") as archive:
        for path in sorted(cache.rglob("*")):
            if path.is_file() and path.suffix in _KEPT and path.parent.name != "driver":
                archive.add(path, arcname=str(path.relative_to(cache)))
    partial.replace(out)
    return out.stat().st_size


def unpack(out: Path, cache: Path) -> int:
    """Unpack a file of `pack` where Triton looks; return the number of kernels.

    Triton keeps whole paths of a kernel's files, and looks for all that it wrote.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out) as archive:
        archive.extractall(cache, filter="data")
    num_kernels = 0
    for group in cache.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in paths}
        for path in map(Path, here.values()):
            if not path.exists():
                # never read: what the compiler made on its way
                path.touch()
        group.write_text(json.dumps({"child_paths": here}))
        num_kernels += 1
    return num_kernels
