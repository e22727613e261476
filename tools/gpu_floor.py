"""Make an environment as bare as a GPU's machine may be: the oldest Triton, numpy, and torch.

    .venv/bin/python -P tools/gpu_floor.py FOLDER
    make gpu ARGS=--tiny PYTHON=FOLDER/bin/python

torch is the running environment's, by links to it and to what it requires; msgspec, cachetools and
all other packages of the server are missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PINNED = ("triton==3.6.0", "numpy<2.4")
"""What a GPU's path takes at least; that Triton's interpreter needs such a numpy."""
OWN = ("triton", "numpy", "setuptools", "pip")


def required(name: str, found: dict[str, Path]) -> None:
    """Add a distribution's top-level files, and those of what it requires here."""
    try:
        made = distribution(name)
    except PackageNotFoundError:
        # for another system, or an extra
        return
    site = Path(sysconfig.get_path("purelib"))
    tops = {file.parts[0] for file in made.files or () if not file.parts[0].startswith((".", "__pycache__"))}
    new = {top: site / top for top in tops if top not in found and (site / top).exists()}
    if not new:
        return
    found |= new
    for requirement in made.requires or ():
        other = re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and other not in OWN and not other.startswith("nvidia"):
            required(other, found)


def main() -> int:
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *PINNED]
    subprocess.run(pip, check=True)
    found: dict[str, Path] = {}
    required("torch", found)
    site = Path(
        subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    for name, path in found.items():
        (site / name).symlink_to(path)
    check = "import importlib.util as u, torch, triton; print(torch.__version__, triton.__version__); "
    check += "assert not any(map(u.find_spec, ('msgspec', 'cachetools')))"
    subprocess.run([str(python), "-P", "-c", check], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
