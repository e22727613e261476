"""Fetch the console's libraries from npm by version and digest, and put them into the tree.

`loraserve/api/console/static/vendor/vendor.json` is the lock: for each package its version, licence
and npm's integrity, and for each file its place in the package and its SHA-256 as it is in the
tree. A package's bare imports are rewritten to relative ones, since a page without inline scripts
has no import map; nothing else of a file is changed.

    .venv/bin/python -P tools/vendor_console.py          # fetch what the lock says, and check it
    .venv/bin/python -P tools/vendor_console.py --lock   # record the digests of other versions
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "loraserve/api/console/static/vendor"
LOCK = FOLDER / "vendor.json"
BARE_IMPORT = re.compile(rb'from"preact"')
SOURCE_MAP = re.compile(rb"\n//# sourceMappingURL=\S+\s*$")


def fetch(name: str, version: str) -> bytes:
    """Return the package's archive, as npm's registry has it."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, f"{name}@{version}"]
        subprocess.run(command, check=True, capture_output=True)
        (archive,) = Path(folder).glob("*.tgz")
        return archive.read_bytes()


def integrity_of(archive: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()


def member(archive: bytes, path: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile(f"package/{path}")
        assert file is not None, path
        return file.read()


def adapted(content: bytes) -> bytes:
    return SOURCE_MAP.sub(b"\n", BARE_IMPORT.sub(b'from"./preact.js"', content))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", action="store_true", help="record digests instead of checking them")
    is_locking = parser.parse_args().lock
    lock: dict[str, Any] = json.loads(LOCK.read_text())
    licences = []
    for name, package in lock.items():
        archive = fetch(name, package["version"])
        if is_locking:
            package["integrity"] = integrity_of(archive)
        elif package["integrity"] != integrity_of(archive):
            sys.exit(f"{name}: the archive has {integrity_of(archive)}; {LOCK} says {package['integrity']}")
        for file, entry in package["files"].items():
            content = adapted(member(archive, entry["from"]))
            digest = hashlib.sha256(content).hexdigest()
            if is_locking:
                entry["sha256"] = digest
            elif entry["sha256"] != digest:
                sys.exit(f"{file}: found {digest}; {LOCK} says {entry['sha256']}")
            (FOLDER / file).write_bytes(content)
        title = f"{name} {package['version']}, {package['licence']}"
        licences.append(f"{title}\n{'-' * len(title)}\n\n{member(archive, 'LICENSE').decode()}")
    (FOLDER / "LICENSES.txt").write_text("\n\n".join(licences))
    if is_locking:
        LOCK.write_text(json.dumps(lock, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
