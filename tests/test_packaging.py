"""The wheel holds everything that an installation needs, and nothing that would overwrite another's package."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"loraserve", "adapters_store", "loraserve_kernels", "loraserve_migrations"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("loraserve-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


def run_installed(wheel: Path, code: str) -> str:
    """What `code` prints where the wheel is installed and this checkout isn't."""
    installed = wheel.parent / "installed"
    if not installed.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
    # Without site (-S) the checkout's editable hook isn't loaded; the libraries are named by their path instead.
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "HOME": str(wheel.parent)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=variables,
        cwd=wheel.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_our_packages_and_no_other(names: frozenset[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_no_package_is_called_kernels_or_migrations(names: frozenset[str]) -> None:
    assert not {name for name in names if name.startswith(("kernels/", "migrations/", "tests/", "benchmarks/"))}


def test_types_are_for_others_too(names: frozenset[str]) -> None:
    assert "loraserve/py.typed" in names


def test_every_module_of_the_checkout_is_in_the_wheel(names: frozenset[str]) -> None:
    roots = (ROOT, ROOT, ROOT / "kernels", ROOT / "migrations")
    packages = ("loraserve", "adapters_store", "loraserve_kernels", "loraserve_migrations")
    expected = {
        path.relative_to(root).as_posix()
        for root, package in zip(roots, packages, strict=True)
        for path in (root / package).rglob("*.py")
    }
    assert expected <= names


def test_installed_wheel_finds_its_migrations(wheel: Path) -> None:
    code = "from loraserve.db import migrate; import loraserve; print(migrate.head(), loraserve.__file__)"
    head, file = run_installed(wheel, code).split()
    assert head
    assert file.startswith(str(wheel.parent))


def test_installed_wheel_finds_its_demo_pack(wheel: Path) -> None:
    code = "from loraserve.demo.pack import pack_files; print(*pack_files(), sep='\\n')"
    files = [Path(line) for line in run_installed(wheel, code).splitlines()]
    assert {file.name for file in files} >= {"model.safetensors", "adapter_model.safetensors", "CARD.md"}
    assert all(file.is_relative_to(wheel.parent) for file in files)


def test_installed_package_imports_no_torch(wheel: Path) -> None:
    code = "import sys, loraserve; from loraserve import Client; print('torch' in sys.modules, loraserve.__file__)"
    assert run_installed(wheel, code).startswith("False ")


def test_wheel_puts_the_command_on_the_path(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "loraserve = loraserve.cli.main:main" in archive.read(name).decode()
